"""The manifest: which version of each client's state is current, in 4 bytes per client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ABSENT, _EMPTY = -2, -1


class Manifest(Mapping[int, "int | None"]):
    """Client -> version of its state, None where it keeps nothing; read-only, in ascending order of clients.

    4 bytes per client up to the highest that took part, so that committing a round costs the same however many did.
    """

    def __init__(self, versions: npt.NDArray[np.int32]) -> None:
        self._versions = versions

    @classmethod
    def of(cls, versions: Mapping[int, int | None]) -> Manifest:
        """Return a mapping as a manifest."""
        return versions if isinstance(versions, Manifest) else cls(np.empty(0, np.int32)).updated(versions)

    def updated(self, versions: Mapping[int, int | None]) -> Manifest:
        """Return a new manifest in which these versions count."""
        length = max([len(self._versions), *(client + 1 for client in versions)])
        new = np.full(length, _ABSENT, np.int32)
        new[: len(self._versions)] = self._versions
        for client, version in versions.items():
            new[client] = _EMPTY if version is None else version
        return Manifest(new)

    def changed(self, other: Manifest) -> list[int]:
        """Return the clients with different versions in the two, in ascending order."""
        short, long = sorted((self._versions, other._versions), key=len)
        changed = np.flatnonzero(short != long[: len(short)])
        added = len(short) + np.flatnonzero(long[len(short) :] != _ABSENT)
        return [*changed.tolist(), *added.tolist()]

    def tensors(self) -> dict[str, Tensor]:
        """Return the clients that took part and their versions, each (n,) int32, as :meth:`from_tensors` reads them."""
        clients = np.flatnonzero(self._versions != _ABSENT)
        return {
            "clients": torch.from_numpy(clients.astype(np.int32)),
            "versions": torch.from_numpy(self._versions[clients]),
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Manifest:
        """Return what :meth:`tensors` gave.

        :raises ValueError: they cannot be that.
        """
        clients, versions = (tensors[name].numpy() for name in ("clients", "versions"))
        if {clients.dtype, versions.dtype} != {np.dtype(np.int32)} or clients.ndim != 1:
            raise ValueError("the manifest's clients and versions are no rows of 32-bit whole numbers")
        if clients.shape != versions.shape or (len(clients) and (clients.min() < 0 or versions.min() < _EMPTY)):
            raise ValueError("the manifest's clients and versions do not fit together")
        new = np.full(int(clients.max()) + 1 if len(clients) else 0, _ABSENT, np.int32)
        new[clients] = versions
        return cls(new)

    def __getitem__(self, client: int) -> int | None:
        version = int(self._versions[client]) if 0 <= client < len(self._versions) else _ABSENT
        if version == _ABSENT:
            raise KeyError(client)
        return None if version == _EMPTY else version

    def __iter__(self) -> Iterator[int]:
        return iter(np.flatnonzero(self._versions != _ABSENT).tolist())

    def __len__(self) -> int:
        return int(np.count_nonzero(self._versions != _ABSENT))

    def __repr__(self) -> str:
        return f"Manifest({dict(self)})"
