"""Watch a plugin's hooks in a run: the changes, random draws, host synchronisations and result of each call.

A sensor is a context around one call of a hook. It reports findings and does not raise, so that one run gives
all of them, each with its :class:`Rule`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from fedcore.base.types import ClientUpdate, Loss
from fedcore.client.context import SessionContext, context_of
from fedcore.client.step import BatchStep
from fedcore.hooks.checks import HOOKS, problem_with
from fedcore.hooks.plugin import Plugin
from fedcore.storage.state import flatten
from fedcore.testing.fingerprint import fingerprint, global_settings, random_states, tensor_in
from fedcore.testing.gradients import trains
from fedcore.testing.sync import watch_host_sync

IN_A_STEP = ("task_loss", "local_loss", "gradients", "observe")
SENT = ("end_local", "broadcast", "answer", "pre_upload")


class Rule(Enum):
    """A rule for hooks."""

    RANDOM_STATE = auto()
    SETTINGS = auto()
    SELF = auto()
    INPUTS = auto()
    MODEL = auto()
    HOST_SYNC = auto()
    LOSS = auto()
    PAYLOAD = auto()
    GRADIENTS = auto()
    SAMPLES = auto()
    SCRATCH = auto()
    BROADCAST = auto()


@dataclass(frozen=True)
class Finding:
    """One broken rule.

    :param what: the observation; the message starts with the hook's name.
    """

    rule: Rule
    hook: str
    what: str


@dataclass(frozen=True)
class Call:
    """One call of a hook, as sensors see it.

    :param idle: see :func:`fedcore.testing.gradients.trains`.
    """

    hook: str
    plugin: Plugin
    arguments: Mapping[str, Any]
    report: Callable[[Rule, str], None]
    idle: dict[str, float]

    @property
    def client(self) -> SessionContext | None:
        """The client at work; None on the server. Not recorded as a read (see ``Batch.depends_on``)."""
        step = self.arguments.get("step")
        client = _client_of(step) if isinstance(step, BatchStep) else self.arguments.get("client")
        return client if isinstance(client, SessionContext) else None  # on the server ``broadcast`` takes an id


def watched(cls: type[Plugin], findings: list[Finding]) -> type[Plugin]:
    """Return a subclass that behaves the same and records the findings, each once."""
    idle: dict[str, float] = {}
    hooks = {hook: _around(hook, getattr(cls, hook), findings, idle) for hook in HOOKS if hasattr(cls, hook)}
    return type(cls.__name__, (cls,), {**hooks, "__doc__": cls.__doc__, "__module__": cls.__module__})


def _around(hook: str, function: Any, findings: list[Finding], idle: dict[str, float]) -> Any:
    names = list(inspect.signature(function).parameters)[1:]

    @functools.wraps(function)
    def call(plugin: Plugin, *given: Any) -> Any:
        def report(rule: Rule, what: str) -> None:
            finding = Finding(rule, hook, what)
            if finding not in findings:
                findings.append(finding)

        seen = Call(hook, plugin, dict(zip(names, given, strict=True)), report, idle)
        with ExitStack() as stack:
            for sensor in SENSORS:
                stack.enter_context(sensor(seen))
            result = function(plugin, *given)
        for inspect_result in INSPECTORS:
            inspect_result(seen, result)
        if hook == "broadcast":
            if "client" in names:  # another client's message in between must not change this one's
                function(
                    plugin, *(max(0, value - 1) if name == "client" else value for name, value in zip(names, given))
                )
            _repeat(seen, result, function(plugin, *given))
        return result

    return call


# --- around a call ---------------------------------------------------------------------------------------------


@contextmanager
def _random_state(call: Call) -> Iterator[None]:
    before = random_states()
    yield
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
    record = fingerprint(call.arguments.get("record"))
    yield
    for name, (tensor, version, value) in before.items():
        # step.gradients_at loads other weights and puts these back.
        touched = tensor._version != version and call.hook != "gradients"
        if touched or not torch.equal(tensor.detach(), value):
            call.report(Rule.INPUTS, f"edits {name} in place")
    if fingerprint(call.arguments.get("record")) != record:
        call.report(Rule.INPUTS, "edits record in place")


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
        if call.hook == "begin_local":
            yield from _tensors("client.model", session.working.state)
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
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        found[name] = (id(parameter), f"{tuple(parameter.shape)}")
        found[f"{name}'s requires_grad"] = ("", parameter.requires_grad)
    for name, buffer in model.named_buffers():
        found[name] = (id(buffer), f"{tuple(buffer.shape)}")
    for name, module in model.named_modules():
        found[f"module {name or 'itself'}"] = (id(module), type(module).__name__)
        found[f"mode of {name or 'the model'}"] = ("", "training" if module.training else "eval")
    return found


@contextmanager
def _host_sync(call: Call) -> Iterator[None]:
    if call.hook not in IN_A_STEP:
        yield
        return
    with watch_host_sync(lambda problem: call.report(Rule.HOST_SYNC, f"waits for the device: {problem}")):
        yield


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


SENSORS = (_inputs, _model, _self, _scratch, _settings, _random_state, _host_sync)


# --- what a call returned --------------------------------------------------------------------------------------


def _loss(call: Call, result: Any) -> None:
    if call.hook == "task_loss":
        terms: list[Any] = [] if result is None else [Loss(result)]
    elif call.hook == "local_loss":
        terms = [] if result is None else result if isinstance(result, list) else [result]
    else:
        return
    for term in terms:
        if not isinstance(term, Loss):
            call.report(Rule.LOSS, f"returns {type(term).__name__}, expected Loss, a list of Loss or None")
        elif not isinstance(term.value, Tensor) or term.value.ndim:
            shape = tuple(term.value.shape) if isinstance(term.value, Tensor) else type(term.value).__name__
            call.report(Rule.LOSS, f"returns a value of {shape}, expected a tensor of shape (); forgot .mean()?")
        elif isinstance(term.weight, Tensor) or term.weight != 0:
            if not bool(term.value.isfinite()):
                call.report(Rule.LOSS, f"returns {term.value.item()}")
            if not trains(call.arguments.get("step"), term, f"{call.hook} {term.name}", call.idle):
                call.report(Rule.LOSS, "returns a term without a gradient to the local model, which trains nothing")


def _sent(call: Call, result: Any) -> Any:
    """Return the tensors that a hook sends by name; those of all plugins under their names where it guards uploads."""
    if not isinstance(result, ClientUpdate):
        return result
    return flatten(result.payload)[0] if call.plugin.guards_uploads else result.payload


def _payload(call: Call, result: Any) -> None:
    if call.hook not in SENT:
        return
    tensors = _sent(call, result)
    problem = problem_with("end_local", tensors)
    if problem:
        call.report(Rule.PAYLOAD, problem.removesuffix(" or None"))
        return
    for name, tensor in (tensors or {}).items():
        if not bool(tensor.isfinite().all()):
            call.report(Rule.PAYLOAD, f"sends {name!r} with values that are not finite")


def _samples(call: Call, result: Any) -> None:
    """Search the uploads for one of the client's inputs, value for value."""
    tensors = _sent(call, result)
    if call.hook not in SENT or call.client is None or not isinstance(tensors, Mapping):
        return
    data = call.client._session.data
    batch = data.inputs(torch.arange(len(data)))
    if not isinstance(batch, Tensor):
        return
    inputs = batch.flatten(1).double()  # (n, numbers of one input)
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.numel() and tensor.numel() % inputs.shape[1] == 0:
            rows = tensor.detach().cpu().double().reshape(-1, inputs.shape[1])
            if any(bool((inputs == row).all(dim=1).any()) for row in rows):
                call.report(Rule.SAMPLES, f"sends {name!r}, which holds a client's own inputs")


def _gradients(call: Call, result: Any) -> None:
    if call.hook != "gradients" or problem_with(call.hook, result):
        return
    for name, tensor in (result or {}).items():
        if not bool(tensor.isfinite().all()):
            call.report(Rule.GRADIENTS, f"returns {name!r} with values that are not finite")


INSPECTORS = (_loss, _gradients, _payload, _samples)


def _repeat(call: Call, first: Any, second: Any) -> None:
    if fingerprint(dict(first or {})) != fingerprint(dict(second or {})):
        call.report(Rule.BROADCAST, "gives other tensors when it is called again")


def _client_of(step: BatchStep) -> SessionContext:
    client = context_of(step._batch.session, step._plugin or "")
    assert isinstance(client, SessionContext)
    return client
