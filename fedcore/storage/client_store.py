"""The store of the clients' states: one file per client and version."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from fedcore.base.errors import RunDirectoryError
from fedcore.base.tensors import flatten, unflatten
from fedcore.storage.files import delete_others, open_file, storing, sync_folders, sync_inside
from fedcore.storage.manifest import Manifest
from fedcore.storage.serial import HEAD, checksum_in, read_tensors, write_tensors

SYNCING = 8
"""Files that are made durable at once: a disk serves the waits together, some 20 times as fast as one by one."""


class ClientStore:
    """Versions of clients' states as files ``root/<client>/<round>.safetensors``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, client: int, version: int) -> Path:
        """Return the file of one version."""
        return self.root / f"{client:06d}" / f"{version:06d}.safetensors"

    def has(self, client: int, version: int) -> bool:
        """Return whether a version is there, whole or not."""
        return self.path(client, version).is_file()

    def read(self, client: int, version: int | None) -> dict[str, dict[str, Any]]:
        """Return a version as plugin -> name -> value; None is the empty state.

        :raises RunDirectoryError: the file is missing or damaged.
        """
        if version is None:
            return {}
        try:
            return unflatten(*read_tensors(self.path(client, version)))
        except (ValueError, TypeError, AttributeError, OSError) as error:
            raise RunDirectoryError(f"client {client}'s state of round {version} is lost: {error}") from error

    def write(self, client: int, version: int, namespaces: Mapping[str, Mapping[str, Any]]) -> int | None:
        """Write a new version and return its name; an empty state takes no file and is None."""
        if not namespaces:
            return None
        write_tensors(self.path(client, version), *flatten(namespaces), sync=False, inside=self.root.parent)
        return version

    def settle(self, manifest: Mapping[int, int | None]) -> None:
        """Make these versions and their names durable; call before the checkpoint that names them."""
        written = [self.path(client, version) for client, version in manifest.items() if version is not None]
        if not written:
            return

        def sync(path: Path) -> None:
            with storing(path):
                sync_inside(path, inside=self.root.parent)

        with ThreadPoolExecutor(SYNCING) as pool:
            for _ in pool.map(sync, written):
                pass
        with storing(self.root):
            sync_folders(self.root, inside=self.root.parent)

    def stamp(self, client: int, version: int | None) -> int:
        """Return 63 bits of the checksum that a version carries; 0 where there is none."""
        if version is None:
            return 0
        try:
            with open_file(self.path(client, version)) as file:
                return checksum_in(file.read(HEAD))
        except OSError:
            return 0

    def prune(
        self, clients: Iterable[int], kept: Sequence[Mapping[int, int | None]], *, training: int | None = None
    ) -> None:
        """Delete every version of these clients that no manifest names, and incomplete files.

        :param training: the round in which clients may be writing versions, which stay, as do later ones; default none.
        """
        if not self.root.is_dir():  # no client has ever kept anything
            return
        for client in clients:
            versions = [manifest.get(client) for manifest in kept]
            names = {self.path(client, version).name for version in versions if version is not None}
            keep = partial(_stays, names, training)
            delete_others(self.path(client, 0).parent, keep, inside=self.root.parent)

    def check(self, manifest: Manifest, before: Manifest | None = None) -> None:
        """Check that every version that a manifest names is there; read those that the one before does not name.

        :raises RunDirectoryError: one is missing, or damaged.
        """
        new = set(manifest if before is None else manifest.changed(before))
        for client, version in manifest.items():
            if client in new:
                self.read(client, version)
            elif version is not None and not self.has(client, version):
                raise RunDirectoryError(f"client {client}'s state of round {version} is missing")

    def everyone(self) -> list[int]:
        """Return the clients that have files."""
        folders = self.root.iterdir() if self.root.is_dir() else ()
        return sorted(int(folder.name) for folder in folders if folder.name.isdecimal())


def _stays(names: Collection[str], training: int | None, name: str) -> bool:
    """Return whether a file is one of these, or may be part of a version that a client is writing.

    safetensors writes to a temporary file with a name of its own choice first.
    """
    version = name.lstrip(".").partition(".")[0]
    return name in names or (training is not None and not (version.isdecimal() and int(version) < training))


class RemoteClientStore(ClientStore):
    """A stand-in for states that remote clients keep; the server can neither read nor delete them."""

    def has(self, client: int, version: int) -> bool:
        """Return True: the server cannot check."""
        return True

    def stamp(self, client: int, version: int | None) -> int:
        """Return 0: the clients keep their states."""
        return 0

    def settle(self, manifest: Mapping[int, int | None]) -> None:
        """Leave it to the clients."""

    def prune(
        self, clients: Iterable[int], kept: Sequence[Mapping[int, int | None]], *, training: int | None = None
    ) -> None:
        """Leave it to the clients."""

    def check(self, manifest: Manifest, before: Manifest | None = None) -> None:
        """Check nothing: a task of a client that lost its state fails."""
