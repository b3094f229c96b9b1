"""``sweep --optuna``: a search in place of a grid."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from fedcore.tools import SOME_FAILED, output
from fedcore_study.search import BEST, SearchResult, Trial, check_search, parse_search, search
from fedcore_study.sweeps.spec import SweepSpec
from fedcore_study.words import shown


def run_search(
    spec: SweepSpec,
    texts: Sequence[str],
    trials: int,
    out: Path,
    *,
    parallel: int | None,
    as_json: bool,
    quiet: bool,
    dry_run: bool,
) -> None:
    """Run a search and print its trials."""
    axes = [parse_search(text) for text in texts]
    if dry_run:
        check_search(spec, axes)
        output.note(f"{trials} trials of {', '.join(axis.name for axis in axes)}, none started")
        return

    noted = set[str]()

    def listen(number: int, event: str, details: Mapping[str, Any]) -> None:
        if event == "note":
            if (note := details["message"]) not in noted:
                noted.add(note)
                output.note(f"trial {number}: {note}")
            return
        if quiet:
            return
        news = details.get("options") or details.get("message") or details["best"]
        if isinstance(news, Mapping):
            news = ", ".join(f"{name} {shown(value)}" for name, value in news.items())
        output.stderr().print(output.text(f"trial {number} {event}: {news}"), soft_wrap=True)

    result = search(spec, axes, trials, out, listen=listen, parallel=parallel)
    if as_json:
        output.print_json(_plain(result))
    else:
        output.stdout().print(_table(result))
        if result.best is not None:
            file = shlex.quote(str(result.directory / BEST))
            output.line(f"the best options are in {file}: fedcore train --config {file}")
    if any(trial.state == "fail" for trial in result.trials):
        raise typer.Exit(SOME_FAILED)


def _table(result: SearchResult) -> Table:
    names = list(dict.fromkeys(name for trial in result.trials for name in trial.options))
    measure = result.measure
    seeds = len(result.trials[0].directories) if result.trials else 1
    over = f", mean of {seeds} seeds" if seeds > 1 else ""
    table = Table("trial", f"{measure.name} on held-out parts{over}", "state", *names)

    def rank(trial: Trial) -> float:
        return math.inf if trial.state != "complete" or trial.value is None else -measure.sign * trial.value

    for trial in sorted(result.trials, key=rank):
        value = "-" if trial.value is None else measure.printed(trial.value)
        table.add_row(str(trial.number), value, trial.state, *(shown(trial.options.get(name, "-")) for name in names))
    return table


def _plain(result: SearchResult) -> dict[str, Any]:
    trials = [
        {
            "trial": t.number,
            "state": t.state,
            result.measure.name: t.value,
            "options": dict(t.options),
            "run_dir": str(t.directory),
            "run_dirs": list(map(str, t.directories)),
        }
        for t in result.trials
    ]
    return {"sweep_dir": str(result.directory), "trials": trials, "best": result.best.number if result.best else None}
