"""The process of one run of a sweep: ``python -m fedcore_study.sweep.child SWEEP_DIR NAME WORKERS [FLAG ...]``.

Starts the run, or goes on with it; tells the sweep what happens in JSON lines on stdout; stops with a checkpoint
at SIGINT, and when the sweep's process dies.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcore import FedcoreError
from fedcore.base.process import end_without_collecting, importing, keep_freed_memory
from fedcore_study.sweep.directory import SweepDirectory

FINISHED, BUG, FAILED, STOPPED = 0, 1, 2, 130
ALONE = "alone"
"""The argument of a run whose process outlives the sweep's: a job of a cluster."""

GRACE = 60.0
"""Seconds for a run to stop with a checkpoint when the sweep's process is gone."""


def main(arguments: list[str]) -> int:
    """Run one run to its end; returns the exit code."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what plugins print is for the log

    def tell(event: str, **details: Any) -> None:
        print(json.dumps({"event": event, **details}), file=channel, flush=True)

    try:
        for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background job begins with SIGINT ignored
            signal.signal(number, signal.default_int_handler)
        folder, name, workers, *allowed = arguments
        if ALONE not in allowed:
            threading.Thread(target=_stop_with_parent, daemon=True).start()
        _run(SweepDirectory(Path(folder)), name, int(workers) if workers else None, allowed, tell)
    except KeyboardInterrupt:
        return STOPPED
    except FedcoreError as error:
        from fedcore import Interrupted

        if isinstance(error, Interrupted):
            return STOPPED
        tell("error", message=str(error))
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except Exception as error:
        traceback.print_exc()
        tell("error", message=f"{type(error).__name__}: {error}")
        return BUG
    return FINISHED


def _run(directory: SweepDirectory, name: str, workers: int | None, allowed: Sequence[str], tell: Any) -> None:
    with importing():
        from fedcore.runs import experiment
    from fedcore.runs.directory import RunDirectory
    from fedcore.runs.saved import code_in, places_in

    def notify(event: str, details: Mapping[str, Any]) -> None:
        if event == "round":
            tell("round", round=details["round"] + 1)
        elif event == "note":
            tell("note", note=details["message"])

    out, planned = directory.run_directory(name), directory.plan()[name]
    if directory.standing(name) == "stopped":
        # The sweep has looked at the plan; the run's own file must ask for no more than that.
        begun = RunDirectory.open(out).read_config()
        code = "code" in allowed or set(code_in(begun)) <= set(code_in(planned))
        outside = "outside" in allowed or (code and set(places_in(begun, out)) <= set(places_in(planned, out)))
        experiment.resume(out, notify=notify, allow_code=code, allow_outside=outside)
        return
    if out.exists():
        shutil.rmtree(out)  # killed before it was a run
    own = {"out": out, "workers": planned.workers if planned.workers is not None else workers}
    experiment.run(planned.model_copy(update=own), notify=notify)


def _stop_with_parent() -> None:
    while os.read(0, 1):  # ends when the sweep's process does
        pass
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(GRACE)
    os._exit(STOPPED)  # stuck, on a dead disk perhaps; the last checkpoint is whole


if __name__ == "__main__":
    end_without_collecting()
    keep_freed_memory()
    sys.exit(main(sys.argv[1:]))
