"""The manifest: which version of each client's state is current."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from fedcore.storage.client_row import ClientRow

_ABSENT, _EMPTY = -2, -1


class Manifest(Mapping[int, "int | None"]):
    """Client -> version of its state, None where it keeps nothing; read-only, in ascending order of clients.

    At most 4 bytes per client up to the highest that took part, which the manifests of successive rounds share, so that
    committing a round costs the same however many did.
    """

    def __init__(self, versions: ClientRow) -> None:
        self._versions = versions

    @classmethod
    def of(cls, versions: Mapping[int, int | None]) -> Manifest:
        """Return a mapping as a manifest."""
        return versions if isinstance(versions, Manifest) else cls(ClientRow(_ABSENT, np.int32)).updated(versions)

    def updated(self, versions: Mapping[int, int | None]) -> Manifest:
        """Return a new manifest in which these versions count."""
        numbers = {client: _EMPTY if version is None else version for client, version in versions.items()}
        return Manifest(self._versions.updated(numbers))

    def changed(self, other: Manifest) -> list[int]:
        """Return the clients with different versions in the two, in ascending order."""
        return self._versions.changed(other._versions)

    def tensors(self) -> dict[str, Tensor]:
        """Return the clients that took part and their versions, each (n,) int32, as :meth:`from_tensors` reads them."""
        clients, versions = self._versions.filled()
        return {"clients": torch.from_numpy(clients.astype(np.int32)), "versions": torch.from_numpy(versions)}

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
        return cls(ClientRow(_ABSENT, np.int32).filled_with(clients, versions))

    def __getitem__(self, client: int) -> int | None:
        version = self._versions[client]
        if version == _ABSENT:
            raise KeyError(client)
        return None if version == _EMPTY else version

    def __iter__(self) -> Iterator[int]:
        return iter(self._versions.filled()[0].tolist())

    def __len__(self) -> int:
        return len(self._versions.filled()[0])

    def __repr__(self) -> str:
        return f"Manifest({dict(self)})"
