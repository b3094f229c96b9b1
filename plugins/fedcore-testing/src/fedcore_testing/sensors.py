"""What a hook changes while it runs. A sensor is a context around one call: it reports findings and does not raise."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fedcore.client import BatchStep
from fedcore_testing.findings import IN_A_STEP, Call, Rule
from fedcore_testing.fingerprint import fingerprint, global_settings, random_states, tensor_in
from fedcore_testing.sync import watch_host_sync


@contextmanager
def _random_state(call: Call) -> Iterator[None]:
    before, imported = random_states(), len(sys.modules)
    yield
    if len(sys.modules) != imported:
        return  # a library that this call imported may have drawn; the next call imports nothing
    for source, state in random_states().items():
        if state != before[source]:
            call.report(Rule.RANDOM_STATE, f"draws from {source}'s global random state")


@contextmanager
def _settings(call: Call) -> Iterator[None]:
    before = global_settings()
    yield
    for name, value in global_settings().items():
        if value != before[name]:
            call.report(Rule.SETTINGS, f"changes {name} from {before[name]} to {value}")


@contextmanager
def _self(call: Call) -> Iterator[None]:
    before = {name: fingerprint(value) for name, value in vars(call.plugin).items()}
    yield
    for name, value in vars(call.plugin).items():
        if before.get(name) != fingerprint(value):
            call.report(Rule.SELF, f"changes self.{name}")
            continue
        held = tensor_in(value)
        if held is not None:
            where = f"self.{name}" if held is value else f"the {type(value).__name__} self.{name}"
            call.report(Rule.SELF, f"finds a {type(held).__name__} in {where}")


@contextmanager
def _inputs(call: Call) -> Iterator[None]:
    """Compare versions, which detect an edit to the same values, and values, which detect an edit through ``.data``."""
    named = dict(_read_only(call))
    before = {name: (tensor, tensor._version, tensor.detach().clone()) for name, tensor in named.items()}
    yield
    for name, (tensor, version, value) in before.items():
        # step.gradients_at loads other weights and puts these back.
        touched = tensor._version != version and call.hook != "gradients"
        if touched or not _equal(tensor.detach(), value):
            call.report(Rule.INPUTS, f"edits {name} in place")


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same shape and values; NaN equals NaN."""
    if torch.equal(one, other) or one.shape != other.shape:
        return one.shape == other.shape
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _read_only(call: Call) -> Iterator[tuple[str, Tensor]]:
    arguments, client = call.arguments, call.client
    step = arguments.get("step")
    if isinstance(step, BatchStep):
        yield from ((f"step.{name}", getattr(step, name)) for name in ("y", "indices", "features", "logits"))
        yield from [("step.x", step.x)] if isinstance(step.x, Tensor) else []
        yield from ((f"step.model's {name}", tensor) for name, tensor in step.model.state_dict(keep_vars=True).items())
        yield from ((f"step.reference[{i}]", tensor) for i, tensor in enumerate(step.reference))
    if client is not None:
        session = client._session
        yield "the client's labels", session.data.labels
        if step is None:  # a step has it as step.model
            working = session.working  # values that stay on the client may be set
            shared = {name: value for name, value in working.state.items() if name not in working.layout.personal}
            yield from _tensors("client.model", shared)
        yield from _tensors("client.received", client.received)
        yield from _tensors("the model that the round began with", session.start)
        for name, model in session.working.frozen.items():
            yield from _tensors(f"the frozen {name!r} model", model.module.state_dict())
    server = arguments.get("server")
    if server is not None:
        yield from _tensors("server.model", server.model)
    for name in ("tensors", "mean", "gradients"):
        yield from _tensors(name, arguments.get(name, {}))
    for client_id, tensors in arguments.get("snapshots", {}).items():
        yield from _tensors(f"snapshots[{client_id}]", tensors)
    for update in (*([arguments["update"]] if "update" in arguments else []), *arguments.get("updates", ())):
        yield from _tensors("update.model", update.model)


def _tensors(where: str, tensors: Mapping[str, Any]) -> Iterable[tuple[str, Tensor]]:
    return ((f"{where}[{name!r}]", value) for name, value in tensors.items() if isinstance(value, Tensor))


@contextmanager
def _model(call: Call) -> Iterator[None]:
    if call.client is None:
        yield
        return
    model = call.client.model
    before = _structure(model)
    yield
    after = _structure(model)
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            was, is_ = before.get(name, "nothing"), after.get(name, "nothing")
            change = f"from {was[1]} to {is_[1]}" if was[1] != is_[1] else "by another object"
            call.report(Rule.MODEL, f"replaces the model's {name} {change}")


def _structure(model: nn.Module) -> dict[str, Any]:
    structure: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        structure[name] = (id(parameter), f"{tuple(parameter.shape)}")
        structure[f"{name}'s requires_grad"] = ("", parameter.requires_grad)
    for name, buffer in model.named_buffers():
        structure[name] = (id(buffer), f"{tuple(buffer.shape)}")
    for name, module in model.named_modules():
        structure[f"module {name or 'itself'}"] = (id(module), type(module).__name__)
        structure[f"mode of {name or 'the model'}"] = ("", "training" if module.training else "eval")
    return structure


@contextmanager
def _host_sync(call: Call) -> Iterator[None]:
    if call.hook not in IN_A_STEP:
        yield
        return
    with watch_host_sync(lambda problem: call.report(Rule.HOST_SYNC, f"waits for the device: {problem}")):
        yield


@contextmanager
def _live_weights(call: Call) -> Iterator[None]:
    """A tensor that shares the memory of a weight changes in every step; in a stack it is a copy, and does not."""
    yield
    if call.hook != "begin_local" or call.client is None:
        return
    weights = call.client.model.named_parameters()
    places = {weight.untyped_storage().data_ptr(): name for name, weight in weights if weight.requires_grad}
    for key, value in call.client.scratch.items():
        tensors = (
            part for part in tree_leaves(value) if isinstance(part, Tensor) and not isinstance(part, nn.Parameter)
        )
        if name := next((name for part in tensors if (name := places.get(part.untyped_storage().data_ptr()))), ""):
            call.report(
                Rule.SCRATCH, f"keeps the model's own {name} in client.scratch[{key!r}], which every step changes"
            )


@contextmanager
def _scratch(call: Call) -> Iterator[None]:
    last = call.hook == "pre_upload" or (call.hook == "end_local" and not hasattr(call.plugin, "pre_upload"))
    if not last or call.client is None:
        yield
        return
    before = set(call.client.scratch)
    yield
    for key in sorted(set(call.client.scratch) - before, key=str):
        call.report(Rule.SCRATCH, f"writes client.scratch[{key!r}], which is dropped before any hook can read it")


SENSORS = (_inputs, _model, _self, _live_weights, _scratch, _settings, _random_state, _host_sync)
