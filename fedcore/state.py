"""State that lasts: versioned client state, and what the server commits.

Client state is versioned by round. A task names the version to start from; the client writes a new one and
never edits an old one. Which version counts is decided by the server's manifest, when the round commits, so
a repeated, late, rejected or lost task changes nothing.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedcore.errors import PluginContractError, RunDirectoryError
from fedcore.files import delete_others, open_file, storing, sync_inside
from fedcore.manifest import Manifest
from fedcore.serial import HEAD, checksum_in, read_tensors, write_tensors

SEPARATOR = "/"


class State(MutableMapping[str, Any]):
    """One plugin's named tensors and JSON values.

    Reading a tensor gives this state's own copy, so that an edit in place reaches the next version only and
    never the committed one.
    """

    def __init__(
        self, base: Mapping[str, Any] | None = None, *, read_only: str = "", device: torch.device | None = None
    ) -> None:
        self._base = dict(base or {})
        self._own: dict[str, Any] = {}
        self._read_only = read_only
        self._device = device or torch.device("cpu")

    def __getitem__(self, key: str) -> Any:
        if key not in self._own:
            value = self._base[key]
            own = value.to(self._device, copy=True) if isinstance(value, Tensor) else json.loads(json.dumps(value))
            self._own[key] = own
        return self._own[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if self._read_only:
            raise PluginContractError(f"state is read-only in {self._read_only}; {key!r} cannot be written here")
        if not isinstance(value, Tensor):
            try:
                json.dumps(value)
            except (TypeError, ValueError) as error:
                raise PluginContractError(
                    f"state[{key!r}] is a {type(value).__name__}; state holds tensors and JSON values ({error})"
                ) from None
        self._own[key] = value.detach().clone() if isinstance(value, Tensor) else value

    def __delitem__(self, key: str) -> None:
        if self._read_only:
            raise PluginContractError(f"state is read-only in {self._read_only}; {key!r} cannot be deleted here")
        if key not in self:
            raise KeyError(key)
        self._own.pop(key, None)
        self._base.pop(key, None)

    def __iter__(self) -> Iterator[str]:
        return iter({**self._base, **self._own})

    def __len__(self) -> int:
        return len({**self._base, **self._own})

    def savepoint(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what :meth:`restore` needs to undo what is written from here on."""
        return dict(self._base), copy.deepcopy(self._own)

    def restore(self, saved: tuple[dict[str, Any], dict[str, Any]]) -> None:
        """Undo what was written since the savepoint."""
        self._base, self._own = saved

    def values_to_keep(self) -> dict[str, Any]:
        """Return what the next version holds."""
        return {**self._base, **({} if self._read_only else self._own)}


class States:
    """The states of all plugins of one client or of the server, each its own namespace."""

    def __init__(
        self,
        saved: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        read_only: str = "",
        device: torch.device | None = None,
    ) -> None:
        self._saved = saved or {}
        self._read_only, self._device = read_only, device
        self._open: dict[str, State] = {}

    def of(self, plugin: str) -> State:
        """Return a plugin's state."""
        if plugin not in self._open:
            self._open[plugin] = State(self._saved.get(plugin), read_only=self._read_only, device=self._device)
        return self._open[plugin]

    def savepoint(self, plugins: Iterable[str]) -> dict[str, Any]:
        """Return what :meth:`restore` needs to undo what these plugins write from here on."""
        return {plugin: self.of(plugin).savepoint() for plugin in plugins}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Undo what was written since the savepoint."""
        for plugin, state in saved.items():
            self.of(plugin).restore(state)

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """Return everything the next version holds, by plugin."""
        kept = {plugin: dict(values) for plugin, values in self._saved.items()}
        kept.update({plugin: state.values_to_keep() for plugin, state in self._open.items()})
        return {plugin: values for plugin, values in sorted(kept.items()) if values}


def flatten(
    namespaces: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Split nested states into tensors named ``plugin/key`` and the JSON rest."""
    tensors = {
        f"{plugin}{SEPARATOR}{key}": value
        for plugin, values in namespaces.items()
        for key, value in values.items()
        if isinstance(value, Tensor)
    }
    rest = {
        plugin: {key: value for key, value in values.items() if not isinstance(value, Tensor)}
        for plugin, values in namespaces.items()
    }
    return tensors, {plugin: values for plugin, values in rest.items() if values}


def unflatten(tensors: Mapping[str, Tensor], rest: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """Join what :func:`flatten` split."""
    namespaces: dict[str, dict[str, Any]] = {plugin: dict(values) for plugin, values in (rest or {}).items()}
    for name, tensor in tensors.items():
        plugin, _, key = name.partition(SEPARATOR)
        namespaces.setdefault(plugin, {})[key] = tensor
    return namespaces


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
        """Return a version by plugin; None is the empty state.

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
        """Make these versions durable; call before the checkpoint that names them."""
        for client, version in manifest.items():
            if version is not None:
                with storing(self.path(client, version)):
                    sync_inside(self.path(client, version), inside=self.root.parent)

    def stamp(self, client: int, version: int | None) -> int:
        """Return 63 bits of the checksum that a version carries; 0 where there is none."""
        if version is None:
            return 0
        try:
            with open_file(self.path(client, version)) as file:
                return checksum_in(file.read(HEAD))
        except OSError:
            return 0

    def prune(self, clients: Iterable[int], kept: Sequence[Mapping[int, int | None]]) -> None:
        """Delete every version of these clients that none of the manifests names, and what was half written."""
        for client in clients:
            versions = [manifest.get(client) for manifest in kept]
            names = {self.path(client, version).name for version in versions if version is not None}
            delete_others(self.path(client, 0).parent, names, inside=self.root.parent)

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
        """Return the clients of which there are files."""
        folders = self.root.iterdir() if self.root.is_dir() else ()
        return sorted(int(folder.name) for folder in folders if folder.name.isdecimal())


class DistantStore(ClientStore):
    """The states of clients that keep them themselves, where the server can neither read nor delete them."""

    def has(self, client: int, version: int) -> bool:
        """Believe the client: the server cannot look."""
        return True

    def stamp(self, client: int, version: int | None) -> int:
        """Know of none."""
        return 0

    def settle(self, manifest: Mapping[int, int | None]) -> None:
        """Leave it to the clients."""

    def prune(self, clients: Iterable[int], kept: Sequence[Mapping[int, int | None]]) -> None:
        """Leave it to the clients."""

    def check(self, manifest: Manifest, before: Manifest | None = None) -> None:
        """Believe the manifest: of a client that lost its state the task fails."""


@dataclass
class ServerState:
    """What commits at the end of a round, and all that a checkpoint needs.

    :param round: the next round to run.
    :param phase: ``train``, ``post_train`` or ``done``.
    :param model: the global model w_t, personal names at their initial values.
    :param plugins: server state by plugin.
    :param manifest: for every client that took part, the version of its state; None where it keeps nothing.
    :param ledger: totals of bytes and the like.
    :param best: best value so far of the validation protocol.
    :param before_correction: figures of the global model before ``post_train`` changed it.
    :param virtual_time: seconds on the clock of the simulated system.
    :param metrics_bytes: length of metrics.jsonl that belongs to the committed rounds.
    """

    model: dict[str, Tensor]
    round: int = 0
    phase: str = "train"
    plugins: dict[str, dict[str, Any]] = field(default_factory=dict)
    manifest: Mapping[int, int | None] = field(default_factory=dict)
    ledger: dict[str, Any] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)
    before_correction: dict[str, Any] | None = None
    metrics_bytes: int = 0
    virtual_time: float = 0.0
