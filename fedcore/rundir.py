"""A run's directory: what a finished, a stopped and a resumed run leave behind."""

from __future__ import annotations

import datetime
import functools
import json
import os
import shlex
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from fedcore.config import RunConfig, read_config_file
from fedcore.errors import RunDirectoryError
from fedcore.serial import write_json, write_tensors, write_text
from fedcore.state import CheckpointStore, ClientStore

RECORDED = ("torch", "torchvision", "numpy", "scikit-learn", "pluggy", "safetensors")


class RunDirectory:
    """Paths and files of one run.

    ``config.yaml`` (itself a valid ``--config``), ``partition.json``, ``metrics.jsonl`` (a line per round),
    ``summary.json``, ``model.safetensors``, ``checkpoint/``, ``clients/``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = CheckpointStore(path / "checkpoint")
        self.clients = ClientStore(path / "clients")

    @classmethod
    def create(cls, out: Path | None, plugins: list[str]) -> RunDirectory:
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
                f"--out {out} exists already. Choose another directory, or go on with: {cls(out).how_to_resume}"
            )
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(f"--out {out} cannot be made: {error}") from error
        return cls(out.resolve())

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Open the directory of an earlier run.

        :raises RunDirectoryError: there is no run in it.
        """
        if not (path / "config.yaml").is_file():
            raise RunDirectoryError(
                f"{path} is no run directory: it has no config.yaml. Name the folder that train printed."
            )
        return cls(path.resolve())

    @property
    def how_to_resume(self) -> str:
        """The command that goes on with this run."""
        return f"fedcore resume {shlex.quote(str(self.path))}"

    @property
    def partition_file(self) -> Path:
        """Who holds which samples."""
        return self.path / "partition.json"

    @property
    def metrics_file(self) -> Path:
        """One JSON line per round."""
        return self.path / "metrics.jsonl"

    def write_config(self, config: RunConfig) -> None:
        """Write the resolved configuration with the versions of what is installed."""
        values = config.model_dump(mode="json")
        values["versions"] = installed_versions()
        write_text(self.path / "config.yaml", yaml.safe_dump(values, sort_keys=False))

    def read_config(self) -> RunConfig:
        """Read the run's configuration back."""
        file = self.path / "config.yaml"
        return RunConfig.create({**read_config_file(file), "out": str(self.path)}, source=str(file))

    def append_metrics(self, record: dict[str, Any]) -> int:
        """Append a line and return the file's new length in bytes."""
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            return os.fstat(file.fileno()).st_size

    def truncate_metrics(self, size: int) -> None:
        """Drop what was written after the last checkpoint."""
        if self.metrics_file.exists():
            os.truncate(self.metrics_file, size)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl."""
        if not self.metrics_file.exists():
            return []
        return [json.loads(line) for line in self.metrics_file.read_text(encoding="utf-8").splitlines()]

    def write_model(self, model: dict[str, Tensor]) -> None:
        """Write the global model."""
        write_tensors(self.path / "model.safetensors", model)

    def read_summary(self) -> dict[str, Any] | None:
        """Return summary.json, or None before the run is finished."""
        file = self.path / "summary.json"
        summary: dict[str, Any] | None = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
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
