"""Survival: the time of an event, or the time until which it did not happen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedcore import DataError
from fedcore_tasks.targets import Array, Targets, TaskFigure, bins_of, censored, numbers

INTERVALS = 10
"""Intervals of time of :class:`SurvivalDiscrete`."""

BLOCK = 1000
TIED = 1e-8
"""Risks that differ by no more are equal, as in scikit-survival."""


class Survival(Targets):
    """Rows (time, event) or a structured array of an event and a time; Cox's partial likelihood of each batch.

    The one logit is the log of the relative hazard. The risk set of an event is the samples of the batch that are under
    observation at its time (Breslow's form for equal times), so a loss of other batches is another number.
    """

    name: ClassVar[str] = "survival"
    example = "simulated-survival"

    def build(self, form: Mapping[str, Any]) -> None:
        """Set the figure."""
        super().build(form)
        self.metrics = {"c-index": TaskFigure("rows", self._rows, _concordance, (1, 3), by_row=True)}

    @classmethod
    def suits(cls, y: Array) -> bool:
        """Return whether labels are times with events, or such a structured array; one class of the two answers."""
        return cls is Survival and (censored(y) or (y.dtype.names is not None and len(y.dtype.names) == 2))

    @classmethod
    def read(cls, y: Array, count: int, where: str) -> Tensor:
        """Return times and events as rows (time, event), (n, 2) float64."""
        if names := y.dtype.names:
            event, time = sorted(names, key=lambda name: y[name].dtype.kind != "b")
            y = np.column_stack([y[time], y[event]])
        y = numbers(y, count, where, cls.name).astype(np.float64)
        if y.shape != (count, 2) or not np.isin(y[:, 1], (0, 1)).all() or (y[:, 0] < 0).any():
            raise DataError(
                f"{where}: task {cls.name!r} takes rows (time, event): a time from 0 on, and 1 if the event happened "
                "then or 0 if it had not happened by then"
            )
        return torch.from_numpy(y)

    @classmethod
    def width(cls, labels: Tensor) -> int:
        """Return 1."""
        return 1

    @classmethod
    def form_of(cls, labels: Tensor) -> dict[str, Any]:
        """Return the form of training labels.

        :raises DataError: the event happened in none of them.
        """
        if not labels[:, 1].any():
            raise DataError(
                f"task {cls.name!r}: the event happened in none of the {len(labels)} training samples, so there is "
                "nothing to learn; check the labels (time, event), whose event is 1 where it happened"
            )
        return super().form_of(labels)

    def fitted(self, labels: Tensor) -> Self:
        """Return the task of these labels."""
        return type(self)(labels)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the negative log partial likelihood by event; 0 without events."""
        risk, (time, event) = logits[:, 0], labels.unbind(dim=1)
        watched = time.unsqueeze(0) >= time.unsqueeze(1)  # (event's sample, sample of its risk set)
        hazards = torch.where(watched, risk.unsqueeze(0), -torch.inf).logsumexp(dim=1)
        happened = event.to(risk.dtype)
        return ((hazards - risk) * happened).sum() / happened.sum().clamp(min=1)

    def predict(self, logits: Tensor) -> Tensor:
        """Return the log of the relative hazard, (B,): the higher, the earlier the event."""
        return logits[:, 0]

    def strata(self, labels: Tensor) -> Tensor:
        """Return samples by event, and by the bin of their time between its quintiles."""
        return 2 * bins_of(labels[:, 0], 5) + labels[:, 1].long()

    def _rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return risk, time and event of every sample, (B, 3) float64."""
        return torch.cat([self.predict(logits.double()).unsqueeze(1), labels.double()], dim=1)


class SurvivalDiscrete(Survival):
    """Rows (time, event) or a structured array; a logit of the hazard of each of ten intervals of time.

    This is the logistic hazard (Gensheimer and Narasimhan, PeerJ 2019). The intervals end at the deciles of the event
    times of the clients' training parts. A sample is at risk in each interval before its event and in that of the
    event; a censored one in those whose middle it reached. Unlike Cox's, the loss is a sum over samples, so batches of
    any size train on the same one.
    """

    name = "survival-discrete"

    @classmethod
    def form_of(cls, labels: Tensor) -> dict[str, Any]:
        """Return the ends of the intervals, too."""
        form = super().form_of(labels)
        time, event = labels.double().unbind(dim=1)
        ends = torch.quantile(time[event > 0], torch.linspace(0, 1, INTERVALS + 1, dtype=torch.float64)[1:])
        return {**form, "ends": ends.tolist()}

    def build(self, form: Mapping[str, Any]) -> None:
        """Set the intervals, too."""
        super().build(form)
        self.ends = list(map(float, form["ends"]))

    @classmethod
    def width(cls, labels: Tensor) -> int:
        """Return the number of intervals."""
        return INTERVALS

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean negative log-likelihood of the samples."""
        time, event = labels[:, 0], labels[:, 1] > 0
        at_risk, happened = [], []
        for start, end in zip([-math.inf, *self.ends], self.ends, strict=False):  # scalars: nothing is copied
            reached = time >= (max(start, 0.0) + end) / 2
            at_risk.append(torch.where(event, time > start, reached))
            happened.append(event & (time > start) & (time <= end))
        weight, target = (torch.stack(columns, dim=1).to(logits.dtype) for columns in (at_risk, happened))
        return F.binary_cross_entropy_with_logits(logits, target, weight, reduction="sum") / len(logits)

    def predict(self, logits: Tensor) -> Tensor:
        """Return the sum over the intervals of the cumulative hazard, (B,): the higher, the earlier the event."""
        return F.softplus(logits).cumsum(dim=1).sum(dim=1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability to survive each interval, from the start on, (B, C)."""
        return F.logsigmoid(-logits).cumsum(dim=1).exp()


def _concordance(rows: Tensor) -> float:
    """Return Harrell's concordance index; nan without a pair that can be compared."""
    return concordance_index(*rows.numpy().T)


def concordance_index(risk: Array, time: Array, event: Array) -> float:
    """Return the share of comparable pairs in which the sample with the earlier event has the higher risk.

    A sample with an event is comparable with all later ones, and with those censored at the same time. Equal risks
    count one half.

    :param risk: (n,); ``time`` and ``event`` are (n,), too.

    >>> import numpy as np
    >>> concordance_index(np.array([3.0, 1.0, 2.0]), np.array([1.0, 2.0, 3.0]), np.array([1, 1, 0]))
    0.6666666666666666
    """
    comparable = right = 0.0
    happened = np.flatnonzero(event)
    for rows in np.split(happened, range(BLOCK, len(happened), BLOCK)):
        later = (time > time[rows, None]) | ((time == time[rows, None]) & (event == 0))
        ahead = risk[rows, None] - risk
        comparable += later.sum()
        right += (later & (ahead > TIED)).sum() + (later & (np.abs(ahead) <= TIED)).sum() / 2
    return float(right / comparable) if comparable else float("nan")
