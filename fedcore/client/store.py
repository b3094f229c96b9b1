"""The store of the clients' states. A version of a client's state is a file, or a part of one that clients share."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from fedcore.base.errors import RunDirectoryError
from fedcore.base.files import delete_others, storing, sync_path
from fedcore.base.serial import Buffer, Extract, loads, read_index, read_tensors, write_bundle, write_tensors
from fedcore.base.tensors import flatten, unflatten

SYNCING = 8
"""The number of files that are synced at a time. A disk serves them together, some 20 times as fast as one by one."""

Index: TypeAlias = dict[int, Extract]
"""The clients' states in a bundle, by client; empty if it is damaged."""


class ClientStore:
    """Versions of clients' states as files ``root/<client>/<round>.safetensors``.

    States that were written together are in bundles ``root/together/<round>-<checksum>.bundle``.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.together = root, root / "together"
        self._bundles: dict[str, Index] = {}
        """The bundles that were looked for, by name."""

    def path(self, client: int, version: int) -> Path:
        """Return the file of one version, unless it is in a bundle."""
        return self.root / f"{client:06d}/{version:06d}.safetensors"

    def has(self, client: int, version: int) -> bool:
        """Return whether a version exists, whole or damaged."""
        return self._find(client, version) is not None

    def _find(self, client: int, version: int) -> Path | Extract | None:
        """Return the file of a version, or its part of a bundle. A damaged bundle of its round counts as the last."""
        for look in (False, True):
            if look:
                self._look()
            for name, index in reversed(self._bundles.items()):  # most clients took part not long ago
                if client in index and _round(name) == version:
                    return index[client]
            if (path := self.path(client, version)).is_file():  # its making takes as long as all of the above
                return path
        damaged = (name for name, index in self._bundles.items() if not index and _round(name) == version)
        return next((Extract(self.together / name, 0, 0, -1) for name in damaged), None)

    def _look(self) -> None:
        """Read the indexes of new bundles, and forget deleted ones."""
        names = sorted(os.listdir(self.together)) if self.together.is_dir() else []
        self._bundles = {n: self._bundles.get(n) or read_index(self.together / n) for n in names if n[:6].isdecimal()}

    def read(self, client: int, version: int | None) -> dict[str, dict[str, Any]]:
        """Return a version as plugin -> name -> value.

        :param version: None for the empty state.
        :raises RunDirectoryError: the file is missing or damaged.
        """
        if version is None:
            return {}
        try:
            found = self._find(client, version)
            part = loads(found.read()) if isinstance(found, Extract) else read_tensors(self.path(client, version))
            return unflatten(*part)
        except (ValueError, TypeError, AttributeError, OSError) as error:
            raise RunDirectoryError(f"client {client}'s state of round {version} is lost: {error}") from error

    def write(self, client: int, version: int, namespaces: Mapping[str, Mapping[str, Any]]) -> int | None:
        """Write a new version and return it. An empty state has no file; its version is None.

        :raises StorageError: the file cannot be written.
        """
        if not namespaces:
            return None
        path = self.path(client, version)
        with storing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(path, *flatten(namespaces), sync=False)
        return version

    def write_together(self, version: int, states: Mapping[int, tuple[bytes, Buffer]]) -> None:
        """Write a new version of several clients' states into a bundle, which stays until none of them is needed.

        :param states: by client, what ``dumps`` returns for its flat state, in two pieces; not empty.
        :raises StorageError: the bundle cannot be written.
        """
        write_bundle(self.together, f"{version:06d}-", states)

    def settle(self, manifest: Mapping[int, int | None]) -> None:
        """Sync these versions and their folders to the disk. Call it before the checkpoint that names them.

        :raises StorageError: they cannot be synced.
        """
        self._look()
        found = [self._find(client, version) for client, version in manifest.items() if version is not None]
        written = {each.path if isinstance(each, Extract) else each for each in found if each is not None}
        if not written:
            return

        def sync(path: Path) -> None:
            with storing(path):
                sync_path(path)
                sync_path(path.parent)

        with ThreadPoolExecutor(SYNCING) as pool:
            list(pool.map(sync, written))
        with storing(self.root):
            sync_path(self.root)

    def prune(
        self, clients: Iterable[int], kept: Sequence[Mapping[int, int | None]], *, training: int | None = None
    ) -> None:
        """Delete every version of these clients that no manifest names, and incomplete files.

        :param training: the round in which clients may be writing versions. Files of this round and of later rounds
            stay. By default no client trains.
        """

        def stays(name: str, holders: Collection[int]) -> bool:
            version = _round(name.lstrip("."))
            named = name[0] != "." and any(manifest.get(client) == version for manifest in kept for client in holders)
            return named or (training is not None and version >= training)

        for client in clients if self.root.is_dir() else ():  # without states there is nothing to look at
            delete_others(self.path(client, 0).parent, partial(stays, holders=[client]))
        self._look()
        # A damaged bundle may be anybody's.
        delete_others(self.together, lambda name: stays(name, self._bundles.get(name) or set[int]().union(*kept)))
        self._look()

    def check(self, named: Mapping[int, int | None], new: Collection[int]) -> None:
        """Check that every version that a checkpoint names exists, and that some of them can be read.

        :param named: client -> its version in the checkpoint.
        :param new: the clients whose versions are read.
        :raises RunDirectoryError: a version is missing or damaged.
        """
        for client, version in named.items():
            if client in new:
                self.read(client, version)
            elif version is not None and not self.has(client, version):
                raise RunDirectoryError(f"client {client}'s state of round {version} is missing")

    def everyone(self) -> list[int]:
        """Return the clients that have files."""
        folders = self.root.iterdir() if self.root.is_dir() else ()
        return sorted(int(folder.name) for folder in folders if folder.name.isdecimal())


def _round(name: str) -> int:
    """Return the version in a file's name."""
    return int(re.split(r"\D", name, maxsplit=1)[0])


class RemoteClientStore(ClientStore):
    """A stand-in for states that remote clients keep. The server can neither read nor delete them."""

    def has(self, client: int, version: int) -> bool:
        """Return True: the server cannot check."""
        return True

    def check(self, named: Mapping[int, int | None], new: Collection[int]) -> None:
        """Do nothing: if a client lost its state, its task fails."""
