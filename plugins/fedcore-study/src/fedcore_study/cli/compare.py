"""``compare``: runs and sweeps as one table."""

from __future__ import annotations

from typing import Annotated

import typer

from fedcore import ConfigError, UnknownNameError
from fedcore.tools import PROTOCOLS, options, output
from fedcore_study.cli import shared


def compare(
    runs: shared.Runs,
    protocol: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(PROTOCOLS)}. Several stand side by side. Default global."),
    ] = None,
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
            help="Show, in place of other figures, the spread over clients: mean, std, worst and best 10 %, variance, "
            "Jain; up to 12 clients with names each by its own. Needs a --protocol that clients measure.",
        ),
    ] = False,
    reported: shared.Reported = None,
    columns: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME,...",
            help="The table's columns: accuracy, auroc and other figures, auroc_mean over clients, clients for a "
            "column each, seeds, difference, p, PLUGIN.NAME; seconds, s/round, MB, MB-down, MB-up, memory, epsilon, or "
            "costs for all of these.",
        ),
    ] = None,
    form: Annotated[
        str, typer.Option("--format", metavar="|".join(shared.TABLE_FORMATS), help="How to print it.")
    ] = "table",
    latex: Annotated[
        bool, typer.Option("--latex", help="A table for a paper (booktabs), the best in bold; as --format latex.")
    ] = False,
    caption: Annotated[str, typer.Option(help="Of the LaTeX table; default its settings.")] = "",
    tex_label: Annotated[str, typer.Option(metavar="NAME", help="Label of the LaTeX table.")] = "tab:comparison",
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
    others = {
        "--clients": clients,
        "--reported": reported,
        "--columns": columns,
        "--target": target is not None,
        "a second --protocol": len(protocol or ()) > 1,
        f"--format {form}": form in ("csv", "json"),
    }
    if wide and (idle := [option for option, value in others.items() if value]):
        raise ConfigError(f"--wide prints one figure as a table, markdown or latex: leave out {' and '.join(idle)}")
    if columns and clients:
        raise ConfigError(
            "--clients has columns of its own: leave out --columns, or name some of mean,std,worst10,best10"
        )

    from fedcore_study.comparisons import formats
    from fedcore_study.comparisons.compare import compare_protocols
    from fedcore_study.comparisons.records import find_runs

    comparisons = compare_protocols(
        find_runs(runs, output.note),
        protocol or ["global"],
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
        columns=columns or (),
        warn=output.note,
    )
    if form not in ("markdown", "latex", "json"):  # these hold the notes themselves
        for note in formats.notes_of(comparisons):
            output.note(note)
    if form == "latex":
        typer.echo(formats.as_latex(comparisons, wide=wide, words=caption, label=tex_label), nl=False)
    elif form != "table":
        typer.echo(formats.FORMATS[form](comparisons, **({"wide": True} if wide else {})), nl=False)
    else:
        for table in formats.printed(comparisons, wide=wide):
            shared.print_table(table)
            for sentence in table.findings:
                output.stdout().print(output.text(sentence))
        for sentence in formats.ranks_in(comparisons):
            output.stdout().print(output.text(sentence))
        output.line(formats.caption(comparisons), style="dim")
