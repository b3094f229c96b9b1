"""The objects that hooks see: a client, a mini-batch, the server. The rooms client and server implement them.

The classes are protocols. A unit test of a plugin may pass any object that has the attributes that the plugin reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, overload

import torch
from torch import Tensor, nn

from fedcore.base.errors import PluginContractError
from fedcore.base.types import Answer, ClientUpdate, Tensors

if TYPE_CHECKING:
    from fedcore.base.config import RunConfig
    from fedcore.base.plugin_state import State
    from fedcore.data import PublicSamples, Task
    from fedcore.hooks.plugin import Plugin
    from fedcore.models import Layout, Outputs
    from fedcore.models.split import ModelTask, SplitModel


class View:
    """Base of the objects that hooks see. Once made, it refuses to set an attribute: nothing would read the value."""

    _argument: ClassVar[str]
    """The name of the hooks' argument."""
    _instead: ClassVar[str]
    """The hint of the error: where a plugin keeps values instead."""
    _plugin: str | None
    _sealed = False

    def __setattr__(self, name: str, value: object) -> None:
        if self._sealed:
            fault = f"sets {self._argument}.{name}, which would change nothing"
            raise PluginContractError.of(self._plugin, fault, hint=self._instead)
        super().__setattr__(name, value)


class RunPlugins(Protocol):
    """The plugins of a run. Iterating over them leaves out the built-in plugin."""

    def __iter__(self) -> Iterator[Plugin]: ...

    def __getitem__(self, name: str) -> Plugin: ...

    def implementers(self, hook: str) -> list[Plugin]:
        """Return the user's plugins that implement a hook, in the order of its calls."""

    def reads(self, model: str) -> bool:
        """Return whether any plugin declares that it reads the frozen ``model``."""

    def require_unfrozen_steps(self, plugin_name: str) -> None:
        """Refuse other plugins that count a client's steps, for a plugin that freezes parameters in some epochs."""


class RunSetup(Protocol):
    """The set-up of a run on one side, server or client, as ``check_run`` sees it. All of it is read-only."""

    @property
    def config(self) -> RunConfig:
        """The run's configuration."""

    @property
    def plugins(self) -> RunPlugins:
        """All plugins of the run; ``plugins.implementers("gradients")`` lists those that implement a hook."""

    @property
    def model(self) -> SplitModel:
        """The initial model, as all plugins configured it."""

    @property
    def task(self) -> ModelTask:
        """The number of classes, the shape of an input and the seed."""

    @property
    def layout(self) -> Layout:
        """The model's names, in ``layout.shared``, ``personal``, ``fixed``, ``trainable`` and ``buffers``."""

    @property
    def breaks(self) -> Mapping[int, list[str]]:
        """Epoch -> the plugins that exchange at its start, in user order."""

    @property
    def public(self) -> PublicSamples | None:
        """The public samples of ``--public``; None without this option."""

    def keeper_of(self, names: Collection[str]) -> str | None:
        """Return the first plugin that keeps any of some names on the clients; None if no plugin does."""

    def require_shared(self, plugin: str) -> None:
        """Refuse a plugin that works on trained shared parameters if all of them stay on the clients.

        :raises PluginConflictError: names the plugin that keeps the parameters on the clients.
        """

    def note(self, plugin: str, text: str) -> None:
        """Tell the user once, as a note at the start of the run, what a plugin found in the set-up."""

    def require_received_start(self, plugin_name: str) -> None:
        """Refuse other plugins that let clients start from other shared values than the received ones.

        For ``check_run`` of a plugin that compares a client's model with the received one.

        :raises PluginConflictError: names both.
        """

    def claimed(self, plugin: Plugin, declaration: str, *, personal: bool = False) -> list[str]:
        """Return the names that a plugin ``owns``, ``starts``, ``exchanges``, ``corrects`` or ``encodes``.

        Parameters that are not trained are left out.

        :param personal: include names that stay on the clients.
        """


