"""The client side of a run: what plugins see of a client, and the runtime that turns tasks into results.

The same ``ClientRuntime`` runs behind every engine, in whatever process the engine chose.
"""

from __future__ import annotations

import os
import time
import traceback
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fedcore.data.client import ClientData
from fedcore.engines.base import ClientFailure, ClientResult, ClientTask, FailureKind, Outcome, Site
from fedcore.errors import FedcoreError, PluginCallError, PluginContractError
from fedcore.evaluation import evaluate_client
from fedcore.frozen import FrozenModel, all_outputs, load_state
from fedcore.local import LossTotals, train_epochs
from fedcore.models import SplitModel, has_batch_norm
from fedcore.plugins import match
from fedcore.problem import Problem, resolve_device
from fedcore.seeding import derive_seed, generator
from fedcore.state import ClientStore, State, States, flatten, unflatten
from fedcore.tensors import clone
from fedcore.types import ClientUpdate, Tensors

CORE = "fedcore"
"""Namespace of what the core itself keeps per client: previous models, personal parameters."""


class LocalSession:
    """One client's work on one task, or on a fit with its pauses."""

    def __init__(self, runtime: ClientRuntime, task: ClientTask, shared: Shared, *, read_only: str = "") -> None:
        self.runtime = runtime
        self.id, self.round, self.config = task.client, task.round, runtime.config
        self.device, self.model, self.frozen = runtime.device, runtime.model, runtime.frozen
        self.has_batch_norm = runtime.has_batch_norm
        self.data = runtime.training_data(task.client)
        self.received, self.lr = shared.received, float(shared.meta["lr"])
        saved = runtime.store.read(task.client, task.state_round)
        self.saved_core: dict[str, Any] = saved.pop(CORE, {})
        self.states = States(saved, read_only=read_only, device=runtime.device)
        self.start = {**shared.model, **prefixed(self.saved_core, "personal.")}
        self.scratch: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        self.added: dict[str, dict[str, nn.Parameter]] = {}
        self.added_options: dict[str, dict[str, float]] = {}
        self.excluded: set[str] = set()
        self.reference: list[Tensor] = []
        self.shared_parameters: list[nn.Parameter] = []
        self.optimizer: torch.optim.SGD
        self.losses, self.steps = LossTotals(), 0
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.parked: Tensors | None = None
        self.in_begin_local = False
        self._contexts: dict[str, ClientContext] = {}

    def context(self, plugin: str) -> ClientContext:
        """Return what one plugin sees of this client."""
        if plugin not in self._contexts:
            self._contexts[plugin] = ClientContext(self, plugin)
        return self._contexts[plugin]

    def derive_seed(self, purpose: str) -> int:
        """Return the seed of this client's and round's stream for a purpose."""
        return derive_seed(self.config.seed, purpose, round=self.round, client=self.id)

    def generator(self, purpose: str) -> torch.Generator:
        """Return this client's and round's stream for a purpose."""
        return generator(self.config.seed, purpose, round=self.round, client=self.id)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the arithmetic that the run's ``precision`` asks for."""
        if self.config.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put weights into the working model."""
        load_state(self.runtime.model_state, tensors)

    def load_frozen(self) -> None:
        """Point the frozen models at this client."""
        if "global" in self.frozen:
            self.frozen["global"].load(self.start)
        if "previous" in self.frozen:
            self.frozen["previous"].load(prefixed(self.saved_core, "previous.") or None)

    def prepare_training(self) -> None:
        """Fix what is trained in this round and set the optimizer up, after ``begin_local``."""
        layout, trained = self.runtime.problem.layout, []
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in layout.trainable and name not in self.excluded)
            if parameter.requires_grad:
                trained.append(parameter)
                if name not in layout.personal:
                    self.shared_parameters.append(parameter)
                    self.reference.append(self.start[name])
        groups: list[dict[str, Any]] = [{"params": trained}] if trained else []
        for plugin, added in self.added.items():
            groups.append({"params": list(added.values()), **self.added_options[plugin]})
        self.optimizer = torch.optim.SGD(
            groups,
            lr=self.lr,
            momentum=self.config.momentum,
            weight_decay=self.config.weight_decay,
            fused=True,
        )

    def park(self) -> Tensors:
        """Take the weights out of the working model for the time of a pause; returns them."""
        self.parked = clone(self.model.state_dict())
        return self.parked

    def unpark(self, patches: Mapping[str, Tensor]) -> None:
        """Go on after a pause; patched parameters get fresh optimizer state."""
        assert self.parked is not None
        self.load({**self.parked, **patches})
        self.parked = None
        self.load_frozen()
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in self.runtime.problem.layout.trainable and name not in self.excluded)
            if name in patches:
                self.optimizer.state.pop(parameter, None)


class ClientContext:
    """What one plugin sees of one client.

    :ivar id: client id; ``n`` number of training samples; ``class_counts`` samples per class (C,) int64.
    :ivar model: the working model.
    :ivar received: what this plugin's ``broadcast`` sent down.
    :ivar state: this plugin's tensors and JSON values, kept from one participation to the next.
    :ivar scratch: this plugin's notes for this round only; survive a pause.
    """

    def __init__(self, session: LocalSession, plugin: str) -> None:
        self._session, self._plugin = session, plugin
        self.id, self.n = session.id, len(session.data)
        self.round, self.rounds = session.round, session.config.rounds
        self.num_classes = session.runtime.dataset.num_classes
        self.model: SplitModel = session.model
        self.received: Mapping[str, Tensor] = session.received.get(plugin, {})
        self.state: State = session.states.of(plugin)
        self.scratch: dict[str, Any] = session.scratch[plugin]
        self.lr, self.momentum = session.lr, session.config.momentum

    def scoped(self, plugin: str) -> ClientContext:
        """Return the view of one plugin."""
        return self._session.context(plugin)

    @property
    def class_counts(self) -> Tensor:
        """Training samples per class, (C,) int64."""
        return torch.bincount(self._session.data.labels, minlength=self.num_classes)

    @property
    def steps(self) -> int:
        """Optimizer steps executed so far in this round."""
        return self._session.steps

    @property
    def added(self) -> Mapping[str, nn.Parameter]:
        """The parameters that this plugin added in this round."""
        return self._session.added.get(self._plugin, {})

    @property
    def previous_model(self) -> SplitModel | None:
        """The frozen model of this client's last committed participation; None before the first.

        Also in evaluation. For plugins that declare ``reads = ("previous",)``.
        """
        if "previous" not in self._session.frozen:
            raise PluginContractError(
                f"plugin {self._plugin!r} reads the 'previous' model without declaring it; "
                "set reads = ('previous',) on the class",
                plugin=self._plugin,
            )
        previous = self._session.frozen["previous"]
        return previous.module if previous.present else None

    def generator(self, purpose: str) -> torch.Generator:
        """Return the stream of this seed, round, client and purpose, from its start."""
        return self._session.generator(purpose)

    def forward(self, indices: Tensor | None = None, model: SplitModel | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return (features, logits, labels) over the training part: eval mode, no augmentation, no gradient.

        :param indices: positions in the training part; default all, in data-set order.
        :param model: default the working model.
        """
        data, model = self._session.data, model or self.model
        was_training = model.training
        model.eval()
        outputs = all_outputs(model, data, indices)
        model.train(was_training)
        labels = data.labels if indices is None else data.labels[indices]
        return outputs.features, outputs.logits, labels

    def add_parameters(
        self, tensors: Mapping[str, Tensor], *, lr: float | None = None, weight_decay: float | None = None
    ) -> None:
        """Train extra leaf tensors with this round's SGD; never uploaded, folded or corrected.

        :param lr: their own learning rate; default the round's. ``weight_decay`` likewise.
        """
        self._require_begin_local("add_parameters")
        added = self._session.added.setdefault(self._plugin, {})
        for name, tensor in tensors.items():
            added[name] = nn.Parameter(tensor.detach().clone().to(self._session.device))
        options = {"lr": lr, "weight_decay": weight_decay}
        self._session.added_options[self._plugin] = {k: v for k, v in options.items() if v is not None}

    def freeze(self, patterns: tuple[str, ...] | list[str]) -> None:
        """Exclude parameters from this round's training, by patterns over the model's names."""
        self._require_begin_local("freeze")
        plugins = {plugin.name: plugin for plugin in self._session.runtime.problem.plugins}
        names = [name for name, _ in self.model.named_parameters()]
        self._session.excluded.update(match(patterns, names, plugins[self._plugin], "freeze"))

    def _require_begin_local(self, method: str) -> None:
        if not self._session.in_begin_local:
            raise PluginContractError(
                f"plugin {self._plugin!r}: client.{method} works in begin_local only", plugin=self._plugin
            )


