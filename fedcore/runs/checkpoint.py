"""The last two checkpoints, with the clients' states that they name. Each is a file that is written atomically.

A checkpoint is only as good as the states that it names. These are on the disk before the checkpoint is written. No
state that one of the two names is deleted, so that a run can go on from the older one if the newer one is damaged.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedcore.base.errors import RunDirectoryError
from fedcore.base.files import delete_others, storing, sync_path
from fedcore.base.serial import read_tensors, write_tensors
from fedcore.base.tensors import clone, flatten, unflatten
from fedcore.client.store import ClientStore
from fedcore.server.state import Manifest, ServerState

KEPT = 2
PHASES = {"train": 0, "post_train": 1, "done": 2}

_NOTHING = -1
"""The version in a checkpoint of a client that took part and keeps nothing."""

_PLAIN = ("round", "phase", "stopped", "ledger", "best", "before_correction", "metrics_bytes", "virtual_time")
"""The fields of a server's state that go into a checkpoint's JSON unchanged."""

Note = Callable[[str], None]
"""A callback that takes a message for the user."""

Check = Callable[[ServerState], object]

_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, OSError, RunDirectoryError)


class CheckpointStore:
    """The checkpoints of a run. It saves and loads them, and deletes the old ones.

    :param clients: the clients' states.
    """

    def __init__(self, root: Path, clients: ClientStore) -> None:
        self.root, self.clients = root, clients
        self.binding: Mapping[str, Any] | None = None
        """The binding that every new checkpoint carries, see :attr:`fedcore.runs.saved.SavedConfig.binding`."""
        self.meta: Mapping[str, Any] = {}
        """The JSON part of the checkpoint that was loaded."""
        self._kept: dict[Path, Manifest] = {}  # oldest first

    def any(self) -> bool:
        """Return whether there is a checkpoint on the disk, whole or damaged."""
        return bool(self._files())

    def save(self, state: ServerState, touched: Iterable[int] = ()) -> None:
        """Write a checkpoint, after the clients' states. Then delete states that neither of the last two names.

        Clients may train the next round meanwhile. The versions that they write stay.

        :param touched: the clients that may have written versions since the last checkpoint, accepted or not.
        :raises StorageError: the checkpoint cannot be written. The earlier files stay.
        """
        path = self.root / f"{state.round:06d}-{PHASES[state.phase]}-{state.phase}.safetensors"
        last = next(reversed(self._kept.values()), {})
        self.clients.settle(dict(state.manifest.items() - last.items()))
        with storing(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            sync_path(self.root.parent)
        tensors, meta = _pack(state)
        write_tensors(path, tensors, {**meta, "binding": self.binding})
        before = {other: manifest for other, manifest in self._kept.items() if other != path}
        self._kept = dict([*before.items(), (path, state.manifest)][-KEPT:])
        oldest = next(iter(self._kept.values()))
        dropped = [manifest for other, manifest in before.items() if other not in self._kept]
        changed = {client for manifest in dropped for client, _ in manifest.items() ^ oldest.items()}
        self._prune({*touched, *changed}, state.round)

    def load(
        self, *, check: Check | None = None, note: Note | None = None, phase: str | None = None
    ) -> ServerState | None:
        """Return the newest checkpoint that is whole, with the states that it names; None if there is no checkpoint.

        It writes nothing. It reads the clients' states whose version differs in the checkpoint before. For other
        states an older checkpoint would not help; they are checked when a client reads them.

        :param check: takes the state; raises RunDirectoryError if another condition fails.
        :param note: called with a message about damaged checkpoints that were skipped.
        :param phase: consider only checkpoints of this phase of the run; default all.
        :raises RunDirectoryError: there are checkpoints, but none is whole.
        """
        newest_first, problems = self._files(phase)[::-1], []
        for path, older in itertools.zip_longest(newest_first, newest_first[1:]):
            try:
                state = self._load(path, older, check)
            except _DAMAGED as error:
                problems.append(f"{path.name}: {error}")
                continue
            if problems and note is not None:
                note(
                    f"{'; '.join(problems)}. The checkpoint before is whole: going on from it, after "
                    f"{state.round} round{'s' * (state.round != 1)}"
                )
            return state
        if problems:
            raise RunDirectoryError(
                f"no checkpoint in {self.root} can be used: {'; '.join(problems)}. Start the run again; it gives the "
                f"same bits: fedcore train --config {self.root.parent / 'config.yaml'} --out NEW_FOLDER"
            )
        return None

    def _load(self, path: Path, older: Path | None, check: Check | None) -> ServerState:
        """Return the state of a checkpoint. One of ``_DAMAGED`` is raised unless it is whole."""
        state, meta = _read(path)
        kept: dict[Path, Manifest] = {}
        if older is not None:
            with contextlib.suppress(*_DAMAGED):
                kept[older] = _read(older)[0].manifest
        before = next(iter(kept.values()), {})
        self.clients.check(state.manifest, dict(state.manifest.items() - before.items()))
        if check is not None:
            check(state)
        self._kept, self.meta = {**kept, path: state.manifest}, meta
        return state

    def has_loaded(self) -> bool:
        """Return whether the checkpoint that :meth:`load` found is still on the disk, and so the states that it names.

        A process that trains the run deletes it two checkpoints later.
        """
        return next(reversed(self._kept)).exists()

    def newest_of_two(self) -> Path | None:
        """Return the newest checkpoint if there is another one, from which a run goes on without it; else None."""
        files = self._files()
        return files[-1] if len(files) > 1 else None

    def tidy(self) -> None:
        """Delete the leftovers of a killed process.

        The checkpoint that :meth:`load` found and the one before it stay, with the states that they name.
        """
        self._prune(self.clients.everyone())

    def _prune(self, clients: Collection[int], training: int | None = None) -> None:
        delete_others(self.root, {path.name for path in self._kept}.__contains__)
        self.clients.prune(clients, list(self._kept.values()), training=training)

    def newest_binding(self) -> Any:
        """Return the binding in the newest readable checkpoint; None if there is none."""
        for path in reversed(self._files()):
            with contextlib.suppress(*_DAMAGED):
                return read_tensors(path)[1]["binding"]
        return None

    def _files(self, phase: str | None = None) -> list[Path]:
        return sorted(self.root.glob(f"[0-9]*-{phase or '*'}.safetensors"))


def _pack(state: ServerState) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split a state into tensors and JSON."""
    tensors, plugins = flatten(state.plugins)
    pairs = [(client, _NOTHING if version is None else version) for client, version in sorted(state.manifest.items())]
    clients, versions = torch.tensor(pairs, dtype=torch.int32).view(-1, 2).unbind(1)
    manifest = {"clients": clients, "versions": versions}
    plain = {name: getattr(state, name) for name in _PLAIN}
    meta = {**plain, "outliers": state.outliers, "plugins": plugins}
    return flatten({"model": state.model, "plugins": tensors, "manifest": manifest})[0], meta


def _read(path: Path) -> tuple[ServerState, dict[str, Any]]:
    """Return the state in a checkpoint, and its JSON part."""
    tensors, meta = read_tensors(path)
    groups = unflatten(clone(tensors))  # the file's buffer is one block, which a single tensor would keep
    clients, versions = (groups["manifest"][name].tolist() for name in ("clients", "versions"))
    state = ServerState(
        model=groups.get("model", {}),
        plugins=unflatten(groups.get("plugins", {}), meta["plugins"]),
        manifest={client: None if version == _NOTHING else version for client, version in zip(clients, versions)},
        outliers=meta.get("outliers", {}),  # earlier checkpoints lack it
        **{name: meta[name] for name in _PLAIN},
    )
    return state, meta
