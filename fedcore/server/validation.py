"""Validation of the outcomes that clients send and of the tensors that plugins return, before anything uses them."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Collection, Iterable, Mapping
from functools import cache, partial
from typing import Annotated, Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from fedcore.base.config import TrainingOptions
from fedcore.base.errors import PluginContractError, RejectUpdate, lower_first
from fedcore.base.metrics import Counts
from fedcore.base.protocols import PROTOCOLS
from fedcore.base.tensors import bytes_of, largest_values, too_large, unflatten
from fedcore.base.types import ClientUpdate, Tensors
from fedcore.client.messages import ClientTask, Evaluation, Outcome, Pause, Reply
from fedcore.client.setup import Setup
from fedcore.client.store import ClientStore
from fedcore.data import Partition

MIB = 1 << 20
PAYLOAD_FACTOR = 16
"""One plugin may upload this many times the model's bytes: C covariance matrices are larger than a small model."""
PAYLOAD_FLOOR = 64 * MIB
METRICS_BYTES = 1 << 16
CPU = torch.device("cpu")
FLOAT32_MAX = float(torch.finfo(torch.float32).max)  # sums of larger numbers could become inf, which JSON lacks

PLAIN = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
)
"""The accepted dtypes. They can be summed and tested for nan."""

_FINITE_JSON = json.JSONEncoder(allow_nan=False)

