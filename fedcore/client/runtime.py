"""The client side of a run: turns tasks into results.

Every engine runs the same ``ClientRuntime``, in this process or in others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedcore.base.config import RunConfig
from fedcore.base.errors import FedcoreError, PluginCallError, PluginContractError, print_traceback
from fedcore.base.plugin_state import States
from fedcore.base.seeding import random_stream
from fedcore.base.tensors import flatten, on_cpu, unflatten
from fedcore.base.types import ClientUpdate, Tensors
from fedcore.client.context import context_of
from fedcore.client.evaluation import evaluate_client
from fedcore.client.loop import epochs_of, take_step
from fedcore.client.messages import (
    ClientFailure,
    ClientSite,
    ClientTask,
    Evaluation,
    FailureKind,
    Outcome,
    Pause,
    Reply,
    SharedPayload,
)
from fedcore.client.runner import Begin, Training, drain, runner_of
from fedcore.client.session import LocalSession, LocalWork
from fedcore.client.setup import Setup, with_model
from fedcore.client.store import ClientStore
from fedcore.client.working_model import WorkingModel
from fedcore.data.assign import validation_split
from fedcore.data.client_data import ClientData
from fedcore.hooks.plugin import Plugin

CORE = "fedcore"
"""The core's namespace in a client's state, next to the plugins' namespaces: the models that are kept for the client.

``previous/NAME``: its model after its last committed participation, if a plugin reads it, in the layout
``Setup.snapshots``. ``personal/NAME``: the parameters and buffers that stay on the client.
"""


class Failed(Exception):
    """Raised to end a task with a failure of this kind."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind


