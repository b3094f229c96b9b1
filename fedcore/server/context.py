"""What hooks see of the server, and what it can ask of clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcore.base.errors import PluginContractError, RejectUpdate
from fedcore.base.seeding import derive_seed, generator, random_stream
from fedcore.base.tensors import bytes_of
from fedcore.base.types import Answer, Tensors
from fedcore.client.frozen import load_state
from fedcore.client.messages import ClientFailure, ClientTask
from fedcore.hooks.contexts import ServerContext
from fedcore.hooks.setup import Setup
from fedcore.server.dispatch_order import in_order
from fedcore.server.round import Round
from fedcore.storage.state import State


class RoundContext(ServerContext):
    """What one plugin sees of the server.

    :ivar round: the round, from 0; ``rounds`` their number; ``num_clients`` all registered clients.
    :ivar cohort: the clients sampled in this round; ``accepted`` those whose updates were accepted so far.
    :ivar model: the global model w_t by name; read-only.
    :ivar state: this plugin's tensors and JSON values; what is written in a round counts when it commits.
    :ivar lr: the local learning rate of this round.
    :ivar num_classes: C; ``feature_dim`` the width d of the features.
    """

    def __init__(self, current: Round, plugin: str = "") -> None:
        self._round, self._plugin = current, plugin
        self.config = current.federation.config
        self.round, self.rounds = current.number, self.config.rounds
        self.num_clients, self.lr = self.config.clients, current.lr
        self.num_classes = current.federation.dataset.num_classes
        self.feature_dim = current.federation.setup.model.feature_dim
        self.cohort, self.accepted = current.cohort, current.accepted

    def scoped(self, plugin: str) -> ServerContext:
        """Return the view of one plugin."""
        return RoundContext(self._round, plugin)

    @property
    def available(self) -> Sequence[int]:
        """The clients that can be selected in this round, in ascending order: all, unless ``--system`` says less."""
        return self._round.available

    @property
    def model(self) -> Mapping[str, Tensor]:
        """The global model w_t by name, on the CPU."""
        return self._round.model

    @property
    def state(self) -> State:
        """This plugin's state."""
        return self._round.states.of(self._plugin)

    @property
    def trainable(self) -> list[str]:
        """The names of the trainable shared parameters, in the model's order; the others are buffers or fixed."""
        layout = self._round.federation.setup.layout
        return [name for name in layout.shared if name in layout.trainable]

    @property
    def frozen(self) -> frozenset[str]:
        """The shared parameters that no client accepted so far trained in this round, as plugins froze them."""
        return self._round.frozen

    @property
    def client_sizes(self) -> Tensor:
        """The training samples n_k of every registered client, (N,) int64."""
        return self._round.federation.partition.train.sizes

    def generator(self, purpose: str) -> torch.Generator:
        """Return the stream of this seed, round and purpose, from its start."""
        return generator(self.config.seed, purpose, round=self.round)

    def ask(
        self,
        question: str,
        *,
        clients: Literal["all", "cohort"] | Iterable[int],
        tensors: Mapping[str, Tensor] | None = None,
        check: Callable[[Tensors], object] | None = None,
    ) -> Iterator[Answer]:
        """Put a question to this plugin's client side; yields answers in ascending client id, as they come.

        Clients that fail are skipped and recorded; so are those that cannot be reached in this round. After training
        the server waits until everyone is there. Allowed in ``begin_round`` and ``post_train`` only.
        :param clients: ``"all"`` registered ones, the ``"cohort"``, or ids.
        :param check: called with each answer's tensors; one at which it raises is rejected, with its words.
        """
        current = self._round
        if current.phase not in ("begin_round", "post_train"):
            raise PluginContractError(
                f"plugin {self._plugin!r}: server.ask works in begin_round and post_train only",
                plugin=self._plugin,
            )
        chosen = (
            {"all": range(self.num_clients), "cohort": self.cohort}[clients] if isinstance(clients, str) else clients
        )
        current.asked += 1
        key = current.share(f"ask-{self.round}-{current.phase}-{current.asked}", {})
        sent = dict(tensors or {})
        tasks = [
            ClientTask(
                id=f"{key}-{client}",
                kind="ask",
                client=client,
                round=self.round,
                state_round=current.committed.manifest.get(client),
                shared=key,
                tensors=sent,
                meta={"plugin": self._plugin, "question": question},
            )
            for client in current.reached(sorted(set(chosen)))
        ]
        return self._answers(tasks, bytes_of(sent), check)

    def _answers(
        self, tasks: list[ClientTask], size: int, check: Callable[[Tensors], object] | None
    ) -> Iterator[Answer]:
        current = self._round
        engine, window = current.federation.engine, current.federation.config.max_waiting
        for task, outcome in in_order(tasks, engine.run(tasks, window=window), current.ignore):
            current.count_down()
            current.ledger.down(self._plugin, size)
            if isinstance(outcome, ClientFailure):
                current.fail(task.client, outcome.kind, outcome.message)
                continue
            try:
                tensors = current.federation.validator.answer(task, outcome)
                self._require_usable(task.client, tensors, check)
            except RejectUpdate as error:
                current.fail(task.client, error.kind, str(error))
                continue
            current.ledger.up(self._plugin, bytes_of(tensors))
            yield Answer(task.client, tensors)

    def _require_usable(self, client: int, tensors: Tensors, check: Callable[[Tensors], object] | None) -> None:
        try:
            if check is not None:
                check(tensors)
        except Exception as error:  # whatever a client's tensors make a plugin's check stumble over
            words = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise RejectUpdate(f"client {client}: its answer to plugin {self._plugin!r}: {words}") from error

    def update_model(self, tensors: Mapping[str, Tensor]) -> None:
        """Change parameters of the final global model that this plugin ``corrects``; in ``post_train`` only."""
        current = self._round
        if current.phase != "post_train":
            raise PluginContractError(
                f"plugin {self._plugin!r}: the global model can be changed in post_train only; "
                "in a round return tensors from aggregate or server_step",
                plugin=self._plugin,
            )
        plugin = current.federation.setup.plugins[self._plugin]
        allowed = current.federation.setup.claimed(plugin, "corrects")
        check_partial(current.federation.setup, tensors, allowed, self._plugin, "post_train")
        current.model = {**current.model, **{name: t.detach().clone().cpu() for name, t in tensors.items()}}

    def retrain_classifier(
        self,
        features: Tensor,
        labels: Tensor,
        *,
        epochs: int,
        lr: float,
        batch_size: int,
        momentum: float = 0.0,
    ) -> None:
        """Go on training the global classifier on given features by cross-entropy; the encoder stays as it is.

        :param features: (n, d); ``labels`` (n,) int64. Shuffled in each epoch from the run's seed.
        """
        current, setup = self._round, self._round.federation.setup
        if not len(features):
            raise PluginContractError(
                f"plugin {self._plugin!r}: retrain_classifier got no features", plugin=self._plugin
            )
        classifier = setup.model.to("cpu").classifier
        load_state(setup.model.state_dict(), current.model)
        x = features.to(next(classifier.parameters()).dtype)
        optimizer = torch.optim.SGD(classifier.parameters(), lr=lr, momentum=momentum)
        seed = derive_seed(self.config.seed, "retrain", round=self.round)
        with random_stream(seed), torch.enable_grad():
            classifier.train()
            for _ in range(epochs):
                for batch in torch.randperm(len(x)).split(batch_size):
                    optimizer.zero_grad(set_to_none=True)
                    F.cross_entropy(classifier(x[batch]), labels[batch]).backward()
                    optimizer.step()
        self.update_model({f"classifier.{name}": tensor for name, tensor in classifier.state_dict().items()})


