"""What a plugin sees of one mini-batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor, nn

from fedcore.base.errors import PluginContractError
from fedcore.base.seeding import random_stream
from fedcore.client.context import context_of
from fedcore.client.session import LocalSession
from fedcore.data.client import Picked
from fedcore.hooks.contexts import ClientContext, Step
from fedcore.models import Outputs, SplitModel


class Passes(Protocol):
    """Takes further passes of a step: :class:`fedcore.client.second_pass.SecondPass`."""

    @property
    def is_open(self) -> bool:
        """Whether the hook ``gradients`` runs."""

    def gradients_at(
        self, batch: Batch, weights: Mapping[str, Tensor], rows: Tensor | slice | None
    ) -> dict[str, Tensor]:
        """Return the gradient of the whole objective by name."""


class Batch:
    """One mini-batch of one client, shared by the views of all plugins.

    :ivar second: takes further passes, where a plugin implements ``gradients``.
    :ivar depends_on: which of ``round``, ``client``, ``epoch`` and ``batch`` hooks read; a captured step has their
        values compiled in, so it can be replayed only where these are the same.
    """

    def __init__(self, session: LocalSession, epoch: int, number: int, picked: Picked) -> None:
        self.session, self.epoch, self.number = session, epoch, number
        self.picked = picked
        self.x = session.data.inputs_of(picked)
        self.indices, self.y = picked.positions, picked.labels
        self.outputs: Outputs
        self.depends_on: set[str] = set()
        self.second: Passes | None = None
        self._frozen: dict[str, Outputs | None] = {}

    def part(self, rows: Tensor | slice | None) -> Batch:
        """Return a batch of some rows of this one, for another pass of the same step; None for all rows."""
        if rows is None:
            part = copy.copy(self)
        else:
            some = (None if field is None else field[rows] for field in self.picked)
            part = Batch(self.session, self.epoch, self.number, Picked(*some))  # type: ignore[arg-type]
            part.depends_on = self.depends_on
        part.second = None
        return part

    def frozen(self, name: str) -> Outputs | None:
        """Return a frozen model's outputs on this batch, computed at most once."""
        if name not in self._frozen:
            model = self.session.working.frozen[name]
            if not model.present:
                self._frozen[name] = None
            elif self.session.data.varies or not self.session.work.sees_all_samples:
                self._frozen[name] = model.outputs(self.x)
            else:
                self._frozen[name] = model.cached_outputs(self.indices, self.session.data)
        return self._frozen[name]


class BatchStep(Step):
    """What a plugin sees of one mini-batch.

    :ivar x: the model's input: (B, ...), or a batch object of the data set's kind; ``y`` labels (B,) int64;
        ``indices`` positions in the client's training part (B,).
    :ivar features: encoder(x), (B, d); ``logits`` classifier(features), (B, C).
    """

    def __init__(self, batch: Batch, plugin: str | None = None) -> None:
        self._batch = batch
        self._plugin = plugin
        self.x, self.y, self.indices = batch.x, batch.y, batch.indices
        self.features, self.logits = batch.outputs

    def scoped(self, plugin: str) -> Step:
        """Return the view of one plugin."""
        return BatchStep(self._batch, plugin)

    @property
    def client(self) -> ClientContext:
        """The client that trains."""
        self._batch.depends_on.add("client")
        return context_of(self._batch.session, self._plugin or "")

    @property
    def model(self) -> SplitModel:
        """The local model in training."""
        return self._batch.session.working.module

    @property
    def round(self) -> int:
        """The round, from 0."""
        self._batch.depends_on.add("round")
        return self._batch.session.round

    @property
    def rounds(self) -> int:
        """The number of rounds, T."""
        return self._batch.session.config.rounds

    @property
    def progress(self) -> float:
        """round / rounds: 0 in the first round, (T - 1) / T in the last."""
        return self.round / self.rounds

    @property
    def epoch(self) -> int:
        """The local epoch, from 0: the pass over the client's samples, the last cut short by ``--local-steps``."""
        self._batch.depends_on.add("epoch")
        return self._batch.epoch

    @property
    def added(self) -> Mapping[str, nn.Parameter]:
        """The parameters that this plugin added in ``begin_local``."""
        self._batch.depends_on.add("client")
        return self._batch.session.requests.added.get(self._plugin or "", {})

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable shared parameters."""
        return self._batch.session.training.shared

    @property
    def reference(self) -> list[Tensor]:
        """The values of ``parameters`` at the start of the round."""
        return self._batch.session.training.reference

    def frozen(self, name: str) -> Outputs | None:
        """Return (features, logits) of the ``"global"`` or ``"previous"`` model on this batch; None if there is none.

        :raises PluginContractError: the plugin did not declare that it ``reads`` the model.
        """
        self._require(name)
        self._batch.depends_on.add("client")
        return self._batch.frozen(name)

    @property
    def global_model(self) -> SplitModel:
        """The frozen model that the client started the round from."""
        self._require("global")
        return self._batch.session.working.frozen["global"].module

    @property
    def previous_model(self) -> SplitModel | None:
        """The client's frozen model of its last committed participation; None on the first."""
        self._require("previous")
        self._batch.depends_on.add("client")
        previous = self._batch.session.working.frozen["previous"]
        return previous.module if previous.present else None

    @contextmanager
    def random(self, purpose: str) -> Iterator[None]:
        """Draw from a stream of this purpose, client, round, epoch and batch; the model's dropout is untouched."""
        batch = self._batch
        batch.depends_on.add("batch")
        seed = batch.session.derive_seed(f"{purpose}/{batch.epoch}/{batch.number}")
        with random_stream(seed, batch.session.working.device):
            yield

    def gradients_at(self, weights: Mapping[str, Tensor], rows: Tensor | slice | None = None) -> dict[str, Tensor]:
        """Return the gradient of the whole objective at other weights, or on some rows of the batch, by name."""
        second = self._batch.second
        if second is None or not second.is_open:
            raise PluginContractError.of(
                self._plugin or "",
                "calls step.gradients_at, which works in the hook gradients only",
                round=self._batch.session.round,
                client=self._batch.session.client,
            )
        return second.gradients_at(self._batch, weights, rows)

    def _require(self, model: str) -> None:
        self._batch.session.plugins.require_reads(model, self._plugin or "")
