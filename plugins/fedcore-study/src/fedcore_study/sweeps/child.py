"""The process of one run of a sweep: ``python -m fedcore_study.sweeps.child TASK [alone]``.

Starts the run, or goes on with it; tells the sweep what happens in JSON lines on stdout; stops with a checkpoint
at SIGINT, and when the sweep's process dies.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedcore import FedcoreError, RunConfig
from fedcore.tools import CHANGEABLE, WITHOUT_EFFECT, judged_by, process, protocols, registry
from fedcore_study.runs.deletion import delete_beginning
from fedcore_study.sweeps.processes import STOP
from fedcore_workers import early_template, unpickled

FINISHED, BUG, FAILED, STOPPED = 0, 1, 2, 130
ALONE = "alone"
"""The argument of a run whose process outlives the sweep's: a job of a cluster."""


@dataclass(frozen=True)
class Task:
    """What a run's process has to do."""

    out: str
    """The run directory. If it holds a run, that run goes on."""
    config: dict[str, Any]
    """The planned configuration."""
    workers: int | None
    """The number of worker processes, unless the configuration has one."""
    allow_code: bool = False
    allow_outside: bool = False
    judged: bool = False
    """The run tells all its rounds, and waits after each for a verdict on stdin: ``STOP`` ends it there."""
    objects: int = 0
    """The number of bytes of objects at the beginning of stdin."""

    def as_text(self) -> str:
        """Return the task as the argument of the process."""
        return json.dumps(asdict(self))


def main(arguments: Sequence[str]) -> int:
    """Run one run to its end; returns the exit code."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what plugins print is for the log

    def tell(event: str, **details: Any) -> None:
        print(json.dumps({"event": event, **details}), file=channel, flush=True)

    try:
        for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background job begins with SIGINT ignored
            signal.signal(number, signal.default_int_handler)
        task = Task(**json.loads(arguments[0]))
        objects = _objects(task.objects)
        verdicts: queue.Queue[bytes] = queue.Queue()
        with registry.lent(objects):
            planned = RunConfig.create(task.config)
            if planned.workers is None:
                planned = planned.model_copy(update={"workers": task.workers})
            with process.importing():
                from fedcore import run  # noqa: F401 - for the template, too
            with early_template(planned):  # before there are threads, so that this process can be forked
                if ALONE not in arguments:
                    threading.Thread(target=_stop_with_parent, args=(verdicts,), daemon=True).start()
                _run(task, planned, tell, verdicts)
    except _Judged:
        return FINISHED
    except KeyboardInterrupt:
        return STOPPED
    except FedcoreError as error:
        tell("error", message=str(error))
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except Exception as error:
        traceback.print_exc()
        message = f"{type(error).__name__}: {error}"
        tell("error", message=message)
        print(f"error: {message}", file=sys.stderr)
        return BUG
    return FINISHED


class _Judged(Exception):
    """The sweep's process ended the run after a round."""


def judged(config: RunConfig, row: Mapping[str, Any], most: int) -> float | None:
    """Return the figure by which runs are chosen on held-out parts; None where a run itself does not choose the round.

    :param most: the most clients that a round was evaluated on until now. The mean of fewer is over others.
    """
    if "undefined" in row or row["clients"] < most:
        return None
    value: float | None = row[judged_by(config, [] if "accuracy" in row else protocols.further(row))]
    return value


def _objects(size: int) -> dict[registry.Key, Any]:
    """Read the objects that the sweep's program gave instead of names."""
    if not size:
        return {}
    with process.importing():
        import torch  # noqa: F401 - the objects import it
    objects: dict[registry.Key, Any] = unpickled(sys.stdin.buffer.read(size), str)  # nothing travels apart
    return objects


def _run(task: Task, planned: RunConfig, tell: Any, verdicts: queue.Queue[bytes]) -> None:
    with process.importing():
        from fedcore import resume, run
        from fedcore.tools import RunDirectory, code_in, rounds, saved

    most = 0

    def notify(event: str, details: Mapping[str, Any]) -> None:
        nonlocal most
        if event == "start":
            tell("begun", round=details["round"], notes=details["notes"])
        elif event == "round":
            metrics = details["metrics"] or {}
            shown = measured(metrics, protocols.EVALUATED)
            held_out = measured(metrics, protocols.VALIDATION) if task.judged else None
            value = judged(planned, metrics[held_out], most) if held_out else None
            most = max(most, metrics[held_out]["clients"]) if held_out else most
            tell(
                "round",
                round=details["round"] + 1,
                protocol=shown,
                figure=rounds.in_short(metrics[shown]) if shown else None,
                validation=value,
                clients=len(details["cohort"]),
                lost=rounds.lost(details),
                waits=task.judged,
            )
            if task.judged and verdicts.get() == STOP:
                raise _Judged
        elif event == "note":
            tell("note", note=details["message"])
        elif event == "done" and (shown := measured(details["metrics"], protocols.EVALUATED)):
            # The model that stays may not be that of the last round: a method may correct it after the training.
            tell("done", protocol=shown, figure=rounds.in_short(details["metrics"][shown]))

    out = Path(task.out)
    begun_before = (out / "config.yaml").is_file()
    if begun_before:
        if task.judged:  # the search's process was killed, and what it heard is lost
            for record in RunDirectory.open(out).metrics.read():
                if "round" in record:
                    notify("round", record)
        # The sweep has looked at the plan; the run's own file must ask for no more than that.
        begun = RunDirectory.open(out).read_config()
        code = task.allow_code or set(code_in(begun)) <= set(code_in(planned))
        outside = task.allow_outside or (
            code and set(saved.places_in(begun, out)) <= set(saved.places_in(planned, out))
        )
        changes = {name: task.config[name] for name in CHANGEABLE.intersection(WITHOUT_EFFECT)}
        if task.config.get("workers") is None:
            del changes["workers"]  # the run keeps those that it was begun with
        if begun.rounds < planned.rounds:
            changes["rounds"] = planned.rounds
        resume(out, notify=notify, allow_code=code, allow_outside=outside, changes=changes)
        return
    if out.exists():
        delete_beginning(out)  # killed before it was a run
    run(planned.model_copy(update={"out": out}), notify=notify)


def measured(metrics: Mapping[str, Any], among: Iterable[str]) -> str | None:
    """Return the first protocol that a round has figures of; None if it was not evaluated under one."""
    return next((name for name in among if metrics.get(name)), None)


def _stop_with_parent(verdicts: queue.Queue[bytes]) -> None:
    """Pass on the verdicts of the sweep's process. When that process ends, its end of stdin closes: stop the run."""
    while verdict := os.read(0, 1):
        verdicts.put(verdict)
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    process.end_without_collecting()
    process.keep_freed_memory()
    sys.exit(main(sys.argv[1:]))