Model = TypeVar("Model", bound=BaseModel)
Expected = TypeVar("Expected", ClientUpdate, Pause, Reply, Evaluation)
Count = Annotated[int, Field(ge=0, le=1 << 53)]
Positive = Annotated[int, Field(ge=1, le=1 << 53)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Summable = Annotated[float, Field(ge=-FLOAT32_MAX, le=FLOAT32_MAX)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, from_attributes=True)


class _Metrics(_Strict):
    """The core's own part of an update's metrics. The other metrics are free JSON."""

    losses: dict[str, Summable] = {}


class _Claims(_Strict):
    """The fields of an update next to its tensors. They are strict: True is not a number, 3.0 is not a count."""

    client: Count
    samples: Positive
    steps: Positive
    lr: float
    momentum: float
    metrics: _Metrics
    frozen: frozenset[str]
    version: Count | None
    seconds: Seconds
    plugin_seconds: dict[str, Seconds]


class UpdateValidator:
    """Validates outcomes of clients against the server's tasks and against its knowledge of the clients.

    Every method raises ``RejectUpdate`` with the client, the value that it sent and the expectation. The validator does
    not check the content of a plugin's payload: the collector rejects an update for which the plugin's hooks raise.

    :param store: the store of the clients' states.
    """

    def __init__(self, setup: Setup, partition: Partition, store: ClientStore) -> None:
        self._updates_on = CPU if setup.reads_updates else setup.placement.device
        self._layout, self._uploads = setup.layout, setup.uploads
        self._partition, self._store = partition, store
        self._training: TrainingOptions = setup.config
        self._trainable = setup.layout.trainable.intersection(setup.layout.shared)
        self._shared = frozenset(setup.uploads.shared)
        self._metrics, self._plugins = setup.metrics, setup.plugins.namespaces
        no_samples = torch.zeros(0, setup.task.num_classes), torch.zeros(0, dtype=torch.int64)
        self._no_counts = cache(partial(setup.task.kind.count, *no_samples))
        self.encoded = {name for plugin in setup.plugins for name in setup.claimed(plugin, "encodes")}
        """The parameters that an update may lack until ``pre_aggregate`` of the plugin that ``encodes`` them."""
        hooks = ("end_local", "pre_upload", "guard_upload")
        self._senders = {plugin.name for hook in hooks for plugin in setup.plugins.implementers(hook)}
        model_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in setup.layout.shapes.values())
        limit = setup.config.max_payload
        self._limit = max(PAYLOAD_FLOOR, PAYLOAD_FACTOR * model_bytes) if limit is None else limit * MIB

    def update(self, task: ClientTask, outcome: Outcome, lr: float) -> tuple[ClientUpdate, float]:
        """Return the update of a finished training, and the largest magnitude in its model and payload.

        :param lr: the learning rate that the server set.
        """
        subject, update = f"client {task.client}", _expected(ClientUpdate, outcome, task)
        _check_plain(update.model, subject, self._updates_on)
        claims = _parsed(_Claims, vars(update), subject)
        self._check_claims(claims, task, lr)
        self._check_metrics(update.metrics, claims.metrics.losses, subject)
        for plugin in sorted({self._plugins.get(name, "") for name in update.payload} - {"", *self._senders}):
            raise RejectUpdate(f"{subject}: sent tensors for plugin {plugin!r}, which has no hook that sends tensors")
        return update, self.check(task, update, encoded=True)

    def check(self, task: ClientTask, update: ClientUpdate, *, encoded: bool = False) -> float:
        """Validate an update before it is aggregated; hooks of the server may have changed it.

        Return the largest magnitude in its model and payload.

        :param encoded: whether parameters that plugins encode may be absent.
        """
        subject = f"client {task.client}"
        if update.client != task.client:
            raise RejectUpdate(f"{subject}: the update says that it comes from client {update.client}")
        for name, number in (("samples", update.samples), ("steps", update.steps)):
            if type(number) is not int or number < 1:
                raise RejectUpdate(f"{subject}: {name} is {number!r}, expected a whole number of at least 1")
        absent = self.encoded.difference(update.model) if encoded else frozenset[str]()
        largest = self._uploads.check(update.model, self._shared - absent, subject)
        for plugin, tensors in update.payload.items():
            if plugin not in self._plugins:
                raise RejectUpdate(f"{subject}: sent tensors for {plugin!r}, which is not a plugin of this run")
            _check_plain(tensors, subject, self._updates_on)
            largest = max(largest, self._check_extra(tensors, subject, f"plugin {plugin!r}"))
        return largest

    def snapshot(self, task: ClientTask, outcome: Outcome, names: Collection[str], epoch: int) -> Tensors:
        """Return the tensors of a client that paused at an exchange."""
        subject, pause = f"client {task.client} at the exchange", _expected(Pause, outcome, task)
        if pause.epoch != epoch:
            raise RejectUpdate(f"{subject}: did not pause at epoch {epoch}")
        _check_plain(pause.tensors, subject)
        self._layout.check(pause.tensors, names, subject)
        return pause.tensors

    def answer(self, task: ClientTask, outcome: Outcome) -> Tensors:
        """Return the tensors of an answer to ``server.ask``."""
        subject, tensors = f"client {task.client}", _expected(Reply, outcome, task).tensors
        _check_plain(tensors, subject)
        self._check_extra(tensors, subject, f"plugin {task.meta['plugin']!r}")
        return tensors

    def evaluation(
        self, task: ClientTask, outcome: Outcome, totals: Mapping[str, int]
    ) -> tuple[dict[str, Counts], str]:
        """Return a client's counts by protocol.

        The second value says why the client's own model cannot be evaluated. The counts then lack its protocols. They
        have a confusion matrix for the client's own model if the task asks for it, and the counts of the run's metrics.

        :param totals: protocol -> the number of samples of its evaluation. Exactly these protocols are expected.
        """
        subject, evaluation = f"client {task.client}", _expected(Evaluation, outcome, task)
        _check_plain(evaluation.tensors, subject)
        if not isinstance(evaluation.failed, str):
            raise RejectUpdate(f"{subject}: failed is {reprlib.repr(evaluation.failed)}, expected a text")
        counts, groups = {}, unflatten(evaluation.tensors)
        for protocol, samples in totals.items():
            own_model = PROTOCOLS[protocol].own_model
            if evaluation.failed and own_model:
                continue
            tensors, matrix = groups.get(protocol, {}), task.meta["confusion"] and own_model
            try:
                counts[protocol] = Counts.received(tensors, samples, self._no_counts(confusion=matrix), self._metrics)
            except (ValueError, PluginContractError) as error:
                raise RejectUpdate(f"{subject}: evaluation {protocol!r}: {error}") from None
        return counts, evaluation.failed

    def _check_claims(self, claims: _Claims, task: ClientTask, lr: float) -> None:
        training, samples = self._training, self._partition.train.size(task.client)
        unit, work = training.work_of(task.meta)
        most = work * training.batches(samples) if unit == "epochs" else work
        version = claims.version is None or (claims.version == task.round and self._store.has(task.client, task.round))
        for name, holds, template in (
            ("client", claims.client == task.client, "{task.client}"),
            ("samples", claims.samples <= samples, "at most the {samples} that it holds"),
            ("steps", claims.steps <= most, "at most {most}" + ", in {work} epochs" * (unit == "epochs")),
            ("lr", claims.lr == lr, "the round's {lr}"),
            ("momentum", claims.momentum == training.momentum, "the run's {training.momentum}"),
            ("frozen", claims.frozen <= self._trainable, "names of trainable shared parameters"),
            ("version", version, "a state of round {task.round} that is there, or None"),
        ):
            if not holds:
                expected = template.format(task=task, samples=samples, most=most, work=work, lr=lr, training=training)
                raise RejectUpdate(
                    f"client {task.client}: {name} is {reprlib.repr(getattr(claims, name))}, expected {expected}"
                )

    def _check_metrics(self, metrics: Any, losses: Mapping[str, float], subject: str) -> None:
        """Refuse metrics that are not JSON of at most METRICS_BYTES, and losses of unknown plugins."""
        try:
            others = {name: value for name, value in metrics.items() if name != "losses"}
            size = sum(map(len, losses)) + (len(_FINITE_JSON.encode(others)) if others else 0)  # losses are numbers
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            raise RejectUpdate(f"{subject}: metrics are not JSON with finite numbers ({error})") from None
        if size > METRICS_BYTES:
            raise RejectUpdate(f"{subject}: metrics take {size} bytes, at most {METRICS_BYTES} are allowed")
        for name in losses:
            if name != "task" and name not in self._plugins and name.partition(".")[0] not in self._plugins:
                raise RejectUpdate(f"{subject}: loss {reprlib.repr(name)} belongs to no plugin of this run")

    def _check_extra(self, tensors: Mapping[str, Tensor], subject: str, sender: str) -> float:
        if (size := bytes_of(tensors)) > self._limit:
            raise RejectUpdate(
                f"{subject}: the tensors of {sender} take {size / MIB:.1f} MiB, at most {self._limit / MIB:.0f} are "
                "allowed; --max-payload sets this limit"
            )
        largest = largest_values(tensors)
        if broken := too_large(largest):
            raise RejectUpdate(f"{subject}: {broken[0]!r} of {sender} {broken[1]}")
        return max(largest.values(), default=0.0)


