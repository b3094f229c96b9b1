"""The positions that each client holds, for millions of clients, in two tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

_INT32 = torch.iinfo(torch.int32)


class IndexLists(Sequence[Tensor]):
    """A sequence of one (n_k,) int64 tensor per client, created on access.

    A list of tensors takes 1 kB per client, this class 8 bytes per client and 4 per position.

    :param positions: the positions of all clients, concatenated: (n,) int32 or int64.
    :param offsets: the start of each client's positions, and the end of the last: (K + 1,) int64.
    """

    def __init__(self, positions: Tensor, offsets: Tensor) -> None:
        self.positions, self.offsets = positions, offsets

    @classmethod
    def of(cls, lists: Sequence[Any]) -> IndexLists:
        """Concatenate one tensor or array of integers per client; an :class:`IndexLists` is returned unchanged."""
        if isinstance(lists, IndexLists):
            return lists
        arrays = [np.asarray(part, dtype=np.int64) for part in lists]
        positions = torch.from_numpy(np.concatenate(arrays) if arrays else np.empty(0, np.int64))
        offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
        np.cumsum(np.fromiter(map(len, arrays), np.int64, len(arrays)), out=offsets[1:])
        if len(positions) == 0 or (_INT32.min <= positions.min() and positions.max() <= _INT32.max):
            positions = positions.to(torch.int32)
        return cls(positions, torch.from_numpy(offsets))

    @classmethod
    def empty(cls, clients: int) -> IndexLists:
        """Return empty lists for ``clients`` clients."""
        # NumPy's zeros take no memory until they are written, torch's do.
        return cls(torch.empty(0, dtype=torch.int32), torch.from_numpy(np.zeros(clients + 1, np.int64)))

    @property
    def sizes(self) -> Tensor:
        """The number of positions of each client, (K,) int64."""
        return self.offsets.diff()

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return IndexLists, (self.positions, self.offsets)  # without the cached arrays

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, client: int) -> Tensor: ...

    @overload
    def __getitem__(self, client: slice) -> IndexLists: ...

    def __getitem__(self, client: int | slice) -> Tensor | IndexLists:
        if isinstance(client, slice):
            return IndexLists.of([self[k] for k in range(*client.indices(len(self)))])
        begin, end = self._bounds(client)
        return self.positions.narrow(0, begin, end - begin).long()

    def size(self, client: int) -> int:
        """Return the number of positions of one client, without creating its tensor."""
        begin, end = self._bounds(client)
        return end - begin

    @cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        ends: npt.NDArray[np.int64] = self.offsets.numpy()
        return ends

    def _bounds(self, client: int) -> tuple[int, int]:
        k = range(len(self._ends) - 1)[client]  # counts from the end, and raises IndexError, as a list does
        return int(self._ends[k]), int(self._ends[k + 1])

    def __iter__(self) -> Iterator[Tensor]:
        for begin, end in pairwise(self.offsets.tolist()):
            yield self.positions[begin:end].long()

    def __repr__(self) -> str:
        return f"IndexLists({len(self.positions)} positions of {len(self)} clients)"

    def tolists(self) -> list[list[int]]:
        """Return the positions as lists of Python's integers."""
        positions = self.positions.tolist()
        return [positions[begin:end] for begin, end in pairwise(self.offsets.tolist())]

    def problem(self) -> str | None:
        """Return the defect of tensors from an untrusted file, or None."""
        if any(tensor.ndim != 1 for tensor in (self.positions, self.offsets)):
            return "positions and offsets should have one dimension"
        if self.positions.dtype not in (torch.int32, torch.int64) or self.offsets.dtype != torch.int64:
            return "positions should be int32 or int64, offsets int64"
        if not len(self.offsets) or self.offsets[0] != 0 or self.offsets[-1] != len(self.positions):
            return f"offsets should go from 0 to {len(self.positions)}"
        return "offsets should not decrease" if bool((self.offsets[1:] < self.offsets[:-1]).any()) else None
