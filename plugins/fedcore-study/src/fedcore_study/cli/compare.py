"""``compare``: runs and sweeps as one table."""

from __future__ import annotations

from typing import Annotated

import typer

from fedcore import ConfigError, UnknownNameError
from fedcore.tools import PROTOCOLS, options, output
from fedcore_study.cli import shared


def compare(
    runs: shared.Runs,
    protocol: Annotated[str, typer.Option(help=f"One of {', '.join(PROTOCOLS)}.")] = "global",
    metric: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="The figure to compare: accuracy, loss, a metric of the runs (macro-f1, module:mine.Top2); over "
            "clients macro-f1_mean, mean, std, worst10, best10.",
        ),
    ] = "accuracy",
    by: shared.By = None,
    tuned: shared.Tuned = None,
    label: shared.Labels = None,
    baseline: shared.Baseline = None,
    target: Annotated[
        float | None, typer.Option(metavar="ACCURACY", help="Count rounds and bytes to this accuracy [0 < x <= 1].")
    ] = None,
    at_round: Annotated[
        int | None,
        typer.Option("--round", min=1, help="Compare after so many rounds, unfinished runs too; default at the end."),
    ] = None,
    confidence: Annotated[float, typer.Option(help="Of the differences' intervals.")] = 0.95,
    clients: Annotated[
        bool,
        typer.Option(
            "--clients",
            help="Show, in place of costs, the spread over clients: mean, std, worst and best 10 %, variance, Jain. "
            "Needs a --protocol that clients measure.",
        ),
    ] = False,
    reported: shared.Reported = None,
    form: Annotated[
        str, typer.Option("--format", metavar="|".join(shared.TABLE_FORMATS), help="How to print it.")
    ] = "table",
    latex: Annotated[
        bool, typer.Option("--latex", help="A table for a paper (booktabs), the best in bold; as --format latex.")
    ] = False,
    wide: Annotated[
        bool, typer.Option("--wide", help="One table: a row per method, a column per data set, partition or setting.")
    ] = False,
    debug: options.Debug = False,
) -> None:
    """Compare methods over seeds: mean and deviation, the paired difference to a baseline, cost to reach a target.

    Runs of other data, partitions or settings have a separate table and are never averaged with these.
    The difference is paired by seed; its interval, from 3 seeds on, is Student's t. Whether a method is better or
    worse than the baseline is decided by paired t-tests, corrected by Holm for all comparisons of a table.
    """
    form = "latex" if latex else form
    if form not in shared.TABLE_FORMATS:
        raise UnknownNameError("format", form, shared.TABLE_FORMATS)
    if wide and (form in ("csv", "json") or clients or reported or target is not None):
        raise ConfigError("--wide prints one figure as a table, markdown or latex: leave out the other options")

    from fedcore_study.comparisons import formats
    from fedcore_study.comparisons.comparison import compare_runs
    from fedcore_study.comparisons.records import find_runs

    comparison = compare_runs(
        find_runs(runs, output.note),
        protocol=protocol,
        metric=metric,
        by=by or ["plugin"],
        tuned=tuned or (),
        labels=shared.labels_of(label),
        baseline=baseline,
        target=target,
        round=at_round,
        confidence=confidence,
        by_client=clients,
        reported=reported or (),
        warn=output.note,
    )
    if form not in ("markdown", "latex", "json"):  # these hold the notes themselves
        for note in comparison.notes:
            output.note(note)
    if form != "table":
        typer.echo(formats.FORMATS[form](comparison, **({"wide": True} if wide else {})), nl=False)
        return
    console = output.stdout()
    for found in formats.printed(comparison, wide=wide):
        table = found.drawn()
        table.columns[0].overflow = "fold"  # two rows whose names are cut could look the same
        console.print(table)
        for sentence in found.findings:
            console.print(output.text(sentence))
    if comparison.ranks is not None:
        console.print(output.text(str(comparison.ranks)))
    output.line(formats.caption(comparison), style="dim")