class ClientRuntime:
    """Turns tasks into results, with working models that are reused from client to client."""

    def __init__(self, site: ClientSite) -> None:
        self.config, self.partition = site.config, site.partition
        self.setup = Setup.build(self.config, site.dataset)
        self.placement = self.setup.placement
        self.dataset, device = self.placement.dataset(site.dataset), self.placement.device
        if device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = self.config.precision == "tf32"
            torch.backends.cudnn.allow_tf32 = self.config.precision == "tf32"
        self.runner = runner_of(self.config, self.dataset)
        self.working = self.runner.working(self.setup)
        self.store = ClientStore(site.state_dir)
        self._sessions: dict[str, LocalSession] = {}
        site = replace(site, dataset=self.dataset)
        self.others = {
            name: ClientRuntime(replace(site, config=with_model(self.config, name)))
            for name in self.config.client_models
            if name != self.config.model
        }
        """The runtimes of the clients that have another model, by its name."""

    def of(self, client: int) -> ClientRuntime:
        """Return the runtime that has the client's model."""
        return self.others.get(self.config.model_of(client), self)

    def handle(self, task: ClientTask, shared: SharedPayload | None) -> Outcome:
        """Run one task; see :meth:`handle_together`."""
        return self.handle_together([task], shared)[0]

    def handle_together(self, tasks: Sequence[ClientTask], shared: SharedPayload | None) -> list[Outcome]:
        """Run tasks that came together; return their outcomes in the same order. A client's failure is an outcome.

        :raises FedcoreError: a contract or the run directory is broken, so that every other client would fail, too.
        """
        outcomes: dict[str, Outcome] = {}
        for runtime in dict.fromkeys(self.of(task.client) for task in tasks):
            group = [task for task in tasks if self.of(task.client) is runtime]
            outcomes |= zip((task.id for task in group), runtime.runner.run(group, Begin(runtime, shared)), strict=True)
        return [outcomes[task.id] for task in tasks]

    def training(self, shared: SharedPayload | None, task: ClientTask, working: WorkingModel) -> Training:
        """Work on one task of this runtime, in the form of a training. Only trainings have steps."""
        try:
            if task.kind == "ask":
                return self._ask(task, shared)
            if task.kind == "evaluate":
                return self._evaluate(task, shared)
            session = self._begun(task, shared, working) if task.kind == "fit_begin" else self._paused(task)
            session.start_clock()
            start = int(task.meta["epoch"]) if session.is_paused else 0
            try:
                if session.is_paused:
                    session.resume(task.tensors)
                else:
                    begin_local(session)
                    session.prepare_training()
                stop = next((epoch for epoch in self.setup.breaks if epoch > start), session.work.epochs)
                yield from epochs_of(session, range(start, stop))
                return self.trained(task, session, stop)
            finally:
                if not session.is_paused:
                    session.close()
        except Exception as error:
            return self.failed(task, error)

    def trained(self, task: ClientTask, session: LocalSession, stop: int) -> ClientUpdate | Pause:
        """Return the outcome at the start of the epoch ``stop``: a pause, or the update after the last epoch."""
        if stop < session.work.epochs:
            _require_steps(session)
            assert task.session is not None
            self._sessions[task.session] = session
            weights, plugins = session.pause(), self.setup.breaks[stop]
            names = {n for name in plugins for n in self.setup.claimed(self.setup.plugins[name], "exchanges")}
            session.stop_clock()
            return Pause(stop, on_cpu({name: weights[name] for name in sorted(names)}))
        self._sessions.pop(task.session or "", None)
        return self._finish(session)

    def failed(self, task: ClientTask, error: Exception) -> ClientFailure:
        """End a task that raised; return the failure of its client.

        :raises FedcoreError: as :meth:`handle`.
        """
        if isinstance(error, FedcoreError) and not isinstance(error, PluginCallError):
            raise error
        if (session := self._sessions.pop(task.session or "", None)) is not None:
            session.close()
        if isinstance(error, Failed):
            return ClientFailure(error.kind, str(error))
        print_traceback()
        message = str(error) if isinstance(error, PluginCallError) else f"{type(error).__name__}: {error}"
        return ClientFailure("raised", message)

    def close(self) -> None:
        """End the trainings that still pause when the run is over."""
        while self._sessions:
            self._sessions.popitem()[1].close()
        for other in self.others.values():
            other.close()

    def _begun(self, task: ClientTask, shared: SharedPayload | None, working: WorkingModel) -> LocalSession:
        for key in [key for key, session in self._sessions.items() if session.round < task.round]:
            self._sessions.pop(key).close()  # it paused in an earlier round, and the server gave it up
        return self.session(task, shared, working=working)

    def _paused(self, task: ClientTask) -> LocalSession:
        session = self._sessions.get(task.session or "")
        if session is None or not session.is_paused:
            raise Failed("session_lost", f"session {task.session!r} is not live in this worker")
        return session

    def samples_of(self, client: int) -> ClientData:
        """Return the training part of a client."""
        held, augment = self.partition.train[client], self.config.augment
        return ClientData.training(self.dataset, held, self.working.device, augmented=augment)

    def session(
        self,
        task: ClientTask,
        shared: SharedPayload | None,
        *,
        working: WorkingModel | None = None,
        read_only: str = "",
        saved: dict[str, dict[str, Any]] | None = None,
        config: RunConfig | None = None,
    ) -> LocalSession:
        """Return the session of a task; the working model holds its first weights.

        :param working: the working model of a training.
        :param read_only: the hook in which the plugins' states are read-only; empty for none.
        :param saved: the client's state instead of the stored one.
        :param config: the options of the training instead of the run's.
        """
        assert shared is not None
        if shared.fixed != self.setup.fixed_digest:
            fault = "give the parameters without gradients, which do not travel, other values than on the server"
            hint = "draw from task.random and read the same files, so that the weights are the same everywhere"
            where: dict[str, Any] = {"hook": "configure_model", "round": task.round, "client": task.client}
            raise PluginContractError.of(None, fault, hint=hint, **where)
        config, working, device = config or self.config, working or self.working, self.working.device
        data = self.samples_of(task.client)
        saved = self.store.read(task.client, task.version) if saved is None else {**saved}
        models = unflatten(saved.pop(CORE, {}))
        to_it_alone = {} if task.kind == "ask" else task.tensors
        own = unflatten({name: tensor.to(device, copy=True) for name, tensor in to_it_alone.items()})
        received = {name: {**shared.received.get(name, {}), **own.get(name, {})} for name in {**shared.received, **own}}
        session = LocalSession(
            client=task.client,
            round=task.round,
            config=config,
            plugins=self.setup.plugins,
            working=working,
            data=data,
            work=LocalWork.of(config, len(data), working.smallest_batch, task.meta),
            lr=shared.lr,
            received=received,
            start={**working.first_personal, **shared.model, **models.get("personal", {})},
            previous=self.setup.snapshots.named(models["previous"]) if "previous" in models else {},
            states=States(saved, read_only=read_only, device=device),
            public=self.dataset.public,
        )
        session.load()
        if self.setup.plugins.implements("local_samples"):  # a context takes its time
            for _, changed in self.setup.plugins.each("local_samples", client=context_of(session, ""), samples=data):
                session.data = session.data if changed is None else changed
        return session

    def _finish(self, session: LocalSession) -> ClientUpdate:
        losses, payload, kept = self._end_local(session, session.working.personal)
        layout, plugins = self.setup.layout, self.setup.plugins
        update = ClientUpdate(
            client=session.client,
            model=self.setup.uploads.join(session.working.state),
            samples=len(session.data),
            steps=session.steps,
            lr=session.lr,
            momentum=self.config.momentum,
            payload=payload,
            metrics={"losses": losses},
            frozen=(session.excluded & layout.trainable).intersection(layout.shared),
        )
        for plugin in sorted(plugins.implementers("pre_upload"), key=lambda plugin: bool(plugin.encodes)):
            client = context_of(session, plugin.name)
            update = plugins.call(plugin.name, "pre_upload", client=client, update=update) or update
            update = _with_json_metrics(session, plugin.name, "pre_upload", update)
        if plugins.implements("guard_upload"):  # a context takes its time
            for plugin, changed in plugins.each("guard_upload", client=context_of(session, ""), update=update):
                update = _with_json_metrics(session, plugin.name, "guard_upload", changed or update)
        refuse_edits(session)
        version = self.store.write(session.client, session.round, {**session.states.snapshot(), **kept})
        payload = {plugin: self._sent(plugin, tensors) for plugin, tensors in update.payload.items() if tensors}
        model = self._sent("", update.model)
        session.stop_clock()
        seconds, by_plugin = session.seconds, dict(session.plugin_seconds)
        return replace(update, model=model, payload=payload, version=version, seconds=seconds, plugin_seconds=by_plugin)

    def _end_local(
        self, session: LocalSession, personal: Callable[[], Tensors]
    ) -> tuple[dict[str, float], dict[str, Tensors], dict[str, dict[str, Any]]]:
        """End a training: return its mean losses, the plugins' payloads, and the models that the core keeps.

        :param personal: takes the weights that the client keeps.
        """
        _require_steps(session)
        losses = session.losses.means()
        for name, value in losses.items():
            if not value - value == 0:  # nan or inf
                raise Failed("diverged", f"loss {name!r} became {value}")
        plugins = self.setup.plugins
        previous = self.setup.snapshots.join(session.working.state) if plugins.reads("previous") else {}
        payload: dict[str, Tensors] = {}
        if plugins.implements("end_local"):  # a context takes its time
            for _, returned in plugins.each("end_local", client=context_of(session, "")):
                for namespace, tensors in (returned or {}).items():
                    payload[namespace] = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        models = {"previous": previous, "personal": personal()}
        return losses, payload, {CORE: flatten(models)[0]} if any(models.values()) else {}

    def _sent(self, plugin: str, tensors: Mapping[str, Any]) -> Tensors:
        """Return tensors of an update: on the CPU if a plugin on the server reads them, else where they are.

        An engine that sends bytes brings them to the CPU itself.

        :raises PluginContractError: a plugin's payload holds something other than tensors.
        """
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                raise PluginContractError.of(plugin, f"puts {name!r} into its payload", expected="a tensor")
        detached = {name: tensor.detach() for name, tensor in tensors.items()}
        return on_cpu(detached) if self.setup.reads_updates else detached

    def _ask(self, task: ClientTask, shared: SharedPayload | None) -> Reply:
        plugin, question, plugins = str(task.meta["plugin"]), str(task.meta["question"]), self.setup.plugins
        with closing(self.session(task, shared, read_only=f"question {question}")) as session:
            tensors = {name: tensor.to(self.working.device) for name, tensor in task.tensors.items()}
            answer = plugins.answer(plugin, question, client=context_of(session, plugin), tensors=tensors) or {}
            for _, changed in plugins.each("pre_answer", client=context_of(session, ""), answer=answer):
                answer = answer if changed is None else changed
        return Reply(on_cpu({name: tensor.detach().clone() for name, tensor in answer.items()}))

    def _evaluate(self, task: ClientTask, shared: SharedPayload | None) -> Evaluation:
        held_out = self.partition.test[task.client]
        parts = validation_split(held_out, self.config.validation_share, self.config.seed, task.client)
        saved = self._adapted(task, shared) if "adapt" in task.meta else None
        with closing(self.session(task, shared, read_only="personal_model", saved=saved)) as session:
            with random_stream(session.derive_seed("evaluation"), self.working.device):
                evaluation = evaluate_client(session, self.dataset, parts, task.meta)
            refuse_edits(session, hook="personal_model")
            return evaluation

    def _adapted(self, task: ClientTask, shared: SharedPayload | None) -> dict[str, dict[str, Any]]:
        """Train a client for the task's ``adapt`` epochs; return the state that it would keep. Nothing is stored.

        It trains as in a round, without pauses and without an upload, at the run's first learning rate: a schedule may
        have brought the round's to 0. If the method has no models of the clients' own, the state holds the whole
        trained model.
        """
        assert shared is not None
        config = self.config.model_copy(update={"local_epochs": task.meta["adapt"], "local_steps": None})
        with closing(self.session(task, replace(shared, lr=config.lr), config=config)) as session:
            begin_local(session)
            session.prepare_training()
            drain(epochs_of(session, range(session.work.epochs)), take_step)
            personal = session.working.personal if self.setup.has_own_models else session.working.snapshot
            _, _, kept = self._end_local(session, personal)
            return {**session.states.snapshot(), **kept}


