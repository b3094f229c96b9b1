"""Checks of what plugins return on a client: tensors by the names of the model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fedcore.base.errors import PluginContractError
from fedcore.client.session import LocalSession


def check_tensors_fit(
    returned: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    session: LocalSession,
    *,
    plugin: str,
    hook: str,
    names: str,
) -> None:
    """Refuse tensors that have other names or shapes than those of the model that a hook may return.

    :param expected: the model's tensors with these names; some may be left out.
    :param names: which names these are, for the error.
    :raises PluginContractError: names the tensor and the expectation.
    """
    for name, tensor in returned.items():
        shape = expected[name].shape if name in expected else None
        if tensor.shape != shape:
            raise PluginContractError.of(
                plugin,
                f"returned {name!r} of shape {tuple(tensor.shape)}",
                hook=hook,
                round=session.round,
                client=session.client,
                expected=names if shape is None else str(tuple(shape)),
            )