class Shared:
    """A payload sent once per round, copied to the device's own memory: global model and broadcasts."""

    def __init__(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], device: torch.device) -> None:
        groups = unflatten({name: tensor.to(device, copy=True) for name, tensor in tensors.items()})
        self.model: Tensors = groups.pop("model", {})
        self.received: dict[str, Tensors] = unflatten(groups.pop("broadcast", {}))
        self.meta = meta


class Failed(Exception):
    """Ends a task with a failure of a kind."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind


class ClientRuntime:
    """Turns tasks into results; one working model, reused from client to client."""

    def __init__(self, site: Site) -> None:
        self.config, self.dataset, self.partition = site.config, site.dataset, site.partition
        self.device = resolve_device(self.config.device)
        if self.device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = self.config.precision == "tf32"
            torch.backends.cudnn.allow_tf32 = self.config.precision == "tf32"
        self.problem = Problem.build(self.config, self.dataset)
        self.model = self.problem.model.to(self.device)
        self.model_state = self.model.state_dict()
        self.has_batch_norm = has_batch_norm(self.model)
        self.store = ClientStore(site.state_dir)
        plugins = self.problem.plugins
        self.frozen = {name: FrozenModel(self.model) for name in ("global", "previous") if plugins.reads(name)}
        self._sessions: dict[str, LocalSession] = {}
        self._handlers = {
            "fit_begin": self._fit_begin,
            "fit_resume": self._fit_resume,
            "ask": self._ask,
            "evaluate": self._evaluate,
            "end_session": self._end_session,
        }

    def handle(self, task: ClientTask, shared: Shared | None) -> Outcome:
        """Run one task; whatever happens to the client becomes a value.

        :raises FedcoreError: a broken contract or run directory, which no other client would survive either.
        """
        began = time.perf_counter()
        try:
            result = self._handlers[task.kind](task, shared)
        except Failed as verdict:
            return self._failed(task, verdict.kind, str(verdict))
        except PluginCallError as error:
            return self._failed(task, "raised", str(error))
        except FedcoreError:
            raise
        except Exception as error:
            return self._failed(task, "raised", f"{type(error).__name__}: {error}")
        result.meta["seconds"] = time.perf_counter() - began
        return ClientResult(result.task_id, {name: t.cpu() for name, t in result.tensors.items()}, result.meta)

    def _failed(self, task: ClientTask, kind: FailureKind, message: str) -> ClientFailure:
        self._sessions.pop(task.session or "", None)
        if kind == "raised" and os.environ.get("FEDCORE_DEBUG"):
            traceback.print_exc()
        return ClientFailure(task.id, kind, message)

    def training_data(self, client: int) -> ClientData:
        """Return a client's training part."""
        return ClientData.training(
            self.dataset, self.partition.train[client], self.device, augmented=self.config.augment
        )

    def _fit_begin(self, task: ClientTask, shared: Shared | None) -> ClientResult:
        assert shared is not None
        for key in [key for key, session in self._sessions.items() if session.round < task.round]:
            del self._sessions[key]  # abandoned in an earlier round
        session = LocalSession(self, task, shared)
        session.load(session.start)
        session.load_frozen()
        session.in_begin_local = True
        for _ in self.problem.plugins.each("begin_local", client=session.context("")):
            pass
        session.in_begin_local = False
        session.prepare_training()
        return self._fit(task, session, 0)

    def _fit_resume(self, task: ClientTask, shared: Shared | None) -> ClientResult:
        session = self._sessions.get(task.session or "")
        if session is None or session.parked is None:
            raise Failed("session_lost", f"session {task.session!r} is not live in this worker")
        session.unpark(task.tensors)
        return self._fit(task, session, int(task.meta["epoch"]))

    def _fit(self, task: ClientTask, session: LocalSession, start: int) -> ClientResult:
        stop = next((epoch for epoch in self.problem.breaks if epoch > start), self.config.local_epochs)
        train_epochs(session, self.problem.plugins, start, stop)
        if stop < self.config.local_epochs:
            assert task.session is not None
            self._sessions[task.session] = session
            parked = session.park()
            names = {name for plugin in self.problem.breaks[stop] for name in self._exchanged(plugin)}
            return ClientResult(task.id, {name: parked[name] for name in sorted(names)}, {"paused": stop})
        self._sessions.pop(task.session or "", None)
        return self._finish(task, session)

    def _finish(self, task: ClientTask, session: LocalSession) -> ClientResult:
        if session.steps == 0:
            raise Failed("no_steps", f"client {session.id} has {len(session.data)} samples and made no optimizer step")
        losses = session.losses.means()
        for name, value in losses.items():
            if not value - value == 0:  # nan or inf
                raise Failed("rejected", f"loss {name!r} became {value}")
        layout, plugins = self.problem.layout, self.problem.plugins
        core: dict[str, Any] = {}
        if plugins.reads("previous"):
            core.update({f"previous.{name}": value.clone() for name, value in self.model_state.items()})
        payload: dict[str, dict[str, Tensor]] = {}
        for plugin, tensors in plugins.each("end_local", client=session.context("")):
            payload[plugin.name] = {name: tensor.detach().clone() for name, tensor in (tensors or {}).items()}
        core.update({f"personal.{name}": self.model_state[name].clone() for name in sorted(layout.personal)})
        update = ClientUpdate(
            client=session.id,
            model=clone({name: self.model_state[name] for name in layout.shared}),
            samples=len(session.data),
            steps=session.steps,
            lr=session.lr,
            momentum=self.config.momentum,
            payload=payload,
            metrics={"losses": losses},
        )
        for plugin in plugins.implementers("pre_upload"):
            seen = plugins.call(
                plugin.name,
                "pre_upload",
                client=session.context(plugin.name),
                update=update.scoped(plugin.name),
            )
            update = update if seen is None else update.merged(plugin.name, seen)
        version = self.store.write(
            session.id, session.round, {**session.states.snapshot(), **({CORE: core} if core else {})}
        )
        return pack_update(task.id, update, version, dict(session.seconds))

    def _ask(self, task: ClientTask, shared: Shared | None) -> ClientResult:
        assert shared is not None
        session = LocalSession(self, task, shared, read_only="answer")
        session.load(session.start)
        session.load_frozen()
        plugin = str(task.meta["plugin"])
        answer = self.problem.plugins.call(
            plugin,
            "answer",
            client=session.context(plugin),
            question=task.meta["question"],
            tensors={name: tensor.to(self.device) for name, tensor in task.tensors.items()},
        )
        return ClientResult(task.id, {name: tensor.detach().clone() for name, tensor in (answer or {}).items()})

    def _evaluate(self, task: ClientTask, shared: Shared | None) -> ClientResult:
        assert shared is not None
        session = LocalSession(self, task, shared, read_only="personal_model")
        session.load_frozen()
        return ClientResult(task.id, {}, evaluate_client(session, task.meta))

    def _end_session(self, task: ClientTask, shared: Shared | None) -> ClientResult:
        self._sessions.pop(task.session or "", None)
        return ClientResult(task.id)

    def _exchanged(self, plugin_name: str) -> list[str]:
        plugin = next(plugin for plugin in self.problem.plugins if plugin.name == plugin_name)
        return match(plugin.exchanges, self.model_state, plugin, "exchanges")


