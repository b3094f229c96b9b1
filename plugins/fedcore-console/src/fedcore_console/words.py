"""Where a run stands, for displays that are redrawn."""

from __future__ import annotations

from fedcore.tools import Progress


def completed(run: Progress) -> float:
    """Return the rounds that are done, and the share of the next one's clients that have answered."""
    return min(run.rounds, run.done + min(1.0, run.clients / max(1, run.cohort)))


def doing(run: Progress) -> str:
    """Return a run's present activity in a few words."""
    if run.ending or run.directory is None:
        return run.ending or "starting"
    if run.done >= run.rounds:
        return "finishing"
    if run.clients >= run.cohort:
        return f"round {run.done + 1}: evaluating"
    failed = f", {run.failed} failed" if run.failed else ""
    return f"round {run.done + 1}: {run.clients}/{run.cohort} clients{failed}"


def stopwatch(seconds: float) -> str:
    """Return a running time: ``0:07``, ``1:02:03``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
