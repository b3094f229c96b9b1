"""Processes side by side, a few at a time: started, listened to, stopped. Knows nothing of runs."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

GO, STOP = b"g", b"s"
"""Verdicts."""

Inbox: TypeAlias = "queue.Queue[tuple[_Process, dict[str, Any] | None]]"
Listener = Callable[[str, str, Mapping[str, Any]], Any]
"""Called with a job's name, an event's name and its details.

After an event that ``waits``, the job gets a verdict: ``STOP`` if the listener returned False, else ``GO``.
"""


Start = Callable[[Sequence[str], int], Any]
"""Starts a job's process from its arguments and the log's descriptor. Returns a ``subprocess.Popen`` or alike."""


@dataclass(frozen=True)
class Job:
    """A process to be run; its stderr goes to ``log``, each line of its stdout is a JSON event."""

    name: str
    arguments: list[str]
    log: Path
    sent: bytes = field(default=b"", repr=False)
    """What its stdin begins with."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job; ``message`` says why it failed."""

    name: str
    status: Literal["finished", "failed", "stopped", "waiting"]
    seconds: float = 0.0
    message: str = ""


class _Process:
    """A running job. It ends by itself when this process dies: its stdin closes."""

    def __init__(self, job: Job, inbox: Inbox, start: Start) -> None:
        self.job, self.inbox = job, inbox
        self.began = time.monotonic()
        self.message = ""
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("ab") as log:
            self.process = start(job.arguments, log.fileno())
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        self.say(self.job.sent)
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):  # a kill cut the line off
                self.inbox.put((self, json.loads(line)))
        self.process.wait()
        self.inbox.put((self, None))

    def say(self, content: bytes) -> None:
        """Write to the stdin. Long content waits while the process imports: a pipe holds little."""
        with contextlib.suppress(OSError):  # it has ended
            self.process.stdin.write(content)
            self.process.stdin.flush()

    def outcome(self, stopping: bool) -> Outcome:
        code = self.process.wait()
        seconds = time.monotonic() - self.began
        with contextlib.suppress(OSError):  # it ended before it read everything
            self.process.stdin.close()
        self.process.stdout.close()
        if code == 0:
            return Outcome(self.job.name, "finished", seconds)
        if stopping:
            return Outcome(self.job.name, "stopped", seconds)
        return Outcome(self.job.name, "failed", seconds, self.message or _how_it_ended(code, self.job.log))


def run_jobs(jobs: Iterable[Job], parallel: int, listen: Listener, start: Start) -> tuple[list[Outcome], bool]:
    """Run jobs, at most ``parallel`` at a time, in their order; one that fails does not stop the others.

    The first Ctrl-C asks the running ones to stop, the second kills them; no further one is started.

    :returns: the outcomes in the jobs' order, and whether it was interrupted.
    """
    waiting, running = deque(jobs), set[_Process]()
    outcomes = {job.name: Outcome(job.name, "waiting") for job in waiting}
    inbox: Inbox = queue.Queue()
    interrupts = 0
    try:
        while running or (waiting and not interrupts):
            try:
                while waiting and len(running) < parallel and not interrupts:
                    job = waiting.popleft()
                    running.add(_Process(job, inbox, start))
                    listen(job.name, "start", {})
                process, event = inbox.get()
                if event is not None:
                    process.message = str(event.get("message", process.message))
                    going = listen(process.job.name, str(event.get("event", "")), event)
                    if event.get("waits"):
                        process.say(STOP if going is False else GO)
                    continue
                running.discard(process)
                outcome = process.outcome(bool(interrupts))
                outcomes[outcome.name] = outcome
                listen(outcome.name, outcome.status, {"seconds": outcome.seconds, "message": outcome.message})
            except KeyboardInterrupt:
                interrupts += 1
                for process in running:
                    process.process.send_signal(signal.SIGINT if interrupts == 1 else signal.SIGKILL)
    finally:
        for process in running:  # an error of our own: nothing is left behind
            process.process.send_signal(signal.SIGKILL)
    return list(outcomes.values()), bool(interrupts)


def _how_it_ended(code: int, log: Path) -> str:
    if code < 0:
        hint = " (out of memory? lower --parallel)" if -code == signal.SIGKILL else ""
        return f"its process was killed by {signal.Signals(-code).name}{hint}; see {log}"
    return f"its process ended with exit code {code}; see {log}"
