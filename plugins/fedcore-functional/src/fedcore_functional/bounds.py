"""What a client's mean features and covariances cannot be, whatever its samples are.

A server cannot see whether a client's statistics are true, but some are statistics of no samples at all. The functions
here refuse these; an honest client of any data passes. A client within the bounds can still lie.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from fedcore import PluginOptions
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
    if not means.numel():
        return
    longest, least = float(means.double().norm(dim=1).max()), float(means.min())
    if longest > SLACK * within.longest:
        raise ValueError(f"{name!r} holds a mean of length {longest:.3g}; no feature is longer than {within.longest:g}")
    if within.nonnegative and least < 0:
        raise ValueError(f"{name!r} holds {least:.3g}; features after a ReLU are not negative")


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
