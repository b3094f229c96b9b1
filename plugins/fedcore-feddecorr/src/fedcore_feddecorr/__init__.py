"""FedDecorr as a fedcore plugin."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedcore import ConfigError, Loss, Plugin, PluginOptions, RunSetup, Step, hookimpl

__all__ = ["FedDecorr", "FedDecorrOptions", "correlation_matrix", "frobenius_term", "off_diagonal_term"]

EPSILON = 1e-8
"""Added to the variances, in the authors' code."""


class FedDecorrOptions(PluginOptions):
    """Options of FedDecorr."""

    beta: float = Field(default=0.1, ge=0, le=1e6, description="beta: weight of the decorrelation; 0 is FedAvg.")
    form: Literal["code", "paper"] = Field(
        default="code",
        description="The term. code: that of the authors' code, to which their beta belongs. paper: ||K||_F^2 / d^2.",
    )


class FedDecorr(Plugin[FedDecorrOptions]):
    """FedDecorr (Shi, Liang, Zhang, Tan, Bai, ICLR 2023, arXiv 2210.00226): cross-entropy + beta * L_FedDecorr.

    L_FedDecorr is the squared Frobenius norm of the correlation matrix K of a batch's features, divided by d^2. It
    keeps K's singular values alike, so that the features do not collapse to few dimensions.
    """

    neutral = {"beta": 0.0}

    @hookimpl
    def check_run(self, setup: RunSetup) -> None:
        """Refuse a task whose features are not one vector for each sample."""
        if setup.task.kind.grid:
            raise ConfigError(f"{self.name!r} decorrelates features (B, d), which task {setup.task.kind.name!r} lacks")

    @hookimpl
    def local_loss(self, step: Step) -> Loss | None:
        """Add beta * L_FedDecorr. A batch of one sample has no correlations."""
        if len(step.features) < 2:
            return None
        term = off_diagonal_term if self.options.form == "code" else frobenius_term
        return Loss(partial(term, step.features), weight=self.options.beta, name="decorrelation")


def correlation_matrix(features: Tensor) -> Tensor:
    """Return K (d, d), the correlations of the features over the batch; in float32 at least.

    :param features: z (B, d), B >= 2. A feature that is constant in the batch has correlation 0 with all.

    >>> correlation_matrix(torch.tensor([[0.0, 0.0], [2.0, -2.0]]))
    tensor([[ 1.0000, -1.0000],
            [-1.0000,  1.0000]])
    """
    with torch.autocast(features.device.type, enabled=False):
        z = features.to(torch.promote_types(features.dtype, torch.float32))
        z = z - z.mean(dim=0)
        z = z / (z.var(dim=0) + EPSILON).sqrt()
        return z.mT @ z / (len(z) - 1)


def frobenius_term(features: Tensor) -> Tensor:
    """Return L_FedDecorr = ||K||_F^2 / d^2, shape (); between 1 / d and 1 if no feature is constant.

    >>> frobenius_term(torch.tensor([[0.0, 0.0], [2.0, -2.0]]))
    tensor(1.0000)
    """
    return correlation_matrix(features).square().mean()


def off_diagonal_term(features: Tensor) -> Tensor:
    """Return the term of the authors' code, (B - 1)^2 / B times the mean of K_ij^2 over i != j, shape ().

    The code divides the sums of products by no number of samples, and the squares by B. A single feature has no other
    to correlate with: 0.

    >>> off_diagonal_term(torch.tensor([[0.0, 0.0], [2.0, -2.0]]))
    tensor(0.5000)
    """
    size, width = features.shape
    k = correlation_matrix(features)
    squares = (k - k.diagonal().diag()).square().sum()
    return (size - 1) ** 2 / size * squares / max(1, width * (width - 1))
