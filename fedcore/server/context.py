"""The server as hooks see it, with the questions that hooks put to clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, Self

import torch
from torch import Tensor
from typing_extensions import override

from fedcore.base.errors import PluginContractError, RejectUpdate
from fedcore.base.plugin_state import State
from fedcore.base.seeding import generator
from fedcore.base.tensors import bytes_of, on_cpu
from fedcore.base.types import Answer, ClientUpdate, Tensors
from fedcore.client.messages import ClientTask, Outcome
from fedcore.data import PublicSamples
from fedcore.hooks.checks import load_weights, whole_numbers
from fedcore.hooks.contexts import ServerContext, View
from fedcore.models.split import SplitModel, copied
from fedcore.server.aggregation import RunningMean, with_singular_vectors
from fedcore.server.scope import Phase, ServerScope
from fedcore.server.validation import check_partial

ASKING: tuple[Phase, ...] = ("select_clients", "begin_round", "aggregate", "end_round", "post_train")
"""The phases in which ``server.ask`` works."""


class ReadOnly(dict[Any, Any]):
    """A mapping that takes no other value. An entry that a hook sets would be lost. Copies and pickles are plain."""

    @override
    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("what a hook reads of the server does not support item assignment")

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class ScopeContext(View, ServerContext):
    """One plugin's view of the server; see :class:`fedcore.hooks.contexts.ServerContext`.

    :param plugin: the plugin's name. :meth:`scoped` gives each plugin its view.
    """

    _argument = "server"
    _instead = "keep values by name: server.state['name'] = value; aggregate and server_step return the new model"
    _plugin: str

    def __init__(self, scope: ServerScope, plugin: str = "") -> None:
        self._scope, self._plugin = scope, plugin
        self._views: dict[str, Self] = {}
        self.config = scope.federation.config
        self.round, self.rounds = scope.number, self.config.rounds
        self.num_clients, self.lr = self.config.training_clients, scope.lr
        self.num_classes, self.task = scope.federation.dataset.num_classes, scope.federation.dataset.task
        self.feature_dim = scope.federation.setup.model.feature_dim
        self.cohort = list(scope.cohort)
        layout = scope.federation.setup.layout
        self.shared = list(layout.shared)
        self.trainable = [name for name in layout.shared if name in layout.trainable]
        self.personal = [name for name in layout.shapes if name in layout.personal]
        self.public = scope.federation.dataset.public
        self.staleness = ReadOnly(scope.staleness)
        self._sealed = True

    def scoped(self, plugin: str) -> Self:
        """Return the view of one plugin. The object is the same at every call."""
        if plugin not in self._views:
            self._views[plugin] = type(self)(self._scope, plugin)
        return self._views[plugin]

    @property
    @override
    def available(self) -> Sequence[int]:
        return self._scope.available

    @property
    @override
    def accepted(self) -> Sequence[int]:
        return list(self._scope.accepted)

    @property
    @override
    def model(self) -> Mapping[str, Tensor]:
        return ReadOnly(self._scope.model)

    @property
    @override
    def state(self) -> State:
        return self._scope.states.of(self._plugin)

    @property
    @override
    def frozen(self) -> frozenset[str]:
        return self._scope.frozen

    @property
    @override
    def buffers(self) -> Mapping[str, Tensor]:
        return ReadOnly(self._scope.buffers)

    @property
    @override
    def client_sizes(self) -> Tensor:
        return self._scope.federation.partition.train.sizes[: self.num_clients]

    @override
    def generator(self, purpose: str) -> torch.Generator:
        return generator(self.config.seed, purpose, round=self.round)

    @override
    def ask(
        self,
        clients: Literal["all", "cohort"] | Iterable[int],
        question: Callable[..., Any],
        *,
        tensors: Mapping[str, Tensor] | None = None,
        check: Callable[[Answer], object] | None = None,
    ) -> Iterator[Answer]:
        scope = self._scope
        if scope.phase not in ASKING:
            works = f"which works in {', '.join(ASKING[:-1])} and {ASKING[-1]} only"
            raise PluginContractError.of(self._plugin, f"calls server.ask, {works}")
        if isinstance(clients, str) and clients == "cohort" and scope.phase == "select_clients":
            fault, hint = "asks the cohort before it is selected", "name the candidates: ids of server.available"
            raise PluginContractError.of(self._plugin, fault, hook="select_clients", hint=hint)
        name = scope.federation.setup.plugins.question(self._plugin, question)
        groups = {"all": range(self.num_clients), "cohort": self.cohort}
        chosen = groups[clients] if isinstance(clients, str) else whole_numbers(clients, self._plugin, scope.phase)
        ids = sorted(set(chosen))
        if ids and not 0 <= ids[0] <= ids[-1] < self.num_clients:
            fault, expected = f"asks clients {ids[:1]} to {ids[-1:]}", f"ids from 0 to {self.num_clients - 1}"
            raise PluginContractError.of(self._plugin, fault, expected=expected)
        scope.questions += 1
        key, sent = f"ask-{self.round}-{scope.phase}-{scope.questions}", dict(tensors or {})
        sizes = {**scope.share(key, {}), self._plugin: bytes_of(sent)}
        tasks = [
            ClientTask(
                id=f"{key}-{client}",
                kind="ask",
                client=client,
                round=self.round,
                version=scope.committed.manifest.get(client),
                shared=key,
                tensors=sent,
                meta={"plugin": self._plugin, "question": name},
            )
            for client in scope.reachable(ids)
        ]
        return self._answers(tasks, sizes, check)

    def _answers(
        self, tasks: list[ClientTask], sizes: Mapping[str, int], check: Callable[[Answer], object] | None
    ) -> Iterator[Answer]:
        scope = self._scope

        def parse(task: ClientTask, outcome: Outcome) -> Tensors:
            tensors = scope.federation.validator.answer(task, outcome)
            if check is not None:
                try:
                    check(Answer(task.client, tensors))
                except Exception as error:  # a client's tensors can make the plugin's check raise anything
                    words = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                    subject = f"client {task.client}: its answer to plugin {self._plugin!r}"
                    raise RejectUpdate(f"{subject}: {words}") from error
            return tensors

        for task, tensors in scope.answers(tasks, parse, window=self.config.max_waiting):
            for sender, size in sizes.items():
                scope.ledger[sender, "down"] += size
            if tensors is not None:
                scope.ledger[self._plugin, "up"] += bytes_of(tensors)
                yield Answer(task.client, tensors)

    @property
    @override
    def test(self) -> PublicSamples:
        if self._scope.phase != "report":
            raise PluginContractError.of(self._plugin, "reads server.test, which works in report only")
        test = self._scope.federation.dataset.test
        return PublicSamples(test, torch.arange(len(test)))

    @override
    def network(self, tensors: Mapping[str, Tensor] | None = None) -> SplitModel:
        setup = self._scope.federation.setup
        model = setup.placement.model(copied(setup.model))
        load_weights(model, {**self._scope.model, **(tensors or {})}, self._plugin, "server.network")
        return model.eval()

    @override
    def mean_of(self, updates: Sequence[ClientUpdate]) -> Tensors:
        if self._scope.phase != "aggregate":
            raise PluginContractError.of(self._plugin, "calls server.mean_of, which works in aggregate only")
        names = updates[0].model if updates else ()
        total = RunningMean(self._scope.federation.setup.layout, names)
        for update in updates:
            total.add(update.model, weight=self._scope.weights[update.client], samples=update.samples)
        with suppress(ArithmeticError):
            model = with_singular_vectors(self._scope.federation.setup, {**self._scope.model, **on_cpu(total.mean())})
            return {name: model[name] for name in names}
        return {}

    @override
    def note(self, text: str) -> None:
        self._scope.notes.add((self._plugin, text))

    @override
    def update_model(self, tensors: Mapping[str, Tensor]) -> None:
        scope = self._scope
        if scope.phase != "post_train":
            raise PluginContractError.of(
                self._plugin,
                "changes the global model, which works in post_train only",
                hint="return tensors from aggregate or server_step",
            )
        plugin = scope.federation.setup.plugins[self._plugin]
        allowed = scope.federation.setup.claimed(plugin, "corrects")
        check_partial(scope.federation.setup, tensors, allowed, self._plugin, "post_train")
        scope.model = {**scope.model, **{name: t.detach().clone().cpu() for name, t in tensors.items()}}