def check_partial(setup: Setup, tensors: Mapping[str, Tensor], allowed: Iterable[str], plugin: str, hook: str) -> None:
    """Refuse tensors of a plugin with names that it may not set, a wrong layout, or values that are not finite.

    :raises PluginContractError: with the tensor's name and the problem.
    """
    if extra := sorted(set(tensors) - set(allowed)):
        raise PluginContractError.of(plugin, f"may not set {extra[0]!r}", hook=hook)
    try:
        setup.layout.check(tensors, tensors, "a tensor that does not fit", most=math.inf)
    except RejectUpdate as error:
        raise PluginContractError.of(plugin, f"returned {error}", hook=hook) from None


def _expected(kind: type[Expected], outcome: Outcome, task: ClientTask) -> Expected:
    if not isinstance(outcome, kind):
        raise RejectUpdate(f"client {task.client}: sent {type(outcome).__name__}, expected {kind.__name__}")
    return outcome


def _check_plain(tensors: Mapping[str, Tensor], subject: str, device: torch.device = CPU) -> None:
    """Refuse anything but a mapping of names to dense tensors of a common dtype, on the CPU or this device."""
    if not isinstance(tensors, dict):
        raise RejectUpdate(f"{subject}: sent a {type(tensors).__name__}, expected tensors by name")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise RejectUpdate(f"{subject}: {reprlib.repr(name)} is a {type(tensor).__name__}, expected a tensor")
        places = (CPU.type, device.type)
        if tensor.dtype not in PLAIN or tensor.layout != torch.strided or tensor.device.type not in places:
            raise RejectUpdate(
                f"{subject}: {reprlib.repr(name)} is {tensor.dtype}, {tensor.layout} on {tensor.device.type}; "
                "expected a dense tensor on the CPU of a common dtype"
            )


def _parsed(model: type[Model], value: Any, subject: str) -> Model:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        path = "".join(f" {part}" for part in problem["loc"][:3])
        ending = "" if problem["type"] == "missing" else f" (given: {reprlib.repr(problem['input'])})"
        message = problem["msg"].partition(" or instance of ")[0]  # the rest names a private class
        raise RejectUpdate(f"{subject}:{path}: {lower_first(message)}{ending}") from None
