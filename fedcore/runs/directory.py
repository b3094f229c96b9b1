"""A run's directory: its files, and their recovery after a stop."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import functools
import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from fedcore.base.config import RunConfig
from fedcore.base.errors import FedcoreError, RunDirectoryError
from fedcore.runs.checkpoint import CheckpointStore, Report
from fedcore.runs.saved import Binding, SavedConfig, read_saved
from fedcore.runs.trust import check_links, code_in, places_in
from fedcore.server.state import ServerState
from fedcore.storage.client_store import ClientStore, RemoteClientStore
from fedcore.storage.files import (
    TEMPORARY,
    finite,
    open_inside,
    parse_json,
    read_bytes,
    read_text,
    sealed,
    storing,
    sync_inside,
    unsealed,
    write_json,
    write_text,
)
from fedcore.storage.serial import write_tensors

RECORDED = ("torch", "torchvision", "numpy", "scikit-learn", "pluggy", "safetensors")


class RunDirectory:
    """Paths and files of one run.

    ``config.yaml`` (itself a valid ``--config``), ``partition.json``, ``metrics.jsonl`` (a line per round),
    ``sessions.jsonl`` (a line per process that trained it), ``summary.json``, ``model.safetensors``, ``checkpoint/``,
    ``clients/``.

    :param with_clients: whether the clients' states are in it; not where the clients keep them themselves.
    """

    def __init__(self, path: Path, *, with_clients: bool = True) -> None:
        self.path = path
        self._missing: list[Path] = []  # folders that were not there before, innermost first
        self._lines = hashlib.sha256()  # of metrics.jsonl, as far as this process knows it
        self._counted: dict[int, str] = {0: self._lines.hexdigest()}  # length -> digest of so much, the last few
        self.clients = (ClientStore if with_clients else RemoteClientStore)(path / "clients")
        self.checkpoints = CheckpointStore(path / "checkpoint", self.clients)

    def without_clients(self) -> RunDirectory:
        """Return the same directory for clients that keep their states themselves."""
        return RunDirectory(self.path, with_clients=False)

    @classmethod
    def choose(cls, out: Path | None, plugins: list[str]) -> Path:
        """Return the path of a new run directory, by default named after time and plugins; makes nothing.

        :raises RunDirectoryError: it exists and holds something.
        """
        if out is None:
            stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
            names = "-".join(name.rpartition(".")[2] for name in plugins) or "fedavg"
            base = Path("runs") / f"{stamp}-{names}"
            out, number = base, 1
            while out.exists():
                out, number = base.with_name(f"{base.name}-{number}"), number + 1
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise RunDirectoryError(
                f"--out {out} exists already. Choose another directory, or go on with: "
                f"fedcore resume {shlex.quote(str(out))}"
            )
        return out.resolve()

    @classmethod
    def create(cls, out: Path, *, with_clients: bool = True) -> RunDirectory:
        """Make a new, empty run directory.

        :raises RunDirectoryError: it cannot be made.
        """
        missing = [folder for folder in (out.absolute(), *out.absolute().parents) if not folder.exists()]
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(f"--out {out} cannot be made: {error}") from error
        made = cls(out.resolve(), with_clients=with_clients)
        made._missing = missing
        return made

    def discard(self) -> None:
        """Delete what :meth:`create` made and all that is in it; for a run that never started."""
        for path in self.path.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for folder in self._missing:
            with contextlib.suppress(OSError):  # another process put something there
                folder.rmdir()

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Open the directory of an earlier run.

        :raises RunDirectoryError: there is no run in it, or links in it lead out of it.
        """
        if not os.path.lexists(path / "config.yaml"):
            raise RunDirectoryError(
                f"{path} is no run directory: it has no config.yaml. Name the folder that train printed."
            )
        check_links(path)
        return cls(path.resolve())

    @property
    def how_to_resume(self) -> str:
        """The command that goes on with this run, with the flags that its configuration needs."""
        flags = ""
        with contextlib.suppress(FedcoreError):
            config = self.read_config()
            code = code_in(config)
            flags += " --allow-code" * bool(code)
            flags += " --allow-outside" * bool(not code and places_in(config, self.path))
        return f"fedcore resume {shlex.quote(str(self.path))}{flags}"

    @property
    def partition_file(self) -> Path:
        """Who holds which samples."""
        return self.path / "partition.json"

    @property
    def metrics_file(self) -> Path:
        """One JSON line per round."""
        return self.path / "metrics.jsonl"

    @property
    def sessions_file(self) -> Path:
        """One JSON line for each process that trained the run, see :func:`fedcore.runs.provenance.session`."""
        return self.path / "sessions.jsonl"

    def add_session(self, session: dict[str, Any]) -> None:
        """Note that a process begins to train, or goes on with, this run."""
        before = read_bytes(self.sessions_file).decode(errors="replace") if self.sessions_file.exists() else ""
        write_text(self.sessions_file, before + json.dumps(session) + "\n", inside=self.path)

    def write_config(self, values: Mapping[str, Any], binding: Binding, versions: Mapping[str, Any]) -> None:
        """Write the resolved options, what they are bound to, and the versions of what was installed."""
        content = {**values, "digests": binding.digests()}
        content |= {"changes": [dict(entry) for entry in binding.changes]} if binding.changes else {}
        content["versions"] = dict(versions)
        write_text(self.path / "config.yaml", yaml.safe_dump(content, sort_keys=False), inside=self.path)

    def read_config(self) -> RunConfig:
        """Read the run's configuration back; raises as :func:`fedcore.runs.saved.read_saved`."""
        return self.read_saved().config

    def read_saved(self) -> SavedConfig:
        """Read config.yaml with what it is bound to; raises as :func:`fedcore.runs.saved.read_saved`."""
        return read_saved(self.path / "config.yaml", self.path, was=self.checkpoints.binding_found)

    @functools.cached_property
    def mark(self) -> str:
        """What the checksums of this run's records start from, see :attr:`fedcore.runs.saved.Binding.mark`."""
        try:
            return self.read_saved().mark
        except FedcoreError:
            return ""

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from going on with this run until the block ends.

        :raises RunDirectoryError: one is at work.
        """
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise RunDirectoryError(
                f"another process is training in {self.path}; wait for it to end, or stop it"
            ) from None
        except OSError:  # a network file system that cannot lock folders
            pass
        try:
            yield
        finally:
            os.close(descriptor)

    def recover(
        self, report: Report, fits: Callable[[ServerState], None] = lambda state: None, *, phase: str | None = None
    ) -> ServerState | None:
        """Return what to go on from, None for the start, and put the directory back to it.

        :param report: told of damaged files that were passed over.
        :param fits: raises an error for a state that is none of this run, before anything is written.
        :param phase: go on from a checkpoint of this phase only.
        :raises RunDirectoryError: there are checkpoints, but none can be used.
        """
        try:
            state = self.checkpoints.load(check=self._check_metrics, report=report, phase=phase)
        except RunDirectoryError:
            if not self._damaged_lines():
                raise  # an older checkpoint does not help either, but the round's records are all that is lost
            state = self.checkpoints.load(check=self._check_length, report=report, phase=phase)
            names = ", ".join(map(str, self._damaged_lines()))
            report(
                f"{self.metrics_file}: damaged in line {names}. The other lines are kept, and the run goes on: "
                "training does not read them"
            )
        if state is not None:
            fits(state)
        self._count(read_bytes(self.metrics_file)[: state.metrics_bytes] if state and state.metrics_bytes else b"")
        if self.metrics_file.exists():  # what was written after the checkpoint will be written again
            with storing(self.metrics_file), self._metrics(os.O_WRONLY) as file:
                os.ftruncate(file, state.metrics_bytes if state else 0)
        self.checkpoints.tidy()
        for path in self.path.glob(f".*{TEMPORARY}"):
            path.unlink(missing_ok=True)
        return state

    def append_metrics(self, record: dict[str, Any]) -> int:
        """Append a line and return the file's new length in bytes.

        :raises StorageError: it cannot be written; a part of it may be, which :meth:`recover` drops.
        """
        line = (json.dumps(sealed(finite(record), self.mark)) + "\n").encode()
        with storing(self.metrics_file), self._metrics(os.O_WRONLY | os.O_APPEND | os.O_CREAT) as file:
            left = line
            while left:
                left = left[os.write(file, left) :]
            length = os.fstat(file).st_size
        self._lines.update(line)
        self._counted = {**dict([*self._counted.items()][-2:]), length: self._lines.hexdigest()}
        return length

    def checkpoint(self, state: ServerState, touched: Iterable[int] = ()) -> None:
        """Save a checkpoint, see :meth:`CheckpointStore.save`; the metrics that it counts are on the disk before it."""
        if self.metrics_file.exists():
            with storing(self.metrics_file):
                sync_inside(self.metrics_file, inside=self.path)
        self.checkpoints.save(state, touched, metrics=self._counted.get(state.metrics_bytes))

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl but for damaged ones, and one that is being written."""
        if not self.metrics_file.exists():
            return []
        whole, _, _ = read_bytes(self.metrics_file).rpartition(b"\n")
        return [record for line in whole.splitlines() if (record := self._record(line)) is not None]

    def _count(self, content: bytes) -> None:
        """Take the part of metrics.jsonl that a checkpoint counts as what was written so far."""
        self._lines = hashlib.sha256(content)
        self._counted = {len(content): self._lines.hexdigest()}

    @contextlib.contextmanager
    def _metrics(self, flags: int) -> Iterator[int]:
        descriptor = open_inside(self.metrics_file, flags, inside=self.path)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _record(self, line: bytes) -> dict[str, Any] | None:
        """Return a line of metrics.jsonl, None where it is damaged."""
        try:
            return unsealed(parse_json(line), self.mark)
        except ValueError:
            return None

    def _damaged_lines(self) -> list[int]:
        """Return the numbers of the lines of metrics.jsonl, from 1, that are not as they were written."""
        lines = read_bytes(self.metrics_file).split(b"\n")[:-1] if self.metrics_file.exists() else []
        return [number for number, line in enumerate(lines, start=1) if self._record(line) is None]

    def _check_metrics(self, state: ServerState, meta: Mapping[str, Any]) -> None:
        counted = self._check_length(state, meta)
        expected = meta.get("metrics_sha256")
        if expected is None or expected == hashlib.sha256(counted).hexdigest():
            return
        damaged = self._damaged_lines()
        what = f"damaged in line {', '.join(map(str, damaged))}" if damaged else "not this run's, or lacks lines"
        raise RunDirectoryError(f"{self.metrics_file.name} is {what}")

    def _check_length(self, state: ServerState, meta: Mapping[str, Any]) -> bytes:
        """Return the part of metrics.jsonl that belongs to a state; it has to be there, in whole lines."""
        content = read_bytes(self.metrics_file) if self.metrics_file.exists() else b""
        counted = content[: state.metrics_bytes]
        if len(counted) < state.metrics_bytes or (counted and not counted.endswith(b"\n")):
            raise RunDirectoryError(
                f"{self.metrics_file.name} is damaged: it has {len(content)} bytes, and {state.metrics_bytes} bytes of "
                "whole lines belong to this checkpoint"
            )
        return counted

    def write_model(self, model: dict[str, Tensor]) -> None:
        """Write the global model."""
        write_tensors(self.path / "model.safetensors", model, inside=self.path)

    def read_summary(self, report: Report | None = None) -> dict[str, Any] | None:
        """Return summary.json, or None where there is none that is whole.

        :param report: told where there is one that is damaged.
        """
        file = self.path / "summary.json"
        try:
            return unsealed(parse_json(read_text(file)), self.mark)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            if report is not None:
                report(f"{file} is damaged: {error}. It is written again when the run is finished")
            return None

    def reopen_finished(self) -> None:
        """Delete summary and model of a finished run, before it is resumed for more rounds."""
        with storing(self.path):
            for name in ("summary.json", "model.safetensors"):
                (self.path / name).unlink(missing_ok=True)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json; :attr:`mark` goes into the checksum that it carries."""
        write_json(self.path / "summary.json", summary, inside=self.path)


@functools.cache  # it reads every package's metadata, and they are those of this process
def installed_versions() -> dict[str, str]:
    """Return the versions of fedcore, its plugins and what its numbers depend on."""
    found = {}
    for distribution in distributions():
        name = distribution.name
        if (
            name in RECORDED
            or name == "fedcore"
            or any(e.group.startswith("fedcore.") for e in distribution.entry_points)
        ):
            found[name] = distribution.version
    return dict(sorted(found.items()))