def broadcasts(current: Round) -> dict[str, Tensors]:
    """Return what every plugin sends down beside the model."""
    found = {}
    for plugin, tensors in current.federation.setup.plugins.each("broadcast", server=RoundContext(current)):
        if tensors:
            found[plugin.name] = dict(tensors)
    return found


def check_partial(setup: Setup, tensors: Mapping[str, Tensor], allowed: Iterable[str], plugin: str, hook: str) -> None:
    """Refuse a partial state that a plugin returned: names it may not set, a wrong layout, values not finite.

    :raises PluginContractError: says which tensor, and what is wrong with it.
    """
    extra = sorted(set(tensors) - set(allowed))
    where = f"plugin {plugin!r} hook {hook}"
    if extra:
        raise PluginContractError(f"{where}: may not set {extra[0]!r}", plugin=plugin, hook=hook)
    try:
        setup.layout.check(tensors, tensors, where)
    except RejectUpdate as error:
        raise PluginContractError(str(error), plugin=plugin, hook=hook) from None


def check_cohort(cohort: Iterable[int], num_clients: int, plugin: str) -> list[int]:
    """Return a cohort in ascending order.

    :raises PluginContractError: an id that does not exist or is there twice, or nobody.
    """
    ids = [int(client) for client in cohort]
    if not ids or len(set(ids)) != len(ids) or min(ids) < 0 or max(ids) >= num_clients:
        raise PluginContractError(
            f"plugin {plugin!r} hook select_clients: returned {ids[:10]}; "
            f"expected distinct ids from 0 to {num_clients - 1}",
            plugin=plugin,
            hook="select_clients",
        )
    return sorted(ids)
