"""Samples of different lengths, concatenated in one tensor: token sequences, for example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fedcore.base.errors import DataError
from fedcore.data.rows import check_labels
from fedcore.data.samples import JSON


@dataclass(frozen=True)
class SequenceBatch:
    """The sequences of a batch, concatenated.

    :param values: (T, ...); sequence b is ``values[offsets[b]:offsets[b + 1]]``.
    :param offsets: (B + 1,) int64.
    """

    values: Tensor
    offsets: Tensor

    def to(self, device: torch.device) -> SequenceBatch:
        """Return the batch on a device."""
        return SequenceBatch(self.values.to(device), self.offsets.to(device))


class SequenceSamples:
    """Labelled sequences; ``input_shape`` of a data set of tokens is (vocabulary,).

    :param values: all sequences, concatenated, (T, ...): int64 tokens, or numbers.
    :param offsets: the start of each sequence, and the end of the last: (n + 1,) int64. Sequences may be empty.
    :param labels: (n,) int64.
    :raises DataError: the tensors do not fit each other.
    """

    kind: ClassVar[str] = "sequences"
    fixed_shape: ClassVar[bool] = False

    def __init__(self, values: Tensor, offsets: Tensor, labels: Tensor) -> None:
        check_offsets("offsets", offsets, len(values))
        check_labels(labels, len(offsets) - 1)
        self.values, self.offsets, self.labels = values, offsets, labels

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]], labels: Sequence[int]) -> Self:
        """Join lists of tokens."""
        offsets = torch.tensor([0, *map(len, sequences)], dtype=torch.int64).cumsum(0)
        values = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.int64)
        return cls(values, offsets, torch.tensor(labels, dtype=torch.int64))

    def __len__(self) -> int:
        return len(self.labels)

    def gather(self, indices: Tensor) -> SequenceBatch:
        """Return the sequences at ``indices`` (B,) int64."""
        rows, offsets = gather_runs(self.offsets, indices.to(self.offsets.device))
        return SequenceBatch(self.values.index_select(0, rows), offsets)

    def to(self, device: torch.device, memory_format: torch.memory_format) -> Self:
        """Return the samples on a device."""
        return type(self)(self.values.to(device), self.offsets.to(device), self.labels.to(device))

    def tensors(self) -> dict[str, Tensor]:
        """Return values, offsets and labels by name."""
        return {"values": self.values, "offsets": self.offsets, "labels": self.labels}

    def meta(self) -> dict[str, JSON]:
        """Return an empty dictionary: the tensors are complete."""
        return {}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Self:
        """Return samples over the given tensors without a copy."""
        return cls(tensors["values"], tensors["offsets"], tensors["labels"])


def gather_runs(offsets: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of the runs at ``indices`` (B,), and the offsets of their concatenation.

    :param offsets: (n + 1,) int64; run i has the rows from ``offsets[i]`` to ``offsets[i + 1] - 1``.
    :returns: rows (T,) int64, offsets (B + 1,) int64.

    >>> gather_runs(torch.tensor([0, 2, 2, 5]), torch.tensor([2, 0]))
    (tensor([2, 3, 4, 0, 1]), tensor([0, 3, 5]))
    """
    starts, ends = offsets[indices], offsets[indices + 1]
    found = torch.cat([offsets.new_zeros(1), (ends - starts).cumsum(0)])
    shifts = torch.repeat_interleave(starts - found[:-1], ends - starts)
    return shifts + torch.arange(len(shifts), device=offsets.device), found


def check_offsets(name: str, offsets: Tensor, total: int) -> None:
    """Refuse offsets that do not split ``total`` rows into runs.

    :raises DataError: states the defect.
    """
    if offsets.ndim != 1 or offsets.dtype != torch.int64 or not len(offsets):
        raise DataError(f"{name} must be int64 of shape (n + 1,), not {offsets.dtype} of {tuple(offsets.shape)}")
    if int(offsets[0]) != 0 or int(offsets[-1]) != total or bool((offsets.diff() < 0).any()):
        raise DataError(f"{name} must rise from 0 to {total}, the number of rows")
