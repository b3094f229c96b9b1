"""TensorBoard: event files in the run directory, so that ``tensorboard --logdir runs`` shows every run."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import Field

from fedcore.tools import safe_yaml
from fedcore_trackers.base import Status, TrackedRun, Tracker, TrackerOptions, requires
from fedcore_trackers.scalars import parameters, round_scalars, scalars


class TensorBoardOptions(TrackerOptions):
    """Options of the tracker ``tensorboard``."""

    dir: Path | None = Field(
        default=None,
        description="Folder that gets a folder of event files per run; default tensorboard/ in the run directory.",
    )


class TensorBoard(Tracker):
    """Event files for TensorBoard: scalars by protocol, loss and sender, the configuration as text and hparams."""

    Options = TensorBoardOptions

    def start(self, run: TrackedRun) -> None:
        """Open a file of events. It replaces the coming rounds in earlier files."""
        with requires("tensorboard"):
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.plugins.hparams.summary_v2 import hparams_pb
            from tensorboard.summary.writer.record_writer import RecordWriter
        self.writer = RecordWriter(_new_file(self.options.dir, run))
        self._write(Event(file_version="brain.Event:2", wall_time=time.time()))
        if run.round:
            began = Event(session_log=SessionLog(status=SessionLog.START), step=run.round + 1, wall_time=time.time())
            self._write(began)
        else:
            values = safe_yaml.write_yaml(run.config.model_dump(mode="json"))
            self._add(_text("config", f"```yaml\n{values}```"), 0)
            plain = {name: value for name, value in parameters(run.config).items() if isinstance(value, _PLAIN)}
            self._add(hparams_pb(plain, trial_id=run.name, start_time_secs=time.time()), 0)
        self.writer.flush()

    def round(self, record: Mapping[str, Any]) -> None:
        """Add a round's losses, bytes and seconds."""
        self._add_scalars(round_scalars(record), record["round"] + 1)

    def evaluation(self, round: int, metrics: Mapping[str, Any]) -> None:
        """Add the figures of the protocols."""
        self._add_scalars(scalars(metrics), round + 1)

    def finish(self, status: Status, summary: Mapping[str, Any] | None) -> None:
        """Add the final figures, and close."""
        if summary is not None:
            self._add_scalars(scalars(summary["metrics"], "final/"), summary["rounds"])
        self.writer.close()

    def _add_scalars(self, values: Mapping[str, float], step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._add(Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]), step)
        self.writer.flush()

    def _add(self, summary: Any, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._write(Event(summary=summary, step=step, wall_time=time.time()))

    def _write(self, event: Any) -> None:
        self.writer.write(event.SerializeToString())


def _new_file(chosen: Path | None, run: TrackedRun) -> BinaryIO:
    """Make a file of events. Microseconds in its name: TensorBoard reads a folder's files in the order of names."""
    folder = chosen / run.name if chosen else run.directory / "tensorboard"
    folder.mkdir(parents=True, exist_ok=True)
    name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
    return (folder / name).open("xb")


_PLAIN = (bool, int, float, str)


def _text(tag: str, text: str) -> Any:
    """Return a summary for TensorBoard's page of texts, which are drawn as Markdown."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.text.metadata import create_summary_metadata
    from tensorboard.util.tensor_util import make_tensor_proto

    metadata = create_summary_metadata(display_name="", description="")
    return Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=make_tensor_proto([text.encode()]))])
