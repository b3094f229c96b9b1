"""Labelled sequences of different lengths, such as texts, and the batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from fedcore.data import JSON, by_any_thread, check_labels, check_offsets


@dataclass(frozen=True)
class SequenceBatch:
    """The sequences of a batch, concatenated."""

    values: Tensor
    """(T, ...); sequence b is ``values[offsets[b]:offsets[b + 1]]``."""
    offsets: Tensor
    """(B + 1,) int64."""

    def to(self, device: torch.device) -> SequenceBatch:
        """Return the batch on a device."""
        return SequenceBatch(self.values.to(device), self.offsets.to(device))


class SequenceSamples:
    """Labelled sequences of different lengths, such as texts; ``input_shape`` of a data set of tokens is (vocabulary,).

    :param values: all sequences, concatenated, (T, ...): int64 tokens, or numbers.
    :param offsets: the start of each sequence, and the end of the last: (n + 1,) int64. Sequences may be empty.
    :param labels: (n,) int64.
    :raises DataError: the tensors do not fit each other.
    """

    kind: ClassVar[str] = "sequences"
    fixed_shape: ClassVar[bool] = False

    def __init__(self, values: Tensor, offsets: Tensor, labels: Tensor) -> None:
        check_offsets("offsets", offsets, len(values))
        check_labels(labels, len(offsets) - 1, of_any_task=True)
        self.values, self.offsets, self.labels = values, offsets, labels

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]], labels: Sequence[int]) -> Self:
        """Join lists of tokens."""
        offsets = torch.tensor([0, *map(len, sequences)], dtype=torch.int64).cumsum(0)
        values = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.int64)
        return cls(values, offsets, torch.tensor(labels, dtype=torch.int64))

    def __len__(self) -> int:
        return len(self.labels)

    @by_any_thread
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


def gather_runs(offsets: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of the runs at ``indices`` (B,), and the offsets of their concatenation.

    :param offsets: (n + 1,) int64; run i has the rows from ``offsets[i]`` to ``offsets[i + 1] - 1``.
    :returns: rows (T,) int64, offsets (B + 1,) int64.

    >>> gather_runs(torch.tensor([0, 2, 2, 5]), torch.tensor([2, 0]))
    (tensor([2, 3, 4, 0, 1]), tensor([0, 3, 5]))
    """
    starts, ends = offsets[indices], offsets[indices + 1]
    joined = torch.cat([offsets.new_zeros(1), (ends - starts).cumsum(0)])
    shifts = torch.repeat_interleave(starts - joined[:-1], ends - starts)
    return shifts + torch.arange(len(shifts), device=offsets.device), joined
