"""The client side of a run: turns tasks into results.

The same ``ClientRuntime`` runs behind every engine, in whatever process the engine chose.
"""

from __future__ import annotations

import os
import time
import traceback
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fedcore.base.config import RunConfig
from fedcore.base.errors import FedcoreError, PluginCallError, PluginContractError
from fedcore.base.tensors import clone
from fedcore.base.types import ClientUpdate
from fedcore.client.captured_steps import CudaRecorder, StepGraphs
from fedcore.client.evaluation import evaluate_client
from fedcore.client.frozen import FrozenModel
from fedcore.client.loop import train_batch, train_epochs
from fedcore.client.messages import ClientFailure, ClientResult, ClientTask, FailureKind, Outcome
from fedcore.client.session import CORE, LocalSession, Shared
from fedcore.client.worker_spec import WorkerSpec
from fedcore.data import Dataset
from fedcore.data.client import ClientData
from fedcore.hooks.setup import Setup
from fedcore.models import has_batch_norm
from fedcore.models.placement import Placement
from fedcore.storage.client_store import ClientStore
from fedcore.storage.state import flatten


class Failed(Exception):
    """Ends a task with a failure of a kind."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind


class ClientRuntime:
    """Turns tasks into results; one working model, reused from client to client."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.config, self.partition = spec.config, spec.partition
        self.setup = Setup.build(self.config, spec.dataset)
        self.placement = Placement.of(self.config, self.setup.model)
        self.device, self.dataset = self.placement.device, self.placement.dataset(spec.dataset)
        if self.device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = self.config.precision == "tf32"
            torch.backends.cudnn.allow_tf32 = self.config.precision == "tf32"
        captured = captures(self.config, self.device, self.dataset)
        self.graphs = StepGraphs(CudaRecorder(self.device), train_batch) if captured else None
        self.model = self.placement.model(self.setup.model)
        self.model_state = self.model.state_dict()
        self.first_personal = clone({name: self.model_state[name] for name in self.setup.layout.personal})
        self.has_batch_norm = has_batch_norm(self.model)
        self.store = ClientStore(spec.state_dir)
        plugins = self.setup.plugins
        self.frozen = {name: FrozenModel(self.model) for name in ("global", "previous") if plugins.reads(name)}
        self._sessions: dict[str, LocalSession] = {}
        self._spent: dict[str, dict[str, float]] = {}
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
        began, before = time.perf_counter(), dict(self.setup.plugins.seconds)
        try:
            with self.graphs.recorder.running() if self.graphs else nullcontext():
                result = self._handlers[task.kind](task, shared)
                tensors = {name: tensor.cpu() for name, tensor in result.tensors.items()}
        except Failed as verdict:
            return self._failed(task, verdict.kind, str(verdict))
        except PluginCallError as error:
            return self._failed(task, "raised", str(error))
        except FedcoreError:
            raise
        except Exception as error:
            return self._failed(task, "raised", f"{type(error).__name__}: {error}")
        after = self.setup.plugins.seconds
        spent = {name: after[name] - seconds for name, seconds in before.items()}
        self._record_time(task, result.meta, {"": time.perf_counter() - began, **spent})
        return ClientResult(result.task_id, tensors, result.meta)

    def _record_time(self, task: ClientTask, meta: dict[str, Any], spent: dict[str, float]) -> None:
        """Put the seconds of a task, a fit's earlier parts included, into its result: in all, and by plugin."""
        earlier = self._spent.pop(task.session or "", {})
        spent = {name: seconds + earlier.get(name, 0.0) for name, seconds in spent.items()}
        if "paused" in meta:
            self._spent[task.session or ""] = spent
        meta["seconds"] = spent.pop("")
        meta["plugin_seconds"] = spent

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
        self._spent = {key: spent for key, spent in self._spent.items() if key in self._sessions}
        if self.graphs:
            self.graphs.begin_round(task.round)
        session = LocalSession(self, task, shared)
        session.load(session.start)
        session.load_frozen()
        session.in_begin_local = True
        self.setup.plugins.call_all("begin_local", client=session.context(""))
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
        stop = next((epoch for epoch in self.setup.breaks if epoch > start), session.epochs)
        train_epochs(session, self.setup.plugins, start, stop)
        if stop < session.epochs:
            assert task.session is not None
            self._sessions[task.session] = session
            parked = session.park()
            names = {name for plugin in self.setup.breaks[stop] for name in self._exchanged(plugin)}
            return ClientResult(task.id, {name: parked[name] for name in sorted(names)}, {"paused": stop})
        self._sessions.pop(task.session or "", None)
        session.graphs.clear()
        return self._finish(task, session)

    def _finish(self, task: ClientTask, session: LocalSession) -> ClientResult:
        if session.steps == 0:
            why = "; with BatchNorm in the model a batch of one sample is skipped" if self.has_batch_norm else ""
            count = len(session.data)
            raise Failed("no_steps", f"client {session.id} has {count} samples and made no optimizer step{why}")
        losses = session.losses.means()
        for name, value in losses.items():
            if not value - value == 0:  # nan or inf
                raise Failed("diverged", f"loss {name!r} became {value}")
        layout, plugins = self.setup.layout, self.setup.plugins
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
            frozen=frozenset(session.excluded & layout.trainable).intersection(layout.shared),
        )
        for plugin in sorted(plugins.implementers("pre_upload"), key=lambda plugin: plugin.guards_uploads):
            seen = plugins.call(plugin.name, "pre_upload", client=session.context(plugin.name), update=update)
            if seen is not None:
                update = seen if plugin.guards_uploads else update.merged(plugin.name, seen)
        version = self.store.write(
            session.id, session.round, {**session.states.snapshot(), **({CORE: core} if core else {})}
        )
        return pack_update(task.id, update, version)

    def _ask(self, task: ClientTask, shared: Shared | None) -> ClientResult:
        assert shared is not None
        session = LocalSession(self, task, shared, read_only="answer")
        session.load(session.start)
        session.load_frozen()
        plugin = str(task.meta["plugin"])
        answer = self.setup.plugins.call(
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
        plugin = self.setup.plugins[plugin_name]
        return self.setup.claimed(plugin, "exchanges")


def captures(config: RunConfig, device: torch.device, dataset: Dataset) -> bool:
    """Say whether training steps are recorded: on CUDA, where every batch of one size has the same shapes."""
    return device.type == "cuda" and config.capture and dataset.train.fixed_shape


def pack_update(task_id: str, update: ClientUpdate, version: int | None) -> ClientResult:
    """Turn an update into a result's tensors and JSON; ``boundary.UpdateValidator.update`` turns it back."""
    payload, rest = flatten(update.payload)
    if rest:
        plugin, values = next(iter(rest.items()))
        raise PluginContractError(
            f"plugin {plugin!r}: payload {next(iter(values))!r} is no tensor; only tensors go up",
            plugin=plugin,
        )
    tensors, _ = flatten({"model": update.model, "payload": payload})
    meta = {
        "client": update.client,
        "samples": update.samples,
        "steps": update.steps,
        "lr": update.lr,
        "momentum": update.momentum,
        "metrics": dict(update.metrics),
        "version": version,
        "frozen": sorted(update.frozen),
    }
    return ClientResult(task_id, tensors, meta)
