"""fedcore: a whole run, as ``fedcore train`` does it, with its records, checkpoints, final figures and saved model.

Unfavourable: checkpoints are written every second, as by default; no peer writes any. The last round and the
total include figures that no other runner computes (such as balanced accuracy).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fedcore.tools import process


def main() -> None:
    """Train."""
    process.keep_freed_memory()  # as the command does
    with process.importing():
        import export
        from exported import Job, Stopwatch

        from fedcore import run

    job = Job.from_command_line()
    config, watch = export.config_of(job), Stopwatch(job)
    first: list[float] = []

    def notify(event: str, details: Mapping[str, Any]) -> None:
        if event == "start":
            watch.begin()
        elif event == "client" and not first:
            first.append(time.monotonic())  # a whole client later than the first batch's begin: fedcore's loss
        elif event == "round":
            metrics = details["metrics"]
            watch.round_evaluated(metrics["global"]["accuracy"] if metrics else watch.accuracy)

    run(config, notify=notify)
    watch.report(first_batch=first[0])


if __name__ == "__main__":
    main()