def _require_steps(session: LocalSession) -> None:
    """Fail a client that took no step. A later epoch has batches of the same sizes, so it would take none either."""
    if session.steps == 0:
        fault = f"client {session.client} has {len(session.data)} samples and made no optimizer step"
        skipped = session.working.smallest_batch > 1
        reason = "; with BatchNorm in the model a batch of one sample is skipped" if skipped else ""
        raise Failed("no_steps", f"{fault}{reason}")


def _with_json_metrics(session: LocalSession, plugin: str, hook: str, update: ClientUpdate) -> ClientUpdate:
    """Return an update with metrics as JSON reads them back, such as names for numbers: the same from every engine.

    :raises PluginContractError: the metrics, which this hook may have changed, are not JSON.
    """
    try:
        return replace(update, metrics=json.loads(json.dumps(update.metrics)))
    except (TypeError, ValueError, RecursionError) as error:
        raise session.broken(plugin, f"puts into update.metrics what is not JSON: {error}", hook=hook) from None


def refuse_edits(session: LocalSession, *, hook: str | None = None) -> None:
    """Refuse an edit of received tensors, and other memory for the model's: the clients of one process share them.

    :raises PluginContractError: with the tensor's name.
    """
    for name, parameter in session.working.parameters.items():
        if parameter.data_ptr() != session.working.state[name].data_ptr():
            fault = f"assign to .data of {name!r} of client.model, which is then not what is loaded, trained and sent"
            hint = "return a start from begin_local (starts), or put weights into a copy: client.network(weights)"
            raise session.broken(None, fault, hook=hook, hint=hint)
    received = ((plugin, "received", tensors) for plugin, tensors in session.received.items())
    for plugin, shared, tensors in (*received, (None, "start", session.start)):
        for name, tensor in tensors.items():
            if tensor._version:  # torch counts edits; every engine makes copies of what it receives
                fault = f"edits client.{shared}[{name!r}] in place, which other clients share"
                raise session.broken(plugin, fault, hook=hook, hint=f"edit a copy: client.{shared}[{name!r}].clone()")


