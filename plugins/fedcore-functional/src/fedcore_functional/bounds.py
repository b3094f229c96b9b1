"""What a client's mean features, covariances and trained prototypes cannot be, whatever its samples are.

A server cannot see whether what a client sends is true. Some statistics, though, are of no samples at all, and some
prototypes are where no training moves them. The functions here refuse these; an honest client of any data passes. A
client within the bounds can still lie.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from fedcore import PluginOptions, ServerContext
from fedcore_functional.contrast import UnitLength

SLACK = 1.01
"""Factor on every bound, for clients that compute their features in 16 bits."""


class FeatureRange(NamedTuple):
    """What the server knows about every feature of every client."""

    longest: float = math.inf
    """No feature is longer."""
    nonnegative: bool = False
    """No number of a feature is below 0."""


UNKNOWN = FeatureRange()
"""The server knows nothing about the features."""


class FeatureOptions(PluginOptions):
    """Options of a method whose clients send statistics of features."""

    feature_norm: float | None = Field(
        default=None,
        gt=0,
        description="Largest length of a feature, if you know it. A client with a longer mean feature is refused.",
    )

    def narrowed(self, features: FeatureRange = UNKNOWN) -> FeatureRange:
        """Return a range of features with ``feature_norm`` as a further bound."""
        return features._replace(longest=min(features.longest, self.feature_norm or math.inf))


def feature_range(encoder: nn.Module) -> FeatureRange:
    """Return what the encoder's last layer says about features: ReLU and :class:`UnitLength` bound them.

    :param encoder: nested ``nn.Sequential``, as in every :class:`~fedcore.models.SplitModel`.
    """
    last = encoder
    while isinstance(last, nn.Sequential) and len(last):
        last = last[-1]
    return FeatureRange(1.0 if isinstance(last, UnitLength) else math.inf, nonnegative=isinstance(last, nn.ReLU))


def check_means(name: str, means: Tensor, within: FeatureRange) -> None:
    """Refuse mean features (n, d) that no features of this range have.

    A mean is a convex combination of features: not longer than the longest, and not negative if none of them is.

    :param name: the tensor's, for the message.
    :raises ValueError: names the tensor, the finding and the bound.
    """
    if not means.numel() or within == UNKNOWN:
        return
    longest, least = float(means.double().norm(dim=1).max()), float(means.min())
    if longest > SLACK * within.longest:
        raise ValueError(f"{name!r} holds a mean of length {longest:.3g}; no feature is longer than {within.longest:g}")
    if within.nonnegative and least < 0:
        raise ValueError(f"{name!r} holds {least:.3g}; features after a ReLU are not negative")


def check_moves(
    name: str, sent: Tensor, start: Tensor, server: ServerContext, *, steps: Tensor, weight: float, temperature: float
) -> None:
    """Refuse prototypes (n, d) that ``steps`` steps of the run's SGD cannot have moved there from ``start`` (n, d).

    Other optimizers have no such bound. ``weight`` and ``temperature`` are those of :func:`largest_move`. ``steps``
    (n,) are those of each prototype's client.

    :param name: the tensor's, for the message.
    :raises ValueError: names the tensor, the finding and the bound.
    """
    if server.config.optimizer != "sgd":
        return
    start = start.double()
    most = largest_move(
        start, weight=weight, temperature=temperature, lr=server.lr, momentum=server.config.momentum, steps=steps
    )
    moved = (sent.double() - start).norm(dim=1)  # (n,)
    over = moved > SLACK * most + 1e-3 * start.norm(dim=1)  # single precision rounds in every step
    if over.any():
        raise ValueError(
            f"{name!r} moved {float(moved[over][0]):.3g} from what the server sent, but {steps[over][0]} steps of SGD "
            f"move at most {float(most[over][0]):.3g}"
        )


def largest_move(
    start: Tensor, *, weight: float, temperature: float, lr: float, momentum: float, steps: int | Tensor
) -> Tensor:
    """Return how far SGD can move each prototype that is trained by a contrast, (n,).

    The loss is at most ``weight`` times a mean of contrasts. A contrast sees a prototype through cosines, and depends
    on cos / temperature with a slope of at most 1. The gradient of cos(z, P) is orthogonal to P and at most 1 / |P|
    long, so |P| never falls. A velocity is at most the largest gradient divided by 1 - momentum.

    :param start: the prototypes before the first step, (n, d).
    :param steps: the number of steps, or that of each prototype, (n,).
    """
    lengths: Tensor = start.norm(dim=1).clamp(min=1e-8)  # (n,)
    return steps * lr / (1 - momentum) * weight / (temperature * lengths)


def check_covariance(samples: int, mean: Tensor, covariance: Tensor, within: FeatureRange) -> None:
    """Refuse a symmetric matrix (d, d) that is the covariance (denominator n - 1) of no n features with this mean (d,).

    Every covariance is positive semi-definite. With features z of at most length R its trace is at most
    n (R^2 - |mean|^2) / (n - 1), because sum |z|^2 <= n R^2. If no feature is negative, its diagonal is at most
    n mean^2, because sum z^2 <= (sum z)^2.

    :param samples: n, at least 1.
    :raises ValueError: names the finding and the bound.
    """
    mean, covariance = mean.double(), covariance.double()
    variances = covariance.diagonal()  # (d,)
    trace = float(variances.sum())
    most = samples * ((SLACK * within.longest) ** 2 - float(mean.square().sum())) / max(samples - 1, 1)
    if trace > most:
        raise ValueError(f"'covariances' holds a trace of {trace:.3g}, expected at most {most:.3g} with its mean")
    if within.nonnegative and bool((variances > SLACK * samples * mean.square() + 1e-12).any()):
        raise ValueError("'covariances' holds a variance above n mean^2, the most after a ReLU")
    # A Cholesky factor exists if no eigenvalue is below minus the ridge, which allows for rounding.
    ridge = (1e-6 * abs(trace) + 1e-12) * torch.eye(len(mean), dtype=torch.float64)
    if torch.linalg.cholesky_ex(covariance + ridge).info:
        raise ValueError("'covariances' holds a matrix that is not positive semi-definite")
