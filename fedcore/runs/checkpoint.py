"""Checkpoints: the last two, each one file written atomically, with the clients' states that they name.

A checkpoint is only as good as what it names. Clients' states are on the disk before it is written, and nothing
that one of the two names is deleted, so that a run can go on from the older one when the newer is damaged.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcore.base.errors import RunDirectoryError
from fedcore.base.tensors import SEPARATOR, flatten, unflatten
from fedcore.base.types import Tensors
from fedcore.runs.saved import Binding
from fedcore.server.state import ServerState
from fedcore.storage.client_row import ClientRow
from fedcore.storage.client_store import ClientStore
from fedcore.storage.files import delete_others
from fedcore.storage.manifest import Manifest
from fedcore.storage.serial import read_tensors, write_tensors

KEPT = 2
PHASES = {"train": 0, "post_train": 1, "done": 2}

_KINDS: dict[str, type | tuple[type, ...]] = {
    "round": int,
    "metrics_bytes": int,
    "plugins": dict,
    "ledger": dict,
    "best": dict,
    "before_correction": (dict, type(None)),
}

Note = Callable[[str], None]
"""Called with a message for the user, as ``notify`` is with the event ``note``."""

Check = Callable[[ServerState, Mapping[str, Any]], object]

MOST_CLIENTS = 100_000_000
"""A manifest's memory grows with the highest client that it names; a file that names a higher one is no checkpoint."""

_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, OSError, RunDirectoryError)


