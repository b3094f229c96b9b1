"""Checks of what plugins return on the server: partial states and cohorts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from fedcore.base.errors import PluginContractError, RejectUpdate
from fedcore.hooks.setup import Setup


def check_partial(setup: Setup, tensors: Mapping[str, Tensor], allowed: Iterable[str], plugin: str, hook: str) -> None:
    """Refuse a partial state that a plugin returned: names it may not set, a wrong layout, values not finite.

    :raises PluginContractError: says which tensor, and what is wrong with it.
    """
    extra = sorted(set(tensors) - set(allowed))
    if extra:
        raise PluginContractError.of(plugin, f"may not set {extra[0]!r}", hook=hook)
    try:
        setup.layout.check(tensors, tensors, "a tensor that does not fit")
    except RejectUpdate as error:
        raise PluginContractError.of(plugin, f"returned {error}", hook=hook) from None


def check_cohort(cohort: Iterable[int], num_clients: int, plugin: str) -> list[int]:
    """Return a cohort in ascending order.

    :raises PluginContractError: an unknown id, a repeated id, or no id.
    """
    ids = [int(client) for client in cohort]
    if not ids or len(set(ids)) != len(ids) or min(ids) < 0 or max(ids) >= num_clients:
        expected = f"distinct ids from 0 to {num_clients - 1}"
        raise PluginContractError.of(plugin, f"returned {ids[:10]}", hook="select_clients", expected=expected)
    return sorted(ids)
