"""The committed state of a run on the server, the versions of the clients' states, and the count of the bytes sent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ABSENT, _EMPTY = -2, -1


@dataclass
class ServerState:
    """The state that a round commits. A checkpoint holds it."""

    model: dict[str, Tensor]
    """The global model w_t. Personal parameters have their initial values."""
    round: int = 0
    """The next round to run."""
    phase: str = "train"
    """``train``, ``post_train`` or ``done``."""
    plugins: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The server states, by plugin."""
    manifest: Mapping[int, int | None] = field(default_factory=dict)
    """Client that took part -> the version of its state; None if it keeps nothing."""
    ledger: dict[str, Any] = field(default_factory=dict)
    """Totals of bytes; see :meth:`Ledger.as_json`."""
    best: dict[str, Any] = field(default_factory=dict)
    """The best round so far by the validation protocol."""
    before_correction: dict[str, Any] | None = None
    """The metrics of the global model before ``post_train`` changed it."""
    metrics_bytes: int = 0
    """The length of the part of metrics.jsonl that belongs to the committed rounds."""
    virtual_time: float = 0.0
    """Seconds on the clock of the simulated system."""
    stopped: bool = False
    """Whether ``on_round`` ended the training before its last round."""


class Ledger:
    """Counts bytes of one round or of a whole run."""

    def __init__(self, totals: dict[str, Any] | None = None) -> None:
        totals = totals or {}
        self._by: defaultdict[str, dict[str, int]] = defaultdict(lambda: {"down": 0, "up": 0})
        for sender, counts in totals.get("by_plugin", {}).items():
            self._by[sender] = dict(counts)

    def down(self, sender: str, size: int) -> None:
        """Count bytes to one client."""
        self._by[sender]["down"] += size

    def up(self, sender: str, size: int) -> None:
        """Count bytes from one client."""
        self._by[sender]["up"] += size

    def add(self, other: Ledger) -> Ledger:
        """Add another ledger's counts."""
        for sender, counts in other._by.items():
            self._by[sender]["down"] += counts["down"]
            self._by[sender]["up"] += counts["up"]
        return self

    def as_json(self) -> dict[str, Any]:
        """Return totals and counts by sender. The sender of the model's own traffic is ``model``."""
        by_plugin = {sender: dict(counts) for sender, counts in sorted(self._by.items()) if any(counts.values())}
        return {
            "down": sum(counts["down"] for counts in by_plugin.values()),
            "up": sum(counts["up"] for counts in by_plugin.values()),
            "by_plugin": by_plugin,
        }


class Manifest(Mapping[int, "int | None"]):
    """Client -> version of its state, or None if it keeps nothing; read-only, in ascending order of clients.

    :param versions: the versions by client, (n,) int32: 4 bytes for each client up to the highest that took part.
    """

    def __init__(self, versions: npt.NDArray[np.int32]) -> None:
        self._versions = versions

    @classmethod
    def of(cls, versions: Mapping[int, int | None]) -> Manifest:
        """Return a mapping as a manifest."""
        return versions if isinstance(versions, Manifest) else cls(np.empty(0, np.int32)).updated(versions)

    def updated(self, versions: Mapping[int, int | None]) -> Manifest:
        """Return a new manifest with these versions."""
        new = self._padded(max(versions, default=-1) + 1)
        for client, version in versions.items():
            new[client] = _EMPTY if version is None else version
        return Manifest(new)

    def _padded(self, size: int) -> npt.NDArray[np.int32]:
        """Return a copy of the versions for at least ``size`` clients."""
        return np.pad(self._versions, (0, max(0, size - len(self._versions))), constant_values=_ABSENT)

    def changed(self, other: Manifest) -> list[int]:
        """Return the clients whose versions differ in the two manifests, in ascending order."""
        differ = self._padded(len(other._versions)) != other._padded(len(self._versions))
        return [int(client) for client in np.flatnonzero(differ)]

    def tensors(self) -> dict[str, Tensor]:
        """Return the clients that took part and their versions, each (n,) int32, for :meth:`from_tensors`."""
        clients = np.flatnonzero(self._versions != _ABSENT)
        found = {"clients": clients.astype(np.int32), "versions": self._versions[clients]}
        return {name: torch.from_numpy(array) for name, array in found.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Manifest:
        """Return the manifest that :meth:`tensors` split."""
        clients, versions = (tensors[name].numpy() for name in ("clients", "versions"))
        rows = np.full(clients.max(initial=-1) + 1, _ABSENT, np.int32)
        rows[clients] = versions
        return cls(rows)

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
