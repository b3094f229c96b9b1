"""Weights & Biases for fedcore: a run's metrics, configuration and summary, online or offline."""

from __future__ import annotations

import glob
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from fedcore_trackers.base import Status, TrackedRun, Tracker, TrackerOptions, requires
from fedcore_trackers.scalars import parameters, round_scalars, scalars

__all__ = ["Wandb", "WandbOptions"]

STEP = "round"
EXIT_CODES = {"finished": 0, "stopped": 255, "failed": 1}
"""What W&B shows as finished, killed and failed."""


class WandbOptions(TrackerOptions):
    """Options of the tracker ``wandb``; the others follow W&B's own environment variables and settings."""

    project: str = Field(default="fedcore", min_length=1, description="Project that the run belongs to.")
    entity: str | None = Field(default=None, description="User or team; default the account's own.")
    group: str | None = Field(default=None, description="Name that gathers runs, of a sweep for example.")
    mode: Literal["online", "offline", "disabled"] | None = Field(
        default=None, description="Default WANDB_MODE, else online; offline writes files for wandb sync."
    )
    dir: Path | None = Field(default=None, description="Folder that gets W&B's files; default the run directory.")


class Wandb(Tracker):
    """A run in Weights & Biases: config, metrics over ``round``, config.yaml and summary.json as files."""

    Options = WandbOptions

    def start(self, run: TrackedRun) -> None:
        """Begin a run under an id that stays the same when it is resumed."""
        with requires("wandb"):
            import wandb

        self.directory = run.directory
        folder = self.options.dir or run.directory
        folder.mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(
            project=self.options.project,
            entity=self.options.entity,
            group=self.options.group,
            name=run.name,
            id=run.state.setdefault("id", uuid.uuid4().hex[:12]),
            resume="allow",
            mode=self.options.mode,
            dir=str(folder),
            config=parameters(run.config),
            settings=wandb.Settings(console="off", silent=True),  # this process prints nothing worth keeping
        )
        self.run.define_metric(STEP)
        self.run.define_metric("*", step_metric=STEP)
        self._keep("config.yaml")

    def round(self, record: Mapping[str, Any]) -> None:
        """Hold a round's losses, bytes and seconds, and log them where no evaluation follows."""
        self.run.log({STEP: record["round"] + 1, **round_scalars(record)}, commit=not record["metrics"])

    def evaluation(self, round: int, metrics: Mapping[str, Any]) -> None:
        """Log the figures of the protocols in the round's row."""
        self.run.log({STEP: round + 1, **scalars(metrics)})

    def finish(self, status: Status, summary: Mapping[str, Any] | None) -> None:
        """Write the final figures and wait until everything is on the disk, or sent."""
        if summary is not None:
            self.run.summary.update(scalars(summary["metrics"], "final/"))
            self._keep("summary.json")
        self.run.finish(exit_code=EXIT_CODES[status])

    def _keep(self, name: str) -> None:
        # In the run's folder: W&B has its own config.yaml, which it would write through the link that this makes.
        path, base = (glob.escape(str(path)) for path in (self.directory / name, self.directory.parent))
        self.run.save(path, base_path=base, policy="now")
