"""Validation of what clients send, before anything uses it: an outcome becomes an update, or is rejected."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Collection, Mapping
from typing import Annotated, Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from fedcore.base.errors import RejectUpdate, lower_first
from fedcore.base.protocols import PROTOCOLS
from fedcore.base.tensors import bytes_of, largest_values, out_of_range
from fedcore.base.types import ClientUpdate, Tensors
from fedcore.client.messages import ClientResult, ClientTask, unpack_update
from fedcore.client.setup import Setup
from fedcore.client.store import ClientStore
from fedcore.data import Partition

MIB = 1 << 20
PAYLOAD_FACTOR = 16
"""One plugin may upload this many times the model's bytes: C covariances are wider than a small model."""
PAYLOAD_FLOOR = 64 * MIB
METRICS_BYTES = 1 << 16
CPU = torch.device("cpu")
LARGEST_LOSS = float(torch.finfo(torch.float32).max)  # sums of more could overflow, which JSON cannot hold

PLAIN = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
)
"""Accepted dtypes: those that can be summed and tested for nan."""

_FINITE_JSON = json.JSONEncoder(allow_nan=False)

Model = TypeVar("Model", bound=BaseModel)
Count = Annotated[int, Field(ge=0, le=1 << 53)]
Positive = Annotated[int, Field(ge=1, le=1 << 53)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Loss = Annotated[float, Field(ge=-LARGEST_LOSS, le=LARGEST_LOSS)]


class _Strict(BaseModel):
    # Other keys are ignored: an engine may add measurements.
    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, extra="ignore")


class _Metrics(_Strict):
    """What plugins report in JSON; the core's own part of it."""

    losses: dict[str, Loss] = {}


class UpdateMeta(_Strict):
    """The numbers uploaded beside an update's tensors. Strict: True is not a number, 3.0 is not a count."""

    client: Count
    samples: Positive
    steps: Positive
    lr: float
    momentum: float
    metrics: _Metrics
    version: Count | None
    frozen: list[str] = []
    seconds: Seconds
    plugin_seconds: dict[str, Seconds]


class _Counts(_Strict):
    correct: list[Count]
    total: list[Count]
    loss: Annotated[float, Field(allow_inf_nan=True)]  # a model that diverged
    confusion: list[list[Count]] = []


