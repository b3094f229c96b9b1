"""The store of the clients' states. Each version of a client's state is a file."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fedcore.base.errors import RunDirectoryError
from fedcore.base.files import delete_others, storing, sync_path
from fedcore.base.serial import read_tensors, write_tensors
from fedcore.base.tensors import flatten, unflatten

SYNCING = 8
"""The number of files that are synced at a time. A disk serves them together, some 20 times as fast as one by one."""


class ClientStore:
    """Versions of clients' states as files ``root/<client>/<round>.safetensors``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, client: int, version: int) -> Path:
        """Return the file of one version."""
        return self.root / f"{client:06d}/{version:06d}.safetensors"

    def has(self, client: int, version: int) -> bool:
        """Return whether a version exists, whole or damaged."""
        return self.path(client, version).is_file()

    def read(self, client: int, version: int | None) -> dict[str, dict[str, Any]]:
        """Return a version as plugin -> name -> value.

        :param version: None for the empty state.
        :raises RunDirectoryError: the file is missing or damaged.
        """
        if version is None:
            return {}
        try:
            return unflatten(*read_tensors(self.path(client, version)))
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

    def settle(self, manifest: Mapping[int, int | None]) -> None:
        """Sync these versions and their folders to the disk. Call it before the checkpoint that names them.

        :raises StorageError: they cannot be synced.
        """
        written = [self.path(client, version) for client, version in manifest.items() if version is not None]
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
        for client in clients if self.root.is_dir() else ():  # without states there is nothing to look at
            versions = [manifest.get(client) for manifest in kept]
            names = {self.path(client, version).name for version in versions if version is not None}

            def stays(name: str, names: set[str] = names) -> bool:
                number = name.lstrip(".").partition(".")[0]
                return name in names or (training is not None and not (number.isdecimal() and int(number) < training))

            delete_others(self.path(client, 0).parent, stays)

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


class RemoteClientStore(ClientStore):
    """A stand-in for states that remote clients keep. The server can neither read nor delete them."""

    def has(self, client: int, version: int) -> bool:
        """Return True: the server cannot check."""
        return True

    def settle(self, manifest: Mapping[int, int | None]) -> None:
        """Do nothing: the clients sync their states."""

    def prune(
        self, clients: Iterable[int], kept: Sequence[Mapping[int, int | None]], *, training: int | None = None
    ) -> None:
        """Do nothing: the clients delete their old versions."""

    def check(self, named: Mapping[int, int | None], new: Collection[int]) -> None:
        """Do nothing: if a client lost its state, its task fails."""
