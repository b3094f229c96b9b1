"""Checks of the tensors that plugins return on a client, by names of the model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedcore.base.errors import PluginContractError
from fedcore.base.types import Tensors
from fedcore.client.context import context_of
from fedcore.client.session import LocalSession
from fedcore.client.setup import Setup


def check_tensors_fit(
    returned: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    session: LocalSession,
    *,
    plugin: str,
    hook: str,
    names: str,
) -> None:
    """Refuse tensors whose names or shapes do not fit the model.

    :param expected: the model's tensors that the hook may return. The hook may leave some of them out.
    :param names: a description of these names, for the error.
    :raises PluginContractError: with the tensor and the expectation.
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


def chosen_starts(session: LocalSession, setup: Setup) -> Tensors:
    """Call ``begin_local``; return the weights with which plugins start the client, on the device.

    :raises PluginContractError: a plugin returned an undeclared name or a wrong shape, or it edited the model.
    """
    like, starts = session.working.state, Tensors()
    before = {name: tensor._version for name, tensor in like.items()}
    session.requests.open = True
    for plugin, returned in setup.plugins.each("begin_local", client=context_of(session, "")):
        edited = next((name for name, version in before.items() if like[name]._version != version), None)
        if edited is not None:
            raise PluginContractError.of(
                plugin.name,
                f"edits {edited!r} of client.model in place",
                hook="begin_local",
                round=session.round,
                client=session.client,
                hint="declare the names in starts and return their values, so that other plugins start from them, too",
            )
        tensors = returned or {}
        declared = setup.claimed(plugin, "starts", personal=True) if tensors else []
        names = f"names that it declares in starts = {plugin.starts}"
        startable = {name: like[name] for name in declared}
        check_tensors_fit(tensors, startable, session, plugin=plugin.name, hook="begin_local", names=names)
        for name, tensor in tensors.items():
            starts[name] = torch.empty_like(like[name], requires_grad=False).copy_(tensor.detach())
    session.requests.open = False
    return starts
