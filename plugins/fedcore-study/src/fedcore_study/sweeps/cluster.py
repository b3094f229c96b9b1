"""Submit the runs of a sweep as jobs with submitit: to SLURM, or to this machine, to try it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedcore import ConfigError
from fedcore.tools import files, process
from fedcore_study.sweeps.child import ALONE, STOPPED
from fedcore_study.sweeps.processes import Job, Listener, Outcome
from fedcore_study.sweeps.warm import CHILD

POLL = 1.0
"""Seconds between two looks at the submitted jobs; submitit asks SLURM itself less often."""

ENDS_WITHIN = 60.0
"""Seconds that SLURM has to end a job after a signal; its KillWait is 30 by default."""


class RunOnNode:
    """A run as a job. submitit pickles it, calls it on the node, and asks it for ``checkpoint`` at the time limit."""

    def __init__(self, arguments: Iterable[str]) -> None:
        self.command = process.python_command(CHILD, *arguments, ALONE)
        self.path = process.search_path()

    def __call__(self) -> None:
        """Train in a process that has the job's own environment: there SLURM names the job's GPUs.

        :raises RuntimeError: it did not finish. After a signal this waits for the end of the job: SLURM sends a signal
            to all processes of a job, and may put the job back into the queue. Then the run has not failed.
        """
        environment = {**os.environ, "PYTHONPATH": self.path}
        code = subprocess.run(self.command, env=environment, check=False).returncode  # noqa: S603 - our own module
        if code < 0 or code == STOPPED:
            time.sleep(ENDS_WITHIN)
        if code:
            raise RuntimeError(f"the run ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}")

    def checkpoint(self) -> Any:
        """Return what submitit puts back into the queue: the same run, which goes on from its own checkpoint."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def submit_jobs(
    jobs: Iterable[Job],
    cluster: str,
    folder: Path,
    *,
    parallel: int,
    parameters: Mapping[str, Any],
    listen: Listener,
) -> tuple[list[Outcome], bool]:
    """Submit jobs, at most ``parallel`` at a time, and wait for them. Returns what :func:`run_jobs` returns.

    Ctrl-C cancels the submitted ones; SLURM ends them by SIGTERM, at which a run stops with a checkpoint.

    :param cluster: ``slurm`` or ``local``.
    :param folder: for submitit's files, which the nodes see as well.
    :param parameters: of submitit's executor, such as ``slurm_partition`` and ``timeout_min``.
    :raises ConfigError: submitit is not installed, there is no SLURM, or a parameter that it does not have.
    """
    if importlib.util.find_spec("submitit") is None:
        raise ConfigError("--submit needs submitit, which is not installed: pip install submitit")
    import submitit

    try:
        executor = submitit.AutoExecutor(folder=folder / "%j", cluster=cluster)
        executor.update_parameters(**parameters)
    except (NameError, TypeError, RuntimeError) as error:
        raise ConfigError(f"--submit {cluster}: {error}") from error
    waiting, running = deque(jobs), dict[str, tuple[Any, float]]()
    outcomes = {job.name: Outcome(job.name, "waiting") for job in waiting}
    places = dict.fromkeys(outcomes, 0)  # how far the outputs of the jobs were read
    interrupted = False

    def end(outcome: Outcome) -> None:
        outcomes[outcome.name] = outcome
        listen(outcome.name, outcome.status, {"seconds": outcome.seconds, "message": outcome.message})

    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                job = waiting.popleft()
                listen(job.name, "start", {})
                try:
                    running[job.name] = executor.submit(RunOnNode(job.arguments)), time.monotonic()
                except RuntimeError as error:  # sbatch refuses it: no such partition, too many jobs of this user
                    end(Outcome(job.name, "failed", message=f"it could not be submitted: {str(error).strip()}"))
            time.sleep(POLL)
            for name, (handle, began) in list(running.items()):
                done = handle.done()
                events, places[name] = _told(handle.paths.stdout, places[name])
                for event in events:
                    listen(name, str(event.get("event")), event)
                if done:
                    del running[name]
                    end(_outcome(name, handle, time.monotonic() - began))
    except KeyboardInterrupt:
        interrupted = True
        for name, (handle, began) in running.items():
            handle.cancel(check=False)
            outcomes[name] = Outcome(name, "stopped", time.monotonic() - began)
    return list(outcomes.values()), interrupted


def _told(output: Path, place: int) -> tuple[list[dict[str, Any]], int]:
    """Return the events in a job's output after a place, and the place of the next look. submitit writes there, too."""
    events, whole = [], b""
    with contextlib.suppress(OSError), output.open("rb") as file:  # the job has not begun
        file.seek(place)
        content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
    for line in whole.splitlines():
        with contextlib.suppress(ValueError):
            events.append(files.parse_record(line))
    return events, place + len(whole)


def _outcome(name: str, handle: Any, seconds: float) -> Outcome:
    error = handle.exception()
    if error is None:
        return Outcome(name, "finished", seconds)
    prefix = "error: "
    messages = [line.removeprefix(prefix) for line in (handle.stderr() or "").splitlines() if line.startswith(prefix)]
    message = messages[-1] if messages else _reason(str(error))
    return Outcome(name, "failed", seconds, f"{message}; see {handle.paths.stderr}")


def _reason(text: str) -> str:
    """Return the reason in what submitit says of a failed job: the end of the job's traceback, or the job's state."""
    head, *traceback = text.split("-" * 22, 2)
    if len(traceback) == 2 and head.startswith("Job (task="):
        return traceback[0].strip().splitlines()[-1]
    return " ".join(head.split("\n", 2)[:2])