def prefixed(tensors: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the entries under a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def pack_update(task_id: str, update: ClientUpdate, version: int | None, seconds: Mapping[str, float]) -> ClientResult:
    """Turn an update into a result's tensors and JSON."""
    payload, rest = flatten(update.payload)
    if rest:
        plugin, values = next(iter(rest.items()))
        raise PluginContractError(
            f"plugin {plugin!r}: payload {next(iter(values))!r} is no tensor; only tensors go up",
            plugin=plugin,
        )
    tensors, _ = flatten({"model": update.model, "payload": payload})
    meta = {
        "samples": update.samples,
        "steps": update.steps,
        "lr": update.lr,
        "momentum": update.momentum,
        "metrics": dict(update.metrics),
        "version": version,
        "plugin_seconds": dict(seconds),
    }
    return ClientResult(task_id, tensors, meta)


def unpack_update(client: int, result: ClientResult) -> ClientUpdate:
    """Turn a result back into the update it carries."""
    groups = unflatten(result.tensors)
    meta = result.meta
    return ClientUpdate(
        client=client,
        model=groups.get("model", {}),
        samples=meta["samples"],
        steps=meta["steps"],
        lr=meta["lr"],
        momentum=meta["momentum"],
        payload=unflatten(groups.get("payload", {})),
        metrics=meta["metrics"],
    )
