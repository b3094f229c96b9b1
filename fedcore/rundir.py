"""A run's directory: what a finished, a stopped and a resumed run leave behind."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import functools
import json
import os
import shlex
import shutil
from collections.abc import Iterable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from fedcore.checkpoint import CheckpointStore, Report
from fedcore.config import RunConfig, read_config_file
from fedcore.errors import FedcoreError, RunDirectoryError
from fedcore.files import TEMPORARY, parse_json, storing, sync_file, write_json, write_text
from fedcore.serial import write_tensors
from fedcore.state import ClientStore, DistantStore, ServerState
from fedcore.trust import check_links, code_in, places_in

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
        self.clients = (ClientStore if with_clients else DistantStore)(path / "clients")
        self.checkpoints = CheckpointStore(path / "checkpoint", self.clients)

    def without_clients(self) -> RunDirectory:
        """Return the same directory for clients that keep their states themselves."""
        return RunDirectory(self.path, with_clients=False)

    @classmethod
    def create(cls, out: Path | None, plugins: list[str], *, with_clients: bool = True) -> RunDirectory:
        """Make a new, empty run directory.

        :raises RunDirectoryError: it exists and holds something, or cannot be made.
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
            with contextlib.suppress(OSError):  # somebody else put something there
                folder.rmdir()

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Open the directory of an earlier run.

        :raises RunDirectoryError: there is no run in it, or links in it lead out of it.
        """
        if not (path / "config.yaml").is_file():
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
        """One JSON line for each process that trained the run, see :func:`fedcore.provenance.session`."""
        return self.path / "sessions.jsonl"

    def add_session(self, session: dict[str, Any]) -> None:
        """Note that a process begins to train, or goes on with, this run."""
        before = self.sessions_file.read_text(encoding="utf-8", errors="replace") if self.sessions_file.exists() else ""
        write_text(self.sessions_file, before + json.dumps(session) + "\n")

    def write_config(self, config: RunConfig) -> None:
        """Write the resolved configuration with the versions of what is installed."""
        values = config.model_dump(mode="json")
        values["versions"] = installed_versions()
        write_text(self.path / "config.yaml", yaml.safe_dump(values, sort_keys=False))

    def read_config(self) -> RunConfig:
        """Read the run's configuration back."""
        file = self.path / "config.yaml"
        return RunConfig.create({**read_config_file(file), "out": str(self.path)}, source=str(file))

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

    def recover(self, report: Report) -> ServerState | None:
        """Return what to go on from, None for the start, and put the directory back to it.

        :param report: told of damaged files that were passed over.
        :raises RunDirectoryError: there are checkpoints, but none can be used.
        """
        state = self.checkpoints.load(check=self._check_metrics, report=report)
        if self.metrics_file.exists():  # what was written after the checkpoint will be written again
            with storing(self.metrics_file):
                os.truncate(self.metrics_file, state.metrics_bytes if state else 0)
        self.checkpoints.tidy()
        for path in self.path.glob(f".*{TEMPORARY}"):
            path.unlink(missing_ok=True)
        return state

    def append_metrics(self, record: dict[str, Any]) -> int:
        """Append a line and return the file's new length in bytes.

        :raises StorageError: it cannot be written; a part of it may be, which :meth:`recover` drops.
        """
        line = (json.dumps(record) + "\n").encode()
        with storing(self.metrics_file), self.metrics_file.open("ab", buffering=0) as file:
            while line:
                line = line[file.write(line) :]
            return os.fstat(file.fileno()).st_size

    def checkpoint(self, state: ServerState, touched: Iterable[int] = ()) -> None:
        """Save a checkpoint, see :meth:`CheckpointStore.save`; the metrics that it counts are on the disk before it."""
        if self.metrics_file.exists():
            with storing(self.metrics_file):
                sync_file(self.metrics_file)
        self.checkpoints.save(state, touched)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl but for one that is being written."""
        if not self.metrics_file.exists():
            return []
        whole, _, _ = self.metrics_file.read_bytes().rpartition(b"\n")
        return [parse_json(line) for line in whole.splitlines()]

    def _check_metrics(self, state: ServerState) -> None:
        content = self.metrics_file.read_bytes() if self.metrics_file.exists() else b""
        counted = content[: state.metrics_bytes]
        if len(counted) < state.metrics_bytes or (counted and not counted.endswith(b"\n")):
            raise RunDirectoryError(
                f"{self.metrics_file.name} is damaged: it has {len(content)} bytes, and {state.metrics_bytes} bytes of "
                "whole lines belong to this checkpoint"
            )

    def write_model(self, model: dict[str, Tensor]) -> None:
        """Write the global model."""
        write_tensors(self.path / "model.safetensors", model)

    def read_summary(self) -> dict[str, Any] | None:
        """Return summary.json, or None where there is none that is whole."""
        try:
            summary: dict[str, Any] = parse_json((self.path / "summary.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return summary

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json."""
        write_json(self.path / "summary.json", summary)


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