class ClientContext(Protocol):
    """One client, as one plugin sees it.

    Every tensor that a hook of the client is given is on ``device``: the model, ``received``, the tensors of ``state``
    from earlier participations, batches, a question's tensors, ``update.model`` in ``pre_upload``. Tensors that a hook
    sends or keeps may be on any device.
    """

    config: RunConfig
    """The run's configuration."""
    id: int
    """The client's id."""
    n: int
    """The number of training samples."""
    round: int
    """The round, from 0; in an evaluation the number of finished rounds."""
    rounds: int
    """The number of rounds, T."""
    num_classes: int
    """The number of classes, C; of a task without classes, the width of the logits."""
    task: Task
    """What the labels are. ``task.loss(logits, labels)`` is the mean loss of a batch."""
    device: torch.device
    """The device of the model and the samples."""
    model: SplitModel
    """The working model; read-only. Refused are an edit in ``begin_local`` and ``parameter.data = ...`` in any hook.

    ``fedcore plugins check`` finds others, such as one of ``.data`` in place. ``end_local`` may set values
    that stay on the client (``personal_parameters``).
    """
    received: Mapping[str, Tensor]
    """The tensors that this plugin's ``broadcast`` and ``broadcast_to`` sent; read-only. An edit ends the run."""
    state: State
    """This plugin's tensors and JSON values, kept from one participation to the next."""
    scratch: dict[str, Any]
    """This plugin's values for this round only; they survive a pause."""
    lr: float
    """The learning rate of this round; in an evaluation, that of the last round."""
    momentum: float
    """The momentum of local SGD."""
    added: Mapping[str, nn.Parameter]
    """The parameters that this plugin added in this round."""
    public: PublicSamples | None
    """The public samples of ``--public``, on the client's device; None without this option."""

    @property
    def class_counts(self) -> Tensor:
        """Training samples per class, (C,) int64."""

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable shared parameters by name, in the model's order, without personal and frozen parameters.

        In ``begin_local`` they include parameters that plugins freeze. In a step they are the parameters that its epoch
        trains, after the last epoch those that at least one epoch trained.
        """

    @property
    def start(self) -> Tensors:
        """The values of ``parameters`` at the start of the round; read-only.

        They are the received values, or the values with which a plugin ``starts`` the client. In ``begin_local`` of
        such a plugin they are the received values.
        """

    @property
    def steps(self) -> int:
        """The number of optimizer steps taken so far in this round."""

    @property
    def previous_model(self) -> SplitModel | None:
        """The frozen model of this client's last committed participation; None before the first.

        It exists in evaluation, too. The plugin has to declare ``reads = ("previous",)``.
        """

    def generator(self, purpose: str) -> torch.Generator:
        """Return the random stream of this seed, round, client and purpose, from its start.

        Plugins share the purposes: begin one with the plugin's name. The stream is on the CPU. Draw there and move the
        numbers, so that they are the same on every device.
        """

    def forward(self, indices: Tensor | None = None, model: SplitModel | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return (features, logits, labels) of the client's training samples: eval mode, no augmentation, no gradient.

        :param indices: positions among the training samples; default all, by position.
        :param model: the model to use; default the working model.
        """

    def gradients(
        self,
        indices: Tensor | None = None,
        model: SplitModel | None = None,
        loss: Callable[[Outputs, Tensor], Tensor] | None = None,
    ) -> Tensors:
        """Return the gradient of the mean loss over the training samples: eval mode, no augmentation, fixed chunks.

        It works in ``begin_local``, ``end_local``, ``pre_upload``, ``personal_model`` and questions.

        :param indices: positions among the training samples; default all, by position.
        :param model: the model to use, with the same names; default the working model.
        :param loss: takes outputs and labels, returns their mean loss of shape (); default cross-entropy.
        :returns: The gradients of the model's trainable parameters, shared and personal, by name.
        """

    def network(self, tensors: Mapping[str, Tensor] | None = None) -> SplitModel:
        """Return a copy of the working model with these weights instead of its own, in eval mode.

        :param tensors: weights by name, such as the ``client.state`` of a plugin that keeps a model there. Names that
            are left out keep the working model's weights.
        """

    def add_parameters(
        self, tensors: Mapping[str, Tensor], *, lr: float | None = None, weight_decay: float | None = None
    ) -> None:
        """Train extra parameters with this round's optimizer. They are never sent, averaged or corrected.

        This method works in ``begin_local`` only.

        :param tensors: initial values by name. The parameters are in ``client.added`` and ``step.added``.
        :param lr: their learning rate; default the round's.
        :param weight_decay: their weight decay; default the run's.
        """

    def freeze(self, patterns: tuple[str, ...] | list[str], *, epochs: slice = slice(None)) -> None:
        """Exclude parameters from this round's training.

        This method works in ``begin_local`` only.

        :param patterns: patterns over the names of the model's parameters.
        :param epochs: the local epochs without training of these parameters; default all. Their momentum is kept
            meanwhile. A part of the epochs is refused next to plugins that assume ``sgd``.
        """


