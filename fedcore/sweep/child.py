"""The process of one run of a sweep: ``python -m fedcore.sweep.child SWEEP_DIR NAME WORKERS``.

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
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcore.errors import FedcoreError
from fedcore.sweep.directory import SweepDirectory

FINISHED, BUG, FAILED, STOPPED = 0, 1, 2, 130


def main(arguments: list[str]) -> int:
    """Run one run to its end; returns the exit code."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what plugins print is for the log

    def tell(event: str, **details: Any) -> None:
        print(json.dumps({"event": event, **details}), file=channel, flush=True)

    try:
        for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background job begins with SIGINT ignored
            signal.signal(number, signal.default_int_handler)
        threading.Thread(target=_stop_with_parent, daemon=True).start()
        folder, name, workers = arguments
        _run(SweepDirectory(Path(folder)), name, int(workers) if workers else None, tell)
    except KeyboardInterrupt:
        return STOPPED
    except FedcoreError as error:
        from fedcore.experiment import Interrupted

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


def _run(directory: SweepDirectory, name: str, workers: int | None, tell: Any) -> None:
    from fedcore import experiment

    def notify(event: str, details: Mapping[str, Any]) -> None:
        if event == "round":
            tell("round", round=details["round"] + 1)

    out = directory.run_directory(name)
    if directory.standing(name) == "stopped":
        experiment.resume(out, notify=notify)
        return
    if out.exists():
        shutil.rmtree(out)  # killed before it was a run
    config = directory.plan()[name]
    own = {"out": out, "workers": config.workers if config.workers is not None else workers}
    experiment.run(config.model_copy(update=own), notify=notify)


def _stop_with_parent() -> None:
    while os.read(0, 1):  # ends when the sweep's process does
        pass
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