def begin_local(session: LocalSession) -> None:
    """Call ``begin_local``: of the plugins that choose starts, then of the others, which see the client's start."""
    plugins = session.plugins.implementers("begin_local")
    session.requests.open = True
    for chooses in (True, False) if plugins else ():
        session.start_from(_chosen_starts(session, [plugin for plugin in plugins if bool(plugin.starts) is chooses]))
    session.requests.open = False


def _chosen_starts(session: LocalSession, plugins: Iterable[Plugin]) -> Tensors:
    """Call ``begin_local`` of some plugins; return the weights with which they start the client, on the device.

    :raises PluginContractError: a plugin returned an undeclared name or a wrong shape, or it edited the model.
    """
    state, starts = session.working.state, Tensors()
    versions = {name: tensor._version for name, tensor in state.items()}
    for plugin in plugins:
        returned = session.plugins.call(plugin.name, "begin_local", client=context_of(session, ""))
        edited = next((name for name, version in versions.items() if state[name]._version != version), None)
        if edited is not None:
            fault = f"edits {edited!r} of client.model in place"
            hint = "declare the names in starts and return their values, so that other plugins start from them, too"
            raise session.broken(plugin.name, fault, hook="begin_local", hint=hint)
        tensors = returned or {}
        declared = session.working.setup.claimed(plugin, "starts", personal=True) if tensors else []
        names = f"names that it declares in starts = {plugin.starts}, without those that are not trained"
        startable = {name: state[name] for name in declared}
        session.check_fit(tensors, startable, plugin=plugin.name, hook="begin_local", names=names)
        # Without .data the copying counts as an edit.
        starts |= {n: torch.empty_like(state[n]).copy_(t.detach()).data for n, t in tensors.items()}
    return starts
