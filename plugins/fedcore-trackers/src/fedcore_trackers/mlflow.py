"""MLflow for fedcore: a run's parameters, metrics, configuration and summary in a tracking store."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import Field

from fedcore import PLACE
from fedcore_trackers.base import Status, TrackedRun, Tracker, TrackerOptions, requires
from fedcore_trackers.scalars import parameters, round_scalars, scalars

__all__ = ["MLflow", "MLflowOptions"]

STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
PARAMETERS_AT_ONCE, METRICS_AT_ONCE, LONGEST = 100, 500, 6000
"""Limits of MLflow's log_batch, and of a parameter's length in characters."""

_REFUSED = re.compile(r"[^\w.\- :/]")
"""What MLflow takes in no metric's name, and the name of a domain can have."""


class MLflowOptions(TrackerOptions):
    """Options of the tracker ``mlflow``."""

    uri: str | None = Field(
        default=None,
        json_schema_extra=PLACE,
        description="Tracking store: http://..., sqlite:///FILE or a folder; default MLFLOW_TRACKING_URI, else "
        "sqlite:///mlflow.db in the working folder, as mlflow ui reads it there.",
    )
    experiment: str = Field(
        default="fedcore", min_length=1, description="Experiment that the run belongs to; made if missing."
    )
    run_name: str | None = Field(default=None, description="The run's name; default the run directory's.")


class MLflow(Tracker):
    """A run in MLflow: parameters, metrics with the round as step, tags, config.yaml and summary.json as artifacts."""

    Options = MLflowOptions

    def start(self, run: TrackedRun) -> None:
        """Make a run in the store, or continue this run's earlier one."""
        uri = self.options.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path.cwd() / 'mlflow.db'}"
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder, where one is asked for by name
        with requires("mlflow-skinny", "SQLAlchemy", "alembic"):
            from mlflow import MlflowClient

        self.directory = run.directory
        with _alone(uri):
            self.client = MlflowClient(tracking_uri=uri)
            name = self.options.experiment
            experiment = self.client.get_experiment_by_name(name)
            experiment_id = experiment.experiment_id if experiment else self.client.create_experiment(name)
        self.id: str = run.state.get("run_id", "")
        values = parameters(run.config)
        if self.id:
            self.client.update_run(self.id, status="RUNNING")
            self._tag_changes(values)
            return
        tags = {"fedcore.run_dir": str(run.directory), "fedcore.plugins": str(values["plugins"])}
        created = self.client.create_run(experiment_id, run_name=self.options.run_name or run.name, tags=tags)
        self.id = run.state["run_id"] = created.info.run_id
        self._log_parameters(values)
        self.client.log_artifact(self.id, str(run.directory / "config.yaml"))

    def round(self, record: Mapping[str, Any]) -> None:
        """Log a round's losses, bytes and seconds."""
        self._log(round_scalars(record), record["round"] + 1)

    def evaluation(self, round: int, metrics: Mapping[str, Any]) -> None:
        """Log the figures of the protocols."""
        self._log(scalars(metrics), round + 1)

    def finish(self, status: Status, summary: Mapping[str, Any] | None) -> None:
        """Log the final figures and say how the run ended."""
        if summary is not None:
            self._log(scalars(summary["metrics"], "final/"), summary["rounds"])
            self.client.log_artifact(self.id, str(self.directory / "summary.json"))
        self.client.set_terminated(self.id, STATUS[status])

    def _tag_changes(self, values: Mapping[str, Any]) -> None:
        """Note the changes of a resume, such as the rounds: MLflow does not let a parameter change."""
        logged = self.client.get_run(self.id).data.params
        for name, value in values.items():
            if str(value)[:LONGEST] != logged.get(name):
                self.client.set_tag(self.id, f"resumed.{name}", str(value)[:LONGEST])
        self.client.log_artifact(self.id, str(self.directory / "config.yaml"))

    def _log_parameters(self, values: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        items = [Param(name, str(value)[:LONGEST]) for name, value in values.items()]
        for batch in _batches(items, PARAMETERS_AT_ONCE):
            self.client.log_batch(self.id, params=batch)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        items = [Metric(_REFUSED.sub("_", name), value, now, step) for name, value in values.items()]
        for batch in _batches(items, METRICS_AT_ONCE):
            self.client.log_batch(self.id, metrics=batch)


@contextmanager
def _alone(uri: str) -> Iterator[None]:
    """Let one process at a time make a store and an experiment: the runs of a sweep start together."""
    name = f"fedcore-mlflow-{os.getuid()}-{hashlib.sha256(uri.encode()).hexdigest()[:16]}.lock"
    with (Path(tempfile.gettempdir()) / name).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
