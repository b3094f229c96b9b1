"""A finished run in Python: its figures, its history and its model, with a short text and a picture for notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from fedcore.base.config import RunConfig
from fedcore.base.identity import flat, method, short_name
from fedcore.base.protocols import EVALUATED, PROTOCOLS
from fedcore.models import SplitModel
from fedcore.runs.directory import RunDirectory
from fedcore.runs.learning_curve import learning_curve


@dataclass(frozen=True, repr=False)
class RunResult:
    """A finished run."""

    metrics: dict[str, Any]
    """The final figures by protocol, as in ``summary.json``."""
    model: SplitModel
    """The global model, on the CPU, in eval mode."""
    directory: Path
    """The run directory."""
    summary: dict[str, Any]
    """The content of ``summary.json``."""
    config: RunConfig
    """The options of the run; every ``auto`` is resolved."""

    @property
    def records(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``: everything that was recorded about each round."""
        return RunDirectory(self.directory).read_metrics()

    @property
    def history(self) -> Any:
        """One row per round: losses, bytes, seconds, and the figures of every protocol if the round was evaluated.

        ``report.PLUGIN.NAME`` holds the result of a plugin's hook ``report``.

        It is a pandas DataFrame indexed by round, from 1, if pandas is installed, else a list of dictionaries.
        """
        rows = history_rows(self.records)
        try:
            pandas = import_module("pandas")
        except ImportError:
            return rows
        return pandas.DataFrame(rows).set_index("round") if rows else pandas.DataFrame()

    def __repr__(self) -> str:
        """Return one line: method, data set, rounds, final accuracy, directory."""
        figures = [f"{name} {100 * row['accuracy']:.2f} %" for name, row in evaluated(self.metrics).items()]
        accuracy = f", accuracy: {', '.join(figures)}" if figures else ""
        return f"<RunResult {headline(self.config)}, {self.summary['rounds']} rounds{accuracy}; {self.directory}>"

    def _repr_html_(self) -> str:
        """Return the final figures and the learning curve, for a notebook."""
        rows = []
        for name, row in evaluated(self.metrics).items():
            loss = "-" if row["loss"] is None else f"{row['loss']:.4f}"
            cells = [name, PROTOCOLS[name].heading, f"{100 * row['accuracy']:.2f}", loss]
            rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
        table = "<table><tr><th>protocol</th><th>of what</th><th>accuracy %</th><th>loss</th></tr>" + "".join(rows)
        return (
            f"<p><b>{html.escape(headline(self.config))}</b>, {self.summary['rounds']} rounds, "
            f"{self.summary['seconds']:.1f} s</p>{table}</table>"
            f"{learning_curve(accuracies(self.records), self.config.rounds)}"
            f"<p><code>{html.escape(str(self.directory))}</code></p>"
        )


def headline(config: RunConfig) -> str:
    """Return a run in a few words: ``moon+fedprox on digits``."""
    return f"{method({short_name(name): None for name in config.plugins})} on {short_name(config.dataset)}"


def evaluated(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rows of a run's metrics that are figures of a protocol."""
    return {name: metrics[name] for name in PROTOCOLS if metrics.get(name)}


def accuracies(records: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return pairs of a round (from 1) and an accuracy for every protocol that was evaluated in rounds."""
    found: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name in EVALUATED if record.get("metrics") else ():
            row = record["metrics"].get(name)
            if row:
                found.setdefault(name, []).append((record["round"] + 1, row["accuracy"]))
    return found


def history_rows(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rounds of ``metrics.jsonl`` as flat rows. Values that a round does not have are left out."""
    rows = []
    for record in records:
        if "round" not in record:
            continue  # the record of post_train
        row: dict[str, Any] = {"round": record["round"] + 1}
        row |= {f"loss.{name}": value for name, value in record["losses"].items()}
        for name, figures in evaluated(record.get("metrics") or {}).items():
            for key in ("accuracy", "loss", "std", "worst10"):
                if figures.get(key) is not None:
                    row[f"{name}.{key}"] = figures[key]
        row["clients"], row["failed"] = len(record["cohort"]), len(record["failures"])
        row |= {"bytes.down": record["bytes"]["down"], "bytes.up": record["bytes"]["up"]}
        row |= {f"report.{path}": value for path, value in flat(record.get("reports", {}), ".")}
        row["seconds"] = sum(record["time"][part] for part in ("round", "evaluation") if part in record["time"])
        rows.append(row)
    return rows
