"""What hooks see: one client, one mini-batch, the server. Declared here, implemented by the client and the server.

The classes are protocols: a unit test of a plugin may hand it any object that has the attributes the plugin reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from fedcore.base.errors import PluginContractError
from fedcore.base.types import Answer, ClientUpdate, Tensors

if TYPE_CHECKING:
    from fedcore.base.config import RunConfig
    from fedcore.base.state import State
    from fedcore.data import PublicSamples
    from fedcore.models import Outputs, SplitModel


class View:
    """Base of what hooks are given: once it is made, it refuses to set an attribute, which no one would read.

    :cvar _argument: the hooks' name for it; ``_instead`` what to do in place of setting an attribute.
    """

    _argument: ClassVar[str]
    _instead: ClassVar[str]
    _plugin: str | None
    _sealed = False

    def __setattr__(self, name: str, value: object) -> None:
        if self._sealed:
            found = f"sets {self._argument}.{name}, which would change nothing"
            raise PluginContractError.of(self._plugin, found, hint=self._instead)
        super().__setattr__(name, value)


class ClientContext(Protocol):
    """What one plugin sees of one client.

    Every tensor that a hook of the client is given is on ``device``: the model, ``received``, the tensors of ``state``
    from earlier participations, batches, a question's tensors, ``update.model`` in ``pre_upload``. What a hook sends or
    keeps may be on any device.

    :ivar id: client id; ``n`` number of training samples.
    :ivar round: the round, from 0; ``rounds`` their number T.
    :ivar num_classes: C; ``device`` where the model and the samples are.
    :ivar model: the working model; read-only. An edit in ``begin_local`` is refused; others go unnoticed in a run and
        are reported by ``fedcore plugins check``.
    :ivar received: what this plugin's ``broadcast`` and ``broadcast_to`` sent down.
    :ivar state: this plugin's tensors and JSON values, kept from one participation to the next.
    :ivar scratch: this plugin's values for this round only; they survive a pause.
    :ivar lr: learning rate of this round; ``momentum`` momentum of local SGD.
    """

    id: int
    n: int
    round: int
    rounds: int
    num_classes: int
    device: torch.device
    model: SplitModel
    received: Mapping[str, Tensor]
    state: State
    scratch: dict[str, Any]
    lr: float
    momentum: float

    @property
    def class_counts(self) -> Tensor:
        """Training samples per class, (C,) int64."""

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable shared parameters by name, in the model's order: neither personal nor frozen ones.

        In ``begin_local`` those are among them that a later plugin freezes; afterwards, all that some epoch trains.
        """

    @property
    def start(self) -> Tensors:
        """The values of ``parameters`` at the start of the round: as received, or as a plugin ``starts`` them.

        Read-only. In ``begin_local`` they are those received.
        """

    @property
    def steps(self) -> int:
        """Optimizer steps executed so far in this round."""

    @property
    def added(self) -> Mapping[str, nn.Parameter]:
        """The parameters that this plugin added in this round."""

    @property
    def previous_model(self) -> SplitModel | None:
        """The frozen model of this client's last committed participation; None before the first.

        Also in evaluation. For plugins that declare ``reads = ("previous",)``.
        """

    @property
    def public(self) -> PublicSamples | None:
        """The public samples of ``--public``, on the client's device; None without."""

    def generator(self, purpose: str) -> torch.Generator:
        """Return the stream of this seed, round, client and purpose, from its start.

        It is on the CPU: draw there and move the numbers, so that all devices get the same ones.
        """

    def forward(self, indices: Tensor | None = None, model: SplitModel | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return (features, logits, labels) over the training part: eval mode, no augmentation, no gradient.

        :param indices: positions in the training part; default all, in data-set order.
        :param model: default the working model.
        """

    def gradients(
        self,
        indices: Tensor | None = None,
        model: SplitModel | None = None,
        loss: Callable[[Outputs, Tensor], Tensor] | None = None,
    ) -> Tensors:
        """Return the gradient of the mean loss over the training part: eval mode, no augmentation, fixed chunks.

        For ``begin_local``, ``end_local``, ``pre_upload``, questions and ``personal_model``.

        :param indices: positions in the training part; default all, in data-set order.
        :param model: default the working model; another needs the same names.
        :param loss: mean loss of outputs and labels, of shape (); default cross-entropy.
        :returns: By name, of the model's trainable parameters, shared and personal.
        """

    def network(self, tensors: Mapping[str, Tensor] | None = None) -> SplitModel:
        """Return a copy of the working model with these weights in place of its own, in eval mode.

        :param tensors: by name, such as the ``client.state`` of a plugin that keeps a model there; default none.
        """

    def add_parameters(
        self, tensors: Mapping[str, Tensor], *, lr: float | None = None, weight_decay: float | None = None
    ) -> None:
        """Train extra leaf tensors with this round's SGD; never uploaded, averaged or corrected.

        Works in ``begin_local`` only.

        :param lr: their own learning rate; default the round's. ``weight_decay`` likewise.
        """

    def freeze(self, patterns: tuple[str, ...] | list[str], *, epochs: slice = slice(None)) -> None:
        """Exclude parameters from this round's training, by patterns over the model's names.

        Works in ``begin_local`` only.

        :param epochs: of the client's local epochs, those in which they are not trained; default all. Momentum waits.
            Not next to plugins that assume ``sgd``.
        """


class Step(Protocol):
    """What a plugin sees of one mini-batch. All tensors are read-only: clone one to edit it.

    An edit of ``y``, ``features`` or ``logits`` in ``task_loss`` or ``local_loss`` ends the run.

    :ivar x: the model's input: (B, ...), or a batch object of the data set's kind; ``y`` labels (B,) int64;
        ``indices`` positions in the client's training part (B,).
    :ivar features: encoder(x), (B, d); ``logits`` classifier(features), (B, C).
    """

    x: Any
    y: Tensor
    indices: Tensor
    features: Tensor
    logits: Tensor

    @property
    def client(self) -> ClientContext:
        """The client that trains."""

    @property
    def model(self) -> SplitModel:
        """The local model in training."""

    @property
    def round(self) -> int:
        """The round, from 0."""

    @property
    def rounds(self) -> int:
        """The number of rounds, T."""

    @property
    def progress(self) -> float:
        """round / rounds: 0 in the first round, (T - 1) / T in the last."""

    @property
    def epoch(self) -> int:
        """The local epoch, from 0: the pass over the client's samples, the last cut short by ``--local-steps``."""

    @property
    def added(self) -> Mapping[str, nn.Parameter]:
        """The parameters that this plugin added in ``begin_local``."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable shared parameters."""

    @property
    def reference(self) -> list[Tensor]:
        """The values of ``parameters`` at the start of the round."""

    def frozen(self, name: str) -> Outputs | None:
        """Return (features, logits) of the ``"global"`` or ``"previous"`` model on this batch; None if there is none.

        :raises PluginContractError: the plugin did not declare that it ``reads`` the model.
        """

    @property
    def global_model(self) -> SplitModel:
        """The frozen model that the client started the round from."""

    @property
    def previous_model(self) -> SplitModel | None:
        """The client's frozen model of its last committed participation; None on the first."""

    def random(self, purpose: str) -> AbstractContextManager[None]:
        """Draw from a stream of this purpose, client, round, epoch and batch; the model's dropout is untouched."""

    def gradients_at(self, weights: Mapping[str, Tensor], rows: Tensor | slice | None = None) -> dict[str, Tensor]:
        """Return the gradient of the whole objective at other weights, or on some rows of the batch, by name.

        The objective is the task's loss with the terms of all plugins. It works in the hook ``gradients`` only, and
        leaves no trace: BatchNorm's statistics, what terms note in ``scratch`` and the recorded losses are those of
        the step's own pass, and random numbers (dropout) are drawn alike. A step that draws any is not captured.

        :param weights: values of parameters that the step trains, by name; the others stay as they are.
        :param rows: positions in the batch; default all. In a model with BatchNorm two at least.
        """


class ServerContext(Protocol):
    """What one plugin sees of the server.

    Every tensor that a hook of the server is given is on the CPU, wherever clients train: ``model``, ``state``,
    ``buffers``, ``mean``, ``update.model``, ``update.payload``, snapshots, answers. Only ``network`` and ``public`` are
    on the run's device. What a hook returns or sends may be on any device.

    :ivar config: the run's configuration.
    :ivar round: the round, from 0; ``rounds`` their number; ``num_clients`` all registered clients.
    :ivar cohort: the clients sampled in this round; ``accepted`` those whose updates were accepted so far. Both are
        empty outside of a round.
    :ivar lr: the local learning rate of this round.
    :ivar num_classes: C; ``feature_dim`` the width d of the features.
    """

    config: RunConfig
    round: int
    rounds: int
    num_clients: int
    cohort: Sequence[int]
    accepted: Sequence[int]
    lr: float
    num_classes: int
    feature_dim: int

    @property
    def available(self) -> Sequence[int]:
        """The clients that can be selected in this round, in ascending order: all, unless ``--system`` says less."""

    @property
    def model(self) -> Mapping[str, Tensor]:
        """The global model w_t by name, on the CPU; read-only."""

    @property
    def state(self) -> State:
        """This plugin's tensors and JSON values; what is written in a round counts when the round commits.

        A round that leaves nan or inf in one of the tensors is not committed, and the run stops.
        """

    @property
    def shared(self) -> list[str]:
        """The names of the parameters and buffers that travel, in the model's order: neither personal nor fixed."""

    @property
    def trainable(self) -> list[str]:
        """The names of the trainable shared parameters, in the model's order; the others are buffers or fixed."""

    @property
    def frozen(self) -> frozenset[str]:
        """The shared parameters that no client accepted so far trained in this round, as plugins froze them.

        None outside of a round.
        """

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """The averaged shared buffers (BatchNorm's statistics) of the next model; in ``server_step`` only, else empty.

        ``server.network({**mean, **server.buffers})`` is then the next model as it stands.
        """

    @property
    def staleness(self) -> Mapping[int, int]:
        """Client of the cohort -> server steps since it got its model, where clients do not wait for each other.

        That is with ``--system concurrency``, for plugins that read ``"staleness"``; empty otherwise.
        """

    @property
    def client_sizes(self) -> Tensor:
        """The training samples n_k of every registered client, (N,) int64."""

    def generator(self, purpose: str) -> torch.Generator:
        """Return the stream of this seed, round and purpose, from its start; on the CPU."""

    def ask(
        self,
        clients: Literal["all", "cohort"] | Iterable[int],
        question: Callable[..., Any],
        *,
        tensors: Mapping[str, Tensor] | None = None,
        check: Callable[[Answer], object] | None = None,
    ) -> Iterator[Answer]:
        """Put a question to this plugin's client side; yields answers in ascending client id, as they come.

        Clients that fail are skipped and recorded; so are those that cannot be reached in this round. After training
        the server waits until every client can be reached. Allowed in ``select_clients``, ``begin_round``,
        ``aggregate``, ``end_round`` and ``post_train`` only; the clients answer from ``server.model``, and from their
        state before the round.

        :param clients: ``"all"`` registered ones, the ``"cohort"`` (not in ``select_clients``), or ids.
        :param question: a method of the plugin that is marked with ``@question``, such as ``self.statistics``.
        :param tensors: sent along, for a question that takes ``tensors``.
        :param check: called with each answer; one at which it raises is rejected, with its message.
        """

    @property
    def public(self) -> PublicSamples | None:
        """The public samples of ``--public``, on the run's device; None without."""

    def network(self, tensors: Mapping[str, Tensor] | None = None) -> SplitModel:
        """Return a copy of the model with these weights in place of w_t's, on the run's device, in eval mode.

        :param tensors: by name, such as ``update.model``; default w_t alone.
        """

    def mean_of(self, updates: Sequence[ClientUpdate]) -> Tensors:
        """Return the mean of some of the round's updates, such as a cluster's, as the core makes it of all.

        Parameters are weighted as the hook ``weight`` says, buffers by samples. Allowed in ``aggregate`` only.

        :param updates: some of those that ``aggregate`` is given.
        :returns: by the names that the plugin owns; empty without an update, or where all weights are 0.
        """

    def update_model(self, tensors: Mapping[str, Tensor]) -> None:
        """Change parameters of the final global model that this plugin ``corrects``; in ``post_train`` only."""

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
        """Train the global classifier further on given features by cross-entropy; the encoder does not change.

        :param features: (n, d); ``labels`` (n,) int64, both on the CPU. Shuffled in each epoch from the run's seed.
        :raises DivergedError: the weights are not finite, or above 1e18; the model is unchanged.
        """
