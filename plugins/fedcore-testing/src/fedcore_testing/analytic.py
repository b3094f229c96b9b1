"""An analytically solvable federation: the model is a point, samples are centres, the loss half the squared distance.

Client i's gradient at w is w - c_i, so every step, mean and correction of a method has a closed form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedcore import Plugin, SplitModel, Step, hookimpl
from fedcore.data import Dataset, IntArray, ResidentSamples

FloatArray: TypeAlias = "npt.NDArray[np.float64]"

W = "encoder.base.w"
"""The point's name in the model."""


class Point(nn.Module):
    """Features are the parameter itself, (B, d), whatever the input.

    :param start: w at the start, d numbers.
    """

    def __init__(self, start: Sequence[float]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """Return w for each sample."""
        return self.w.expand(len(x), -1)


class PointModel(SplitModel):
    """A model whose logits are ``encoder.base.w``; it has no other parameter."""

    def __init__(self, start: Sequence[float]) -> None:
        super().__init__(Point(start), len(start), len(start))

    def make_classifier(self, feature_dim: int) -> nn.Module:
        """Return the identity."""
        return nn.Identity()


class _Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.Parameter(torch.zeros(1))

    def forward(self, features: Tensor) -> Tensor:
        """Return the features and h for each sample."""
        return torch.cat([features, self.h.expand(len(features), 1)], dim=1)


class _BaseAndHead(SplitModel):
    def make_classifier(self, feature_dim: int) -> nn.Module:
        """Return the layer that adds h to the features."""
        return _Head()


def base_and_head(num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
    """Return a model with logits (``encoder.base.w``, ``classifier.h``), both 0: one part to share, one to keep."""
    return _BaseAndHead(Point([0.0]), 1, 2)


class Quadratic(Plugin):
    """The loss |w - c|^2 / 2, c being the sample; the mean over the batch."""

    @hookimpl
    def task_loss(self, step: Step) -> Tensor:
        """Return the loss; it replaces cross-entropy."""
        loss: Tensor = 0.5 * (step.logits - step.x.flatten(1)).square().sum(dim=1).mean()
        return loss


def analytic_federation(
    centres: Sequence[Sequence[float]], sizes: Sequence[int] | None = None, *, start: Sequence[float] | None = None
) -> dict[str, Any]:
    """Return the options of a run in which client i holds ``sizes[i]`` samples, all of them ``centres[i]``.

    One full batch per epoch, plain SGD. For :func:`fedcore_testing.federate` with ``workers=0``: worker
    processes cannot import these functions.

    :param sizes: default one sample each.
    :param start: w at the start, default the origin.

    >>> federate(tmp_path, Quadratic, **analytic_federation([[2, 0], [0, 4]], [1, 3]), lr=0.5)  # doctest: +SKIP
    """
    counts = [1] * len(centres) if sizes is None else list(sizes)
    points = np.repeat(np.asarray(centres, dtype=np.float32), counts, axis=0)
    origin = [0.0] * points.shape[1] if start is None else list(start)

    def dataset(data_dir: Path | None = None) -> Dataset:
        images = torch.from_numpy(points).view(len(points), 1, 1, -1)
        samples = ResidentSamples(images, torch.arange(len(points)) % min(2, len(origin)), [0.0], [1.0])
        return Dataset("by-hand", samples, samples, num_classes=len(origin), input_shape=tuple(images.shape[1:]))

    def partition(labels: IntArray, num_clients: int, **_: Any) -> list[IntArray]:
        return list(np.split(np.arange(len(points)), np.cumsum(counts)[:-1]))

    def model(num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
        return PointModel(origin)

    return {
        "dataset": dataset,
        "partition": partition,
        "model": model,
        "clients": len(counts),
        "batch_size": len(points),
        "momentum": 0.0,
        "weight_decay": 0.0,
    }


def steps_by_hand(
    w: FloatArray,
    gradient: Callable[[FloatArray], FloatArray],
    steps: int,
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> FloatArray:
    """Return w (d,) after some steps of PyTorch's SGD, in NumPy's float64."""
    velocity = np.zeros_like(w, dtype=np.float64)
    for _ in range(steps):
        velocity = momentum * velocity + gradient(w) + weight_decay * w
        w = w - lr * velocity
    return w


def distance_by_hand(steps: int, momentum: float) -> float:
    """Return the displacement of that many steps along a constant gradient of 1 with lr 1, in closed form.

    The reference for :func:`fedcore_functional.effective_steps`, which adds step by step.
    """
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
