"""Samples that are tensors of one shape, other than images: rows of a table, signals, features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fedcore.base.errors import DataError
from fedcore.data.samples import JSON


class TensorSamples:
    """Tensors of one shape, gathered by index without preprocessing.

    :param inputs: (n, ...), of any dtype; a batch is (B, ...).
    :param labels: (n,) int64.
    :raises DataError: the labels do not fit the inputs.
    """

    kind: ClassVar[str] = "tensor"
    fixed_shape: ClassVar[bool] = True

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        check_labels(labels, len(inputs) if inputs.ndim else 0)
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.labels)

    def gather(self, indices: Tensor) -> Tensor:
        """Return the inputs at ``indices`` (B,) int64 as (B, ...)."""
        return self.inputs.index_select(0, indices.to(self.inputs.device))

    def to(self, device: torch.device, memory_format: torch.memory_format) -> Self:
        """Return the samples on a device."""
        return type(self)(self.inputs.to(device), self.labels.to(device))

    def tensors(self) -> dict[str, Tensor]:
        """Return inputs and labels by name."""
        return {"inputs": self.inputs, "labels": self.labels}

    def meta(self) -> dict[str, JSON]:
        """Return an empty dictionary: the tensors are complete."""
        return {}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Self:
        """Return samples over the given tensors without a copy."""
        return cls(tensors["inputs"], tensors["labels"])


def check_labels(labels: Tensor, count: int) -> None:
    """Refuse labels that are not int64 of shape (count,).

    :raises DataError: states their dtype and shape.
    """
    if labels.shape != (count,) or labels.dtype != torch.int64:
        raise DataError(f"labels must be int64 of shape ({count},), not {labels.dtype} of {tuple(labels.shape)}")
