"""Figures of a run from the records of its rounds: accuracies, participation, seconds, bytes. It imports no torch."""

from __future__ import annotations

import resource
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fedcore.base.identity import flat
from fedcore.base.output import clean, percent
from fedcore.base.protocols import PROTOCOLS, figure_of, further

SIMULATED = ("unavailable", "dropped", "deadline")
"""The kinds of failures that the simulated system produces. They are results, not errors."""


def evaluated(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rows of a run's metrics that are figures of a protocol."""
    return {name: metrics[name] for name in PROTOCOLS if metrics.get(name)}


def percentages(record: Mapping[str, Any]) -> dict[str, str]:
    """Return a round's figures as :func:`in_short` writes them, by protocol; empty without an evaluation."""
    return {name: in_short(row) for name, row in evaluated(record["metrics"] or {}).items()}


def in_short(row: Mapping[str, Any]) -> str:
    """Return the figure of a protocol by which models are compared: ``93.06 %``, or of another task ``rmse 2.089``."""
    name = figure_of(row)
    if name == "accuracy":
        return f"{percent(row[name])} %"
    return f"{name} {'undefined' if row[name] is None else format(row[name], '.4g')}"


def losses(record: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the losses of a round by name, the task's loss first."""
    return sorted(record["losses"].items(), key=lambda item: (item[0] != "task", item[0]))


def failures(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line per kind of failure, with the number of clients and the first message, without simulated ones."""
    kinds = Counter(failure["kind"] for failure in record["failures"] if failure["kind"] not in SIMULATED)
    for kind, count in kinds.items():
        first = next(failure for failure in record["failures"] if failure["kind"] == kind)
        others = f" and {count - 1} more" if count > 1 else ""
        yield clean(f"client {first['client']}{others} failed ({kind}): {first['message']}")


def history_rows(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rounds of ``metrics.jsonl`` as flat rows. Values that a round does not have are left out."""
    rows = []
    for record in records:
        if "round" not in record:
            continue  # the record of post_train
        row: dict[str, Any] = {"round": record["round"] + 1, "lr": record["lr"]}
        row |= {f"loss.{name}": value for name, value in record["losses"].items()}
        for name, figures in evaluated(record.get("metrics") or {}).items():
            for key in ("accuracy", "loss", "std", "worst10", *further(figures)):
                if figures.get(key) is not None:
                    row[f"{name}.{key}"] = figures[key]
        row["clients"], row["failed"] = len(record["cohort"]), lost(record).total()
        row |= {"bytes.down": record["bytes"]["down"], "bytes.up": record["bytes"]["up"]}
        row |= {f"report.{path}": value for path, value in flat(record.get("reports", {}), ".")}
        row["seconds"] = seconds(record)
        rows.append(row)
    return rows


def seconds(record: Mapping[str, Any]) -> float:
    """Return the seconds of a round, its evaluation included."""
    return float(sum(record["time"].get(part, 0.0) for part in ("round", "evaluation")))


def may_be_unsaved(rounds: int, every: int | None) -> bool:
    """Return whether a killed run can have recorded so many rounds before its first checkpoint was on the disk.

    :param every: ``checkpoint_every``. A checkpoint is written while the rounds up to the next one train.
    """
    return rounds <= 2 * (every or 1)


def failed_trainings(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the failures of a round's cohort, without answers to questions that failed."""
    cohort = set(record["cohort"])
    return [failure for failure in record["failures"] if failure["client"] in cohort and "question" not in failure]


def lost(record: Mapping[str, Any]) -> Counter[str]:
    """Return the number of selected clients without an update in a round, by kind. Each client counts once."""
    return Counter(sorted({failure["client"]: failure["kind"] for failure in failed_trainings(record)}.values()))


def errors(lost: Mapping[str, int]) -> int:
    """Return how many of a round's losses, counted by kind, the simulated system did not make."""
    return sum(number for kind, number in lost.items() if kind not in SIMULATED)


def first_reason(record: Mapping[str, Any]) -> str:
    """Return why the first client of a round's cohort failed; empty if only the simulated system lost clients."""
    messages = (failure["message"] for failure in failed_trainings(record) if failure["kind"] not in SIMULATED)
    return str(next(messages, ""))


class Failures:
    """The failed trainings and answers of the rounds that this process ran, without simulated losses."""

    def __init__(self) -> None:
        self._rounds: list[int] = []  # the first and the last
        self._selected = self._failed = self._unanswered = 0
        self._first = self._first_answer = ""

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a round."""
        self._rounds = [*self._rounds[:1], record["round"] + 1]
        self._selected += len(record["cohort"])
        self._failed += errors(lost(record))
        self._first = self._first or first_reason(record)
        for failure in record["failures"]:
            if "question" in failure:
                self._unanswered += 1
                self._first_answer = self._first_answer or failure["message"]

    def in_words(self) -> str:
        """Return how many failed, with the first reasons; empty if none failed."""
        sentences = []
        if self._failed:
            sentences.append(
                f"{self._failed} of {self._selected} trainings of clients failed in rounds {self._rounds[0]} to "
                f"{self._rounds[-1]}, so the figures come from the others. The first: {self._first}"
            )
        if self._unanswered:
            sentences.append(f"Answers to questions that failed: {self._unanswered}. The first: {self._first_answer}")
        return "\n".join(sentences)


def in_words(selected: int, accepted: int, partial: int, losses: Mapping[str, int]) -> str:
    """Return the participation as a short text: ``5 of 8 clients (1 partial; 2 dropped)``."""
    parts = [f"{partial} partial"] if partial else []
    if losses:
        parts.append(", ".join(f"{count} {kind}" for kind, count in losses.items()))
    notes = "; ".join(parts)
    return f"{accepted} of {selected} clients" + (f" ({notes})" if notes else "")


def not_evaluated(metrics: Mapping[str, Any]) -> str:
    """Return how many clients an evaluation left out, with the first reason; empty if it left out none."""
    if not (failures := metrics.get("failures") or []):
        return ""
    others = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
    left_out = f"client {failures[0]['client']}{others} could not be evaluated by every protocol"
    return f"{left_out}: {failures[0]['message']}"


def undefined(metrics: Mapping[str, Any]) -> str:
    """Return for how many samples an evaluation has no prediction; empty if it has one for each."""
    parts = [f"{row['undefined']} in {name}" for name, row in evaluated(metrics).items() if "undefined" in row]
    if not parts:
        return ""
    return (
        f"samples for which the model's output is nan or infinite: {', '.join(parts)}. They count as wrong, and "
        "--metric has no figure with them"
    )


class RoundTimes:
    """The seconds of the rounds that this process ran, by part; see :func:`~fedcore.server.round.run_round`.

    ``checkpoint`` is the time for which the round waited for the previous checkpoint, which is written while the round
    trains. ``client_seconds`` and ``idle_workers`` are summed over the workers.
    """

    def __init__(self) -> None:
        self.rounds = 0
        self._seconds: Counter[str] = Counter()
        self._plugins: Counter[str] = Counter()

    def add(self, seconds: Mapping[str, Any]) -> None:
        """Add a round: seconds by part, and by plugin under ``plugin_terms``."""
        self.rounds += 1
        self._seconds.update({part: spent for part, spent in seconds.items() if part != "plugin_terms"})
        self._plugins.update(seconds["plugin_terms"])

    def split(self, workers: int) -> dict[str, Any]:
        """Return the mean seconds per round by part, the rounds, the workers, and the peak of memory in MiB."""
        means: dict[str, Any] = {part: total / self.rounds for part, total in self._seconds.items()}
        means["plugin_terms"] = {name: total / self.rounds for name, total in sorted(self._plugins.items())}
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "darwin" else 1)
        return {"per_round": means, "rounds": self.rounds, "workers": workers, "peak_memory_mib": kilobytes / 1024}


def per_round(ledger: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Return a ledger's totals and its counts by sender, divided by the number of rounds."""

    def each(counts: Mapping[str, Any]) -> dict[str, Any]:
        return {direction: counts[direction] / rounds for direction in ("down", "up")}

    return {**each(ledger), "by_plugin": {sender: each(counts) for sender, counts in ledger["by_plugin"].items()}}