class UpdateValidator:
    """Validates what clients send against what the server asked for and knows about them.

    Every method raises ``RejectUpdate``, which names the client, what it sent and what was expected. The content of a
    plugin's payload is not validated here: the collector rejects an update that makes the plugin's hooks raise.

    :param store: where clients keep their state.
    :param updates_on: the device on which updates' tensors may be as well; all others are on the CPU.
    :ivar encoded: the parameters that an update may lack until ``pre_aggregate`` of the plugin that ``encodes`` them.
    """

    def __init__(self, setup: Setup, partition: Partition, store: ClientStore, updates_on: torch.device) -> None:
        self._updates_on = updates_on
        self._layout, self._uploads = setup.layout, setup.uploads
        self._config, self._partition, self._store = setup.config, partition, store
        self._trainable = setup.layout.trainable.intersection(setup.layout.shared)
        self._shared = frozenset(setup.uploads.shared)
        self._plugins = {plugin.name for plugin in setup.plugins}
        self.encoded = {name for plugin in setup.plugins for name in setup.claimed(plugin, "encodes")}
        hooks = ("end_local", "pre_upload", "guard_upload")
        self._senders = {plugin.name for hook in hooks for plugin in setup.plugins.implementers(hook)}
        shapes = setup.layout.shapes.values()
        model = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)
        limit = setup.config.max_payload
        self._limit = max(PAYLOAD_FLOOR, PAYLOAD_FACTOR * model) if limit is None else limit * MIB

    def update(self, task: ClientTask, outcome: Any, lr: float) -> tuple[ClientUpdate, UpdateMeta, float]:
        """Return the update of a finished training, the numbers beside it, and the largest magnitude in its tensors.

        :param lr: the learning rate that the server set.
        """
        what, tensors = f"client {task.client}", self._tensors(task, outcome, self._updates_on)
        meta = _parsed(UpdateMeta, outcome.meta, what)
        self._check_claims(meta, task, lr)
        losses, given = meta.metrics.losses, outcome.meta["metrics"]
        self._check_metrics(given, losses, what)
        metrics = {**given, "losses": losses}
        try:
            update = unpack_update(tensors, {**vars(meta), "metrics": metrics})
        except ValueError as error:
            raise RejectUpdate(f"{what}: {error}") from None
        for plugin in sorted(set(update.payload) & self._plugins - self._senders):
            raise RejectUpdate(f"{what}: sent tensors for plugin {plugin!r}, whose clients send none")
        return update, meta, self.check(task, update, encoded=True)

    def check(self, task: ClientTask, update: ClientUpdate, *, encoded: bool = False) -> float:
        """Validate an update as it is aggregated, after server-side hooks changed it.

        :param encoded: whether parameters that plugins encode may be absent.
        :returns: the largest magnitude of a value.
        """
        what = f"client {task.client}"
        if update.client != task.client:
            raise RejectUpdate(f"{what}: the update says that it is client {update.client}'s")
        for name, number in (("samples", update.samples), ("steps", update.steps)):
            if type(number) is not int or number < 1:
                raise RejectUpdate(f"{what}: {name} is {number!r}, expected a whole number of at least 1")
        absent = self.encoded.difference(update.model) if encoded else frozenset[str]()
        largest = [self._uploads.check(update.model, self._shared - absent, what)]
        for plugin, tensors in update.payload.items():
            if plugin not in self._plugins:
                raise RejectUpdate(f"{what}: sent tensors for {plugin!r}, which is no plugin of this run")
            largest.append(self._check_extra(tensors, what, f"plugin {plugin!r}"))
        return max(largest)

    def snapshot(self, task: ClientTask, outcome: Any, names: Collection[str], epoch: int) -> Tensors:
        """Return the tensors of a client that paused at an exchange."""
        what = f"client {task.client} at the exchange"
        tensors = self._tensors(task, outcome)
        if outcome.meta.get("paused") != epoch:
            raise RejectUpdate(f"{what}: did not pause at epoch {epoch}")
        self._layout.check(tensors, names, what)
        return tensors

    def answer(self, task: ClientTask, outcome: Any) -> tuple[Tensors, float]:
        """Return the tensors of an answer to ``server.ask``, and the largest magnitude in them."""
        tensors = self._tensors(task, outcome)
        return tensors, self._check_extra(tensors, f"client {task.client}", f"plugin {task.meta['plugin']!r}")

    def counts(self, task: ClientTask, outcome: Any, totals: Mapping[str, int], classes: int) -> dict[str, Any]:
        """Return a client's counts by protocol, as :func:`fedcore.client.evaluation.evaluate` gives them.

        :param totals: protocol -> number of samples that it is evaluated on; exactly these protocols are expected,
            without those of the client's own model where ``failed`` says why that cannot be evaluated.
            A confusion matrix is there where the task asks for it, for the client's own model.
        """
        self._tensors(task, outcome)
        found, failed = {}, self.own_model_failed(outcome)
        for protocol, samples in totals.items():
            if failed and PROTOCOLS[protocol].own_model:
                continue
            what = f"client {task.client}: evaluation {protocol!r}"
            counts = _parsed(_Counts, outcome.meta.get(protocol), what)
            fits = len(counts.correct) == len(counts.total) == classes and sum(counts.total) == samples
            if not fits or any(c > t for c, t in zip(counts.correct, counts.total)):
                raise RejectUpdate(f"{what}: is no count of {samples} samples of {classes} classes")
            asked = task.meta["confusion"] and PROTOCOLS[protocol].own_model
            if asked and not _is_confusion_of(counts):
                raise RejectUpdate(f"{what}: its confusion matrix does not match its counts of {classes} classes")
            found[protocol] = counts.model_dump(exclude=set() if asked else {"confusion"})
        return found

    @staticmethod
    def own_model_failed(outcome: ClientResult) -> str:
        """Return why a client's own model cannot be evaluated; empty where it can."""
        failed = outcome.meta.get("failed", "")
        return failed if isinstance(failed, str) else ""

    def _tensors(self, task: ClientTask, outcome: Any, device: torch.device = CPU) -> Tensors:
        """Return an outcome's tensors, detached, after checking that it answers this task."""
        what, places = f"client {task.client}", (CPU.type, device.type)
        if not isinstance(outcome, ClientResult):
            raise RejectUpdate(f"{what}: sent a {type(outcome).__name__}, expected a result")
        if outcome.task_id != task.id:
            raise RejectUpdate(f"{what}: answers task {_short(outcome.task_id)}, but was given {task.id!r}")
        if not isinstance(outcome.tensors, dict) or not isinstance(outcome.meta, dict):
            raise RejectUpdate(f"{what}: a result has tensors by name and a mapping of numbers, this one has not")
        for name, tensor in outcome.tensors.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise RejectUpdate(f"{what}: {_short(name)} is a {type(tensor).__name__}, expected a tensor")
            if tensor.dtype not in PLAIN or tensor.layout != torch.strided or tensor.device.type not in places:
                raise RejectUpdate(
                    f"{what}: {_short(name)} is {tensor.dtype}, {tensor.layout} on {tensor.device.type}; "
                    "expected a dense tensor on the CPU of a common dtype"
                )
        return {name: tensor.detach() if tensor.requires_grad else tensor for name, tensor in outcome.tensors.items()}

    def _check_claims(self, meta: UpdateMeta, task: ClientTask, lr: float) -> None:
        config, held = self._config, self._partition.train.size(task.client)
        unit, work = config.local_work
        work = task.meta.get(unit, work)
        most = work * config.batches(held) if unit == "epochs" else work
        kept = meta.version is None or (meta.version == task.round and self._store.has(task.client, task.round))
        unknown = next((name for name in meta.frozen if name not in self._trainable), None)
        if meta.client != task.client:
            raise _unexpected(task, "client", meta.client, f"{task.client}")
        if meta.samples > held:
            raise _unexpected(task, "samples", meta.samples, f"at most the {held} that it holds")
        if meta.steps > most:
            in_epochs = f", in {work} epochs" if unit == "epochs" else ""
            raise _unexpected(task, "steps", meta.steps, f"at most {most}{in_epochs}")
        if meta.lr != lr:
            raise _unexpected(task, "lr", meta.lr, f"the round's {lr}")
        if meta.momentum != config.momentum:
            raise _unexpected(task, "momentum", meta.momentum, f"the run's {config.momentum}")
        if unknown is not None:
            names = "names of trainable shared parameters"
            raise _unexpected(task, "frozen", f"{_short(unknown)} among others", names)
        if not kept:
            states = f"a state of round {task.round} that is there, or None"
            raise _unexpected(task, "version", meta.version, states)

    def _check_metrics(self, given: Any, losses: Mapping[str, float], what: str) -> None:
        """Refuse metrics that are not JSON of at most METRICS_BYTES, and losses of plugins that the run has not."""
        try:
            size = len(_FINITE_JSON.encode(given))
        except (TypeError, ValueError, RecursionError) as error:
            raise RejectUpdate(f"{what}: metrics are no JSON of finite numbers ({error})") from None
        if size > METRICS_BYTES:
            raise RejectUpdate(f"{what}: metrics take {size} bytes, at most {METRICS_BYTES} are taken")
        for name in losses:
            if name != "task" and name not in self._plugins and name.partition(".")[0] not in self._plugins:
                raise RejectUpdate(f"{what}: loss {_short(name)} belongs to no plugin of this run")

    def _check_extra(self, tensors: Mapping[str, Tensor], what: str, sender: str) -> float:
        size = bytes_of(tensors)
        if size > self._limit:
            raise RejectUpdate(
                f"{what}: the tensors of {sender} take {size / MIB:.1f} MiB, at most {self._limit / MIB:.0f} are "
                "taken; --max-payload allows more"
            )
        largest = largest_values(tensors)
        broken = out_of_range(largest)
        if broken:
            raise RejectUpdate(f"{what}: {broken[0]!r} of {sender} {broken[1]}")
        return max(largest.values(), default=0.0)


def _is_confusion_of(counts: _Counts) -> bool:
    """Whether the matrix is square, has the samples of each class in its rows and the correct ones on its diagonal."""
    rows, classes = counts.confusion, len(counts.total)
    if len(rows) != classes or any(len(row) != classes for row in rows):
        return False
    return [sum(row) for row in rows] == counts.total and [row[c] for c, row in enumerate(rows)] == counts.correct


def _parsed(model: type[Model], value: Any, what: str) -> Model:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f" {part}" for part in first["loc"][:3])
        given = "" if first["type"] == "missing" else f" (given: {_short(first['input'])})"
        problem = first["msg"].partition(" or instance of ")[0]  # of a class that no client knows
        raise RejectUpdate(f"{what}:{where}: {lower_first(problem)}{given}") from None


def _unexpected(task: ClientTask, name: str, value: Any, expected: str) -> RejectUpdate:
    return RejectUpdate(f"client {task.client}: {name} is {value}, expected {expected}")


def _short(value: Any) -> str:
    """Return a value as a short text for a message."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer of thousands of digits
        return f"a {type(value).__name__} beyond writing"