class Step(Protocol):
    """One mini-batch, as one plugin sees it. All tensors are read-only: clone a tensor to edit it.

    An edit of ``y``, ``features``, ``logits`` or a frozen model's outputs in ``task_loss`` or ``local_loss`` ends the
    run.
    """

    x: Any
    """The model's input: a tensor (B, ...), or a batch object of the data set's kind."""
    y: Tensor
    """The labels, (B,) int64; of a task without classes (B, ...)."""
    indices: Tensor
    """The samples' positions among the client's training samples, (B,) int64."""
    features: Tensor
    """encoder(x), (B, d)."""
    logits: Tensor
    """classifier(features), (B, C)."""
    task: Task
    """What the labels are. ``step.task.loss(logits, y)`` is the mean loss of a batch."""
    model: SplitModel
    """The local model in training."""
    round: int
    """The round, from 0."""
    rounds: int
    """The number of rounds, T."""
    progress: float
    """round / rounds: 0 in the first round, (T - 1) / T in the last."""
    epoch: int
    """The local epoch, from 0: a pass over the client's samples. ``--local-steps`` can cut the last one short."""
    reference: list[Tensor]
    """The values of ``parameters`` at the start of the round."""

    @property
    def client(self) -> ClientContext:
        """The client that trains."""

    @property
    def added(self) -> Mapping[str, nn.Parameter]:
        """The parameters that this plugin added in ``begin_local``."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable shared parameters."""

    @overload
    def frozen(self, name: Literal["global"]) -> Outputs: ...
    @overload
    def frozen(self, name: Literal["previous"]) -> Outputs | None:
        """Return (features, logits) of the ``"global"`` or ``"previous"`` model on this batch.

        :returns: None for ``"previous"`` on the client's first participation.
        :raises PluginContractError: the plugin does not declare that it ``reads`` the model.
        """

    @property
    def global_model(self) -> SplitModel:
        """The frozen model from which the client started the round."""

    @property
    def previous_model(self) -> SplitModel | None:
        """The frozen model of the client's last committed participation; None before the first."""

    def random(self, purpose: str) -> AbstractContextManager[None]:
        """Let torch draw from a stream of this purpose, client, round, epoch and batch inside a ``with`` block.

        The random numbers of the model, such as dropout's, do not change. A runner that replays steps or takes several
        at once takes a step that draws here by itself, which is slower: draw only if there is something to draw.
        """

    def gradients_at(self, weights: Mapping[str, Tensor], rows: Tensor | slice | None = None) -> dict[str, Tensor]:
        """Return the gradient of the whole objective at other weights, or on some rows of the batch, by name.

        The objective is the task loss with the terms of all plugins. This method works in the hook ``gradients`` only.
        It leaves no trace: BatchNorm's statistics, notes of terms in ``scratch`` and the recorded losses come from the
        step's own pass. It draws the same random numbers (dropout) as that pass. A step with random numbers is not
        replayed.

        :param weights: values by name of parameters that the step trains. Parameters you leave out keep their values.
        :param rows: positions in the batch; default all. A model with BatchNorm needs at least two.
        """


