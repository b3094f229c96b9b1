"""Comparisons as data frames of pandas, with a row per method or per run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas

from fedcore_study.comparisons.comparison import Comparison
from fedcore_study.comparisons.costs import EACH, seconds_per_round
from fedcore_study.comparisons.fairness import FIGURES
from fedcore_study.comparisons.formats import client_names, metric_names, notes_of, plain_rows
from fedcore_study.comparisons.groups import group_runs, option, relabelled
from fedcore_study.comparisons.records import RunRecord
from fedcore_study.lenient import number
from fedcore_study.words import named

DIFFERENCE = {
    "difference_mean": "difference",
    "difference_low": "difference_low",
    "difference_high": "difference_high",
    "difference_n": "difference_seeds",
    "p": "p",
    "p_holm": "p_holm",
    "verdict": "verdict",
    "seeds_needed": "seeds_needed",
}
"""Column of a CSV file -> column of a frame, for a difference."""


def of_methods(comparison: Comparison) -> pandas.DataFrame:
    """Return one row per method and table. The index has the settings in which tables differ, and the method."""
    figure = comparison.measure.name
    names = {f"{figure}_mean": f"{figure}_mean", f"{figure}_std": f"{figure}_std", f"{figure}_n": "seeds", **DIFFERENCE}
    names["seconds_mean"] = "seconds"
    names |= {f"cost_{name}_mean": f"cost_{name}" for name in EACH[1:]}
    if comparison.target is not None:
        virtual = any(row.virtual for block in comparison.blocks for row in block.rows)
        for cost in ("rounds", "bytes", *(["virtual_seconds"] if virtual else [])):
            names[f"{cost}_mean"] = f"{cost}_to_target"
        names["rounds_n"] = "seeds_at_target"
    if comparison.by_client:
        names |= {f"clients_{name}_mean": f"clients_{name}" for name in FIGURES}
    names |= {f"client_{name}_mean": f"client_{name}" for name in client_names(comparison.blocks)}
    names |= {f"{name}_mean": name for name in comparison.reported}
    for name in metric_names(comparison.blocks):
        names |= {f"metric_{name}_mean": f"{name}_mean", f"metric_{name}_std": f"{name}_std"}
    rows = plain_rows(comparison)
    frame = pandas.DataFrame(rows)[list(names)].rename(columns=names)
    words = [short for short in names.values() if short != "verdict"]
    frame[words] = frame[words].astype(float)
    for counted in ("seeds", "difference_seeds", "seeds_needed"):
        frame[counted] = frame[counted].astype("Int64")  # whole numbers, some of them missing
    shown = list(dict.fromkeys(name for block in comparison.blocks for name in block.settings))
    if shown:
        index = [(*(row[name] for name in shown), row["row"]) for row in rows]
        frame.index = pandas.MultiIndex.from_tuples(index, names=[*shown, comparison.heading])
    else:
        frame.index = pandas.Index([row["row"] for row in rows], name=comparison.heading)
    frame.attrs = {
        "findings": [
            f"{named(block.settings)}: {sentence}" if shown else sentence
            for block in comparison.blocks
            for sentence in block.findings
        ],
        "notes": comparison.notes,
        "ranks": dict(comparison.ranks.average) if comparison.ranks else {},
    }
    if comparison.ranks:
        frame.attrs["findings"].append(str(comparison.ranks))
    return frame


def of_protocols(comparisons: Sequence[Comparison]) -> pandas.DataFrame:
    """Return :func:`of_methods` of one comparison; of several, below each other, the protocol first in the index."""
    if len(comparisons) == 1:
        return of_methods(comparisons[0])
    frames = {comparison.protocol: of_methods(comparison) for comparison in comparisons}
    joined = pandas.concat(frames, names=["protocol"])
    joined.attrs = {
        "findings": [f"{name}: {finding}" for name, frame in frames.items() for finding in frame.attrs["findings"]],
        "notes": notes_of(comparisons),
        "ranks": {name: frame.attrs["ranks"] for name, frame in frames.items()},
    }
    return joined


def of_runs(
    runs: Sequence[RunRecord],
    by: Sequence[str],
    protocol: str,
    round: int | None,
    asked: Sequence[str],
    *,
    tuned: Sequence[str] = (),
    labels: Mapping[str, str],
) -> pandas.DataFrame:
    """Return one row per run, in long form: settings in which runs differ, method, seed, figures, costs, directory.

    :param runs: each has the figure by which it is compared.
    :param asked: further figures of the protocol, and ``PLUGIN.NAME`` of plugins' reports.
    """
    fields = [option(name) for name in by]
    method = ", ".join("method" if field == "plugins" else name for name, field in zip(by, fields, strict=True))
    rows: list[dict[str, Any]] = []
    for group in relabelled(group_runs(runs, fields, tuned)[1], labels):
        for label, runs_of_row in group.rows.items():
            for run in sorted(runs_of_row, key=lambda run: run.config.seed):
                point = run.at(protocol, round)
                assert point is not None
                cost = {"rounds": point.rounds, "bytes": point.bytes, "seconds": seconds_per_round(run, round)}
                figures: dict[str, Any] = {"seed": run.config.seed, run.figure: point.value}
                row = run.figures(protocol, round)
                figures |= {n: run.reported(n, round) if "." in n else number(row.get(n)) for n in asked}
                figures |= {**run.metrics(protocol, round), **cost, "directory": str(run.path)}
                rows.append({**group.settings, method: label, **figures})
    return pandas.DataFrame(rows)
