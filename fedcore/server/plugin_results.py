"""Checks of plugins' results on the server: partial states and cohorts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch import Tensor

from fedcore.base.errors import PluginContractError, RejectUpdate
from fedcore.client.setup import Setup
from fedcore.hooks.checks import whole_numbers


def check_partial(setup: Setup, tensors: Mapping[str, Tensor], allowed: Iterable[str], plugin: str, hook: str) -> None:
    """Refuse tensors of a plugin with names that it may not set, a wrong layout, or values that are not finite.

    :raises PluginContractError: with the tensor's name and the problem.
    """
    extra = sorted(set(tensors) - set(allowed))
    if extra:
        raise PluginContractError.of(plugin, f"may not set {extra[0]!r}", hook=hook)
    try:
        setup.layout.check(tensors, tensors, "a tensor that does not fit", most=math.inf)
    except RejectUpdate as error:
        raise PluginContractError.of(plugin, f"returned {error}", hook=hook) from None


def check_cohort(cohort: Iterable[int], setup: Setup, plugin: str) -> dict[int, int | None]:
    """Return a cohort in ascending order: client -> its local epochs, or None for the run's local epochs.

    :raises PluginContractError: the cohort is empty, an id is unknown or repeated, a number is not whole, or a client
        cannot train so many epochs.
    """
    ids, clients = whole_numbers(cohort, plugin, "select_clients"), setup.config.clients
    if not ids or len(set(ids)) != len(ids) or min(ids) < 0 or max(ids) >= clients:
        expected = f"distinct ids from 0 to {clients - 1}"
        raise PluginContractError.of(plugin, f"returned {ids[:10]}", hook="select_clients", expected=expected)
    if not isinstance(cohort, Mapping):
        return dict.fromkeys(sorted(ids))
    if setup.config.local_steps is not None:
        found, hint = "gives clients local epochs, but the run has --local-steps", "leave out --local-steps"
        raise PluginContractError.of(plugin, found, hook="select_clients", hint=hint)
    most, fewest = setup.config.local_epochs, max(setup.breaks, default=0) + 1
    given = dict(zip(ids, cohort.values(), strict=True))
    for client, epochs in given.items():
        if type(epochs) is not int or not fewest <= epochs <= most:
            after = f", after the exchange at epoch {fewest - 1}" if fewest > 1 else ""
            expected = f"a whole number from {fewest} to {most} (--local-epochs){after}"
            found = f"gives client {client} {epochs!r} local epochs"
            raise PluginContractError.of(plugin, found, hook="select_clients", expected=expected)
    return {client: given[client] for client in sorted(ids)}
