"""A whole number for each client, in memory only for the blocks of clients that have one."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

SHIFT = 8
BLOCK = 1 << SHIFT
"""Clients in a block: small, as each of a cohort may be the only one of its block that changes in a round."""

Numbers = npt.NDArray[np.integer[Any]]


class ClientRow:
    """Client -> number, ``empty`` for all others; read-only.

    Rows that follow from one another share the blocks in which they agree, and every block that is empty is the same
    one, so a new row takes memory for the clients that changed, not for all that are registered.
    """

    def __init__(self, empty: int, dtype: npt.DTypeLike) -> None:
        """Make a row in which every client is empty."""
        self._empty: Numbers = np.full(BLOCK, empty, dtype)
        self._blocks: list[Numbers] = []

    def filled_with(self, clients: Numbers, numbers: Numbers) -> ClientRow:
        """Return a new row with numbers (n,) of clients (n,), from 0 on; of several for one client the last counts."""
        order = np.argsort(clients, kind="stable")
        clients, numbers = clients[order], numbers[order]
        new = self._copy(int(clients[-1]) if len(clients) else -1)
        for block, begin, end in _runs(clients):
            changed = new._blocks[block].copy()
            changed[clients[begin:end] & (BLOCK - 1)] = numbers[begin:end]
            new._blocks[block] = changed
        return new

    def updated(self, numbers: Mapping[int, int]) -> ClientRow:
        """Return a new row with these numbers."""
        new = self._copy(max(numbers, default=-1))
        own: set[int] = set()
        for client, number in numbers.items():
            block, place = divmod(client, BLOCK)
            if new._blocks[block][place] == number:
                continue
            if block not in own:
                own.add(block)
                new._blocks[block] = new._blocks[block].copy()
            new._blocks[block][place] = number
        return new

    def _copy(self, highest: int) -> ClientRow:
        """Return a row with the same blocks, and as many as the highest client needs."""
        new = ClientRow.__new__(ClientRow)
        new._empty = self._empty
        new._blocks = self._blocks + [self._empty] * (highest // BLOCK + 1 - len(self._blocks))
        return new

    def __getitem__(self, client: int) -> int:
        """Return the number of any client."""
        block, place = divmod(client, BLOCK)
        return int(self._block(block)[place])

    def _block(self, block: int) -> Numbers:
        return self._blocks[block] if 0 <= block < len(self._blocks) else self._empty

    def changed(self, other: ClientRow) -> list[int]:
        """Return the clients with different numbers in the two, in ascending order; looks at blocks not shared."""
        pairs = enumerate(zip_longest(self._blocks, other._blocks, fillvalue=self._empty))
        differing = [(block, np.flatnonzero(own != its)) for block, (own, its) in pairs if own is not its]
        return [client for block, places in differing for client in (places + block * BLOCK).tolist()]

    def filled(self) -> tuple[npt.NDArray[np.int64], Numbers]:
        """Return the clients that are not empty, (n,) int64 in ascending order, and their numbers, (n,)."""
        taken = [block for block, numbers in enumerate(self._blocks) if numbers is not self._empty]
        numbers = np.concatenate([self._empty[:0], *(self._blocks[block] for block in taken)])
        found = np.flatnonzero(numbers != self._empty[0])
        missing = np.array(taken, np.int64) - np.arange(len(taken))  # blocks that are left out before each
        return found + BLOCK * missing[found >> SHIFT], numbers[found]

    def of(self, clients: Numbers) -> Numbers:
        """Return the numbers, (n,), of clients, (n,) in ascending order."""
        places, runs = clients & (BLOCK - 1), _runs(clients)
        return np.concatenate([self._empty[:0], *(self._block(block)[places[begin:end]] for block, begin, end in runs)])


def _runs(clients: Numbers) -> list[tuple[int, int, int]]:
    """Return each block of clients in ascending order, with where its clients begin and end."""
    blocks = clients >> SHIFT  # many times as fast as a division
    begins = np.flatnonzero(np.diff(blocks, prepend=-1))
    ends = np.append(begins, len(clients))[1:]
    return list(zip(blocks[begins].tolist(), begins.tolist(), ends.tolist(), strict=True))