class ServerContext(Protocol):
    """The server, as one plugin sees it.

    Every tensor that a hook of the server is given is on the CPU, wherever clients train: ``model``, ``state``,
    ``buffers``, ``mean``, ``update.model``, ``update.payload``, snapshots, answers. Only ``network`` and ``public`` are
    on the run's device. Tensors that a hook returns or sends may be on any device.
    """

    config: RunConfig
    """The run's configuration."""
    round: int
    """The round, from 0; in an evaluation and in ``post_train`` the number of finished rounds."""
    rounds: int
    """The number of rounds, T."""
    num_clients: int
    """The number of clients that can take part, N. Their ids are 0 to N - 1; unseen clients have the ids from N on."""
    cohort: Sequence[int]
    """The clients selected in this round; empty outside of a round. It is a copy, and so is ``accepted``."""
    lr: float
    """The local learning rate of this round; in ``post_train``, that of the last round."""
    num_classes: int
    """The number of classes, C; of a task without classes, the width of the logits."""
    task: Task
    """What the labels are. ``task.loss(logits, labels)`` is the mean loss of a batch."""
    feature_dim: int
    """The width of the features, d."""
    shared: list[str]
    """The names of the parameters and buffers that travel, in the model's order. Personal and fixed ones do not."""
    trainable: list[str]
    """The names of the trainable shared parameters, in the model's order."""
    personal: list[str]
    """The names of the parameters and buffers that stay on the clients, in the model's order."""
    staleness: Mapping[int, int]
    """Client of the cohort -> server steps since it received its model, with ``--system concurrency``.

    A plugin of the run has to declare ``reads = ("staleness",)``. The mapping is empty without the option.
    """
    public: PublicSamples | None
    """The public samples of ``--public``, on the run's device; None without this option."""

    @property
    def available(self) -> Sequence[int]:
        """The clients that can be selected in this round, in ascending order: all, unless ``--system`` limits them."""

    @property
    def accepted(self) -> Sequence[int]:
        """The clients of this round whose updates were accepted so far; empty outside of a round."""

    @property
    def model(self) -> Mapping[str, Tensor]:
        """The global model w_t by name, on the CPU; read-only."""

    @property
    def state(self) -> State:
        """This plugin's tensors and JSON values. Values written in a round are kept when the round commits.

        If a round leaves nan or inf in one of the tensors, the round does not commit, and the run stops.
        """

    @property
    def frozen(self) -> frozenset[str]:
        """The names of shared parameters that plugins froze on every client accepted so far in this round.

        The set is empty outside of a round.
        """

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """The averaged shared buffers (BatchNorm's statistics) of the next model; empty outside of ``server_step``.

        In ``server_step``, ``server.network({**mean, **server.buffers})`` is the next model so far.
        """

    @property
    def client_sizes(self) -> Tensor:
        """The training samples n_k of every client that can take part, (N,) int64."""

    def generator(self, purpose: str) -> torch.Generator:
        """Return the random stream of this seed, round and purpose, from its start; it is on the CPU.

        Plugins share the purposes: begin one with the plugin's name.
        """

    def ask(
        self,
        clients: Literal["all", "cohort"] | Iterable[int],
        question: Callable[..., Any],
        *,
        tensors: Mapping[str, Tensor] | None = None,
        check: Callable[[Answer], object] | None = None,
    ) -> Iterator[Answer]:
        """Put a question to clients of this plugin; yield the answers as they come, in ascending order of client ids.

        It works in ``select_clients``, ``begin_round``, ``aggregate``, ``end_round`` and ``post_train`` only. The
        clients answer from ``server.model`` and from their state before the round. Clients that fail, or that cannot
        be reached in this round, are skipped and recorded. After training the server waits until every client can be
        reached. The round's bytes count a download of the model for each client that is asked.

        :param clients: ``"all"`` N clients, the ``"cohort"`` (not in ``select_clients``), or client ids.
        :param question: a method of the plugin that is marked with ``@question``, such as ``self.statistics``.
        :param tensors: tensors for a question that takes the argument ``tensors``.
        :param check: called with each answer. If it raises, the answer is rejected, and the record has the message.
        :raises PluginCallError: the question's method raised on every client that was asked.
        """

    @property
    def test(self) -> PublicSamples:
        """The test samples, on the run's device. They are for figures: this works in ``report`` only."""

    def network(self, tensors: Mapping[str, Tensor] | None = None) -> SplitModel:
        """Return a copy of the model with these weights instead of w_t, on the run's device, in eval mode.

        :param tensors: weights by name, such as ``update.model``. Names that are left out keep the weights of w_t.
        """

    def mean_of(self, updates: Sequence[ClientUpdate]) -> Tensors:
        """Return the mean of some of the round's updates, such as a cluster's. It works in ``aggregate`` only.

        Parameters are weighted by the hook ``weight`` and buffers by samples, as in the mean of all updates.

        :param updates: some of the updates that ``aggregate`` is given.
        :returns: The means by the names that the plugin owns; empty if there is no update or all weights are 0.
        """

    def note(self, text: str) -> None:
        """Tell the user something about this round, such as a client that has no counterpart.

        The output has a text of a plugin once, as a note, with the first round that it is about. Each round's line of
        ``metrics.jsonl`` has its own under ``notes``. They come when the round commits. In an evaluation and in
        ``report`` this method does nothing.
        """

    def update_model(self, tensors: Mapping[str, Tensor]) -> None:
        """Change parameters of the final global model that this plugin ``corrects``; in ``post_train`` only."""