class CheckpointStore:
    """The checkpoints of a run: saved, found again, the old ones deleted.

    :param clients: the clients' states.
    """

    def __init__(self, root: Path, clients: ClientStore) -> None:
        self.root, self.clients = root, clients
        self.binding: Binding | None = None  # what is written into every checkpoint
        self.found: Mapping[str, Any] = {}  # the JSON part of the one that was loaded
        self._kept: dict[Path, Manifest] = {}  # oldest first
        self._stamps = ClientRow(0, np.int64)  # of the clients' states that the newest names; 0 for unknown

    def save(
        self,
        state: ServerState,
        touched: Iterable[int] = (),
        *,
        metrics: str | None = None,
        sessions: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a checkpoint, its clients' states first; then delete what neither it nor the one before names.

        Clients may train the next round meanwhile: their versions are left.

        :param touched: clients that may have written versions since the last checkpoint, accepted or not.
        :param metrics: SHA-256, in hex, of the part of metrics.jsonl that the state counts.
        :param sessions: bytes and SHA-256 of sessions.jsonl.
        :raises StorageError: it cannot be written; what was there before stays.
        """
        path = self.root / f"{state.round:06d}-{PHASES[state.phase]}-{state.phase}.safetensors"
        manifest = Manifest.of(state.manifest)
        new = manifest.changed(next(reversed(self._kept.values()), Manifest.of({})))
        self.clients.settle({client: manifest[client] for client in new if client in manifest})
        tensors, meta = _pack(state)
        tensors[f"manifest{SEPARATOR}stamps"] = self._stamped(manifest, new)
        if self.binding is not None:
            meta["binding"] = self.binding.plain()
        if metrics is not None:
            meta["metrics_sha256"] = metrics
        if sessions is not None:
            meta["sessions"] = dict(sessions)
        write_tensors(path, tensors, meta, inside=self.root.parent)
        before = {other: named for other, named in self._kept.items() if other != path}
        self._kept = dict([*before.items(), (path, manifest)][-KEPT:])
        oldest = next(iter(self._kept.values()))
        dropped = [named for other, named in before.items() if other not in self._kept]
        self._prune({*touched, *(client for named in dropped for client in named.changed(oldest))}, state.round)

    def load(
        self,
        *,
        check: Check | None = None,
        note: Note | None = None,
        phase: str | None = None,
    ) -> ServerState | None:
        """Return the newest checkpoint that is whole with all that it names; None where there is none. Writes nothing.

        Of the clients' states it reads those that the checkpoint before has in another version: for the others, an
        older checkpoint does not help, and their readers check them.

        :param check: raises RunDirectoryError for what else has to fit; it is given the JSON part, too.
        :param note: told of damaged ones, those that were passed over and the one before.
        :param phase: of the run, whose checkpoints alone count; default all.
        :raises RunDirectoryError: there are checkpoints, but none is whole.
        """
        files, problems = self._files(phase), []
        for path, older in zip(reversed(files), [*reversed(files[:-1]), None]):
            try:
                tensors, meta = read_tensors(path)
                state = _unpack(tensors, meta)
                manifest, (before, damage) = Manifest.of(state.manifest), _manifest_in(older)
                self.clients.check(manifest, before)
                stamps = self._check_stamps(manifest, tensors[f"manifest{SEPARATOR}stamps"])
                if check is not None:
                    check(state, meta)
            except _DAMAGED as error:
                problems.append(f"{path.name}: {error}")
                continue
            self._kept, self.found, self._stamps = {path: manifest}, meta, stamps
            if older is not None and before is not None:
                self._kept = {older: before, path: manifest}
            if damage and note is not None:
                note(f"{damage}. It is the checkpoint before the last one, which is whole")
            if problems and note is not None:
                note(
                    f"{'; '.join(problems)}. The checkpoint before is whole: going on from it, after "
                    f"{state.round} round{'s' * (state.round != 1)}"
                )
            return state
        if problems:
            raise RunDirectoryError(
                f"no checkpoint in {self.root} can be used: {'; '.join(problems)}. Start the run again, its options "
                f"give the same bits: fedcore train --config {self.root.parent / 'config.yaml'} --out NEW_FOLDER"
            )
        return None

    def _stamped(self, manifest: Manifest, new: Iterable[int]) -> Tensor:
        """Return what the states that a manifest names are known by, (n,) int64 in its order; looks at the new ones."""
        stamps = {client: self.clients.stamp(client, manifest.get(client)) for client in new}
        self._stamps = self._stamps.updated(stamps)
        return torch.from_numpy(self._stamps.of(manifest.tensors()["clients"].numpy()))

    def _check_stamps(self, manifest: Manifest, found: Tensor) -> ClientRow:
        """Refuse a client's state that is whole, but not the one that was written: another run's, client's or round's.

        :param found: as :meth:`_stamped` gave it.
        """
        clients = manifest.tensors()["clients"].numpy()
        if found.dtype != torch.int64 or found.shape != (len(clients),):
            raise ValueError("the manifest's stamps do not fit its clients")
        stamps = ClientRow(0, np.int64).filled_with(clients, found.numpy())
        for client, version in manifest.items():
            if stamps[client] and self.clients.stamp(client, version) != stamps[client]:
                raise RunDirectoryError(f"client {client}'s state of round {version} is not the one that was written")
        return stamps

    def tidy(self) -> None:
        """Delete what a killed process left: all but what :meth:`load` found, the one before it, and what they name."""
        self._prune(self.clients.everyone())

    def step_back(self, round: int) -> int:
        """Delete the checkpoint of a round, if there is one; returns the round of the last one that is left, else 0."""
        self._kept = {path: named for path, named in self._kept.items() if _round_of(path) < round}
        self._prune(())
        return max(map(_round_of, self._kept), default=0)

    def clear(self) -> None:
        """Delete all checkpoints."""
        self._kept = {}
        self._prune(())

    def _prune(self, clients: Collection[int], training: int | None = None) -> None:
        names = {path.name for path in self._kept}
        delete_others(self.root, names.__contains__, inside=self.root.parent)
        self.clients.prune(clients, list(self._kept.values()), training=training)

    def binding_found(self) -> Any:
        """Return what the newest readable checkpoint says that it belongs to; None where none says so."""
        for path in reversed(self._files()):
            with contextlib.suppress(*_DAMAGED):
                return read_tensors(path)[1].get("binding")
        return None

    def _files(self, phase: str | None = None) -> list[Path]:
        return sorted(self.root.glob(f"*-{phase}.safetensors" if phase else "*.safetensors"))


def _round_of(path: Path) -> int:
    return int(path.name.partition("-")[0])


def _pack(state: ServerState) -> tuple[Tensors, dict[str, Any]]:
    """Split a state into tensors and JSON."""
    tensors, rest = flatten(state.plugins)
    manifest = Manifest.of(state.manifest).tensors()
    return flatten({"model": state.model, "plugins": tensors, "manifest": manifest})[0], {
        "round": state.round,
        "phase": state.phase,
        "plugins": rest,
        "ledger": state.ledger,
        "best": state.best,
        "before_correction": state.before_correction,
        "metrics_bytes": state.metrics_bytes,
        "virtual_time": state.virtual_time,
    }


def _unpack(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> ServerState:
    """Join what :func:`_pack` split; the tensors are copies."""
    groups: dict[str, Tensors] = {"model": {}, "plugins": {}, "manifest": {}}
    for name, tensor in tensors.items():
        group, _, key = name.partition(SEPARATOR)
        groups[group][key] = tensor.clone()
    if meta["phase"] not in PHASES:
        raise ValueError(f"phase {meta['phase']!r} is none of {', '.join(PHASES)}")
    for name, kinds in _KINDS.items():
        if not isinstance(meta[name], kinds):
            raise TypeError(f"{name} is a {type(meta[name]).__name__}")
    if min(meta["round"], meta["metrics_bytes"]) < 0:
        raise ValueError("a count is negative")
    virtual_time = float(meta["virtual_time"])
    if not 0 <= virtual_time < math.inf:
        raise ValueError(f"the clock stands at {virtual_time}")
    return ServerState(
        model=groups["model"],
        round=meta["round"],
        phase=meta["phase"],
        plugins=unflatten(groups["plugins"], meta["plugins"]),
        manifest=_manifest(groups["manifest"]),
        ledger=meta["ledger"],
        best=meta["best"],
        before_correction=meta["before_correction"],
        metrics_bytes=meta["metrics_bytes"],
        virtual_time=virtual_time,
    )


def _manifest_in(path: Path | None) -> tuple[Manifest | None, str]:
    """Return a checkpoint's manifest, None where it cannot be read, and then why."""
    if path is None:
        return None, ""
    try:
        return Manifest.of(_unpack(*read_tensors(path)).manifest), ""
    except _DAMAGED as error:
        return None, f"{path.name}: {error}"


def _manifest(tensors: Mapping[str, Tensor]) -> Manifest:
    """Return the manifest in a checkpoint's tensors."""
    clients = tensors["clients"]
    if bool(((clients < 0) | (clients >= MOST_CLIENTS)).any()):
        raise ValueError(f"the manifest names a client that is not between 0 and {MOST_CLIENTS - 1}")
    return Manifest.from_tensors(tensors)
