"""``report``: runs and sweeps as one HTML page, and its figures as files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcore.tools import options, output
from fedcore_report.files import FORMATS, formats_of, require_converter, write
from fedcore_study.tools import Baseline, By, Labels, Reported, Runs, Tuned


def report(
    runs: Runs,
    out: Annotated[Path, typer.Option("--out", metavar="FILE.html", help="The page.")] = Path("report.html"),
    figures: Annotated[
        Path | None, typer.Option("--figures", metavar="DIR", help="Write each figure as a file, too.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing page and figures.")] = False,
    form: Annotated[
        list[str] | None,
        typer.Option(
            "--figure-format", metavar="|".join(FORMATS), help="Of the files of figures: one or several, as svg,pdf."
        ),
    ] = None,
    by: By = None,
    tuned: Tuned = None,
    label: Labels = None,
    baseline: Baseline = None,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The figure that stands wherever accuracy does: loss, a metric of the runs (auroc, ece); over clients "
            "auroc_mean, worst10.",
        ),
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option(help="The protocol that comes first; default personal or global, whichever all methods have."),
    ] = None,
    reported: Reported = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder that holds the data sets' files; default what each run used.")
    ] = None,
    points: Annotated[
        int,
        typer.Option(min=0, max=5000, help="Test samples in the picture of the features; 0 leaves it out."),
    ] = 500,
    allow_code: options.AllowCode = False,
    title: Annotated[str | None, typer.Option(help="The page's heading.")] = None,
    debug: options.Debug = False,
) -> None:
    """Write one HTML page about runs: comparison, curves, clients, classes, features, losses, bytes and times.

    The page is self-contained. Runs of other data or settings have a separate section and are never averaged
    with these. Running and stopped runs are shown as far as they came. Figures as png or pdf need the extra `report` of
    fedcore.
    """
    from fedcore_report.build import build, heading
    from fedcore_report.page import check_target, write_page
    from fedcore_study.tools import find_runs, labels_of

    check_target(out, figures, force=force)
    forms = formats_of(form or ["png"])
    for each in forms if figures is not None else ():
        require_converter(each)
    notes: list[str] = []
    records = find_runs(runs, notes.append)
    with output.stderr().status(output.text("reading"), spinner="line") as status:
        made = build(
            records,
            notes,
            title=title or heading(runs),
            by=by or ["plugin"],
            tuned=tuned or (),
            labels=labels_of(label),
            baseline=baseline,
            metric=metric,
            protocol=protocol,
            data_dir=data_dir,
            points=points,
            reported=reported or (),
            allow_code=allow_code,
            progress=lambda message: status.update(output.text(message)),
        )
    for note in made.notes:
        output.note(note)
    for section in made.sections:
        for entry in section.omitted:
            where = f"{section.title}: " if section.title else ""
            output.note(f"{where}not drawn: {entry.title}: {entry.reason}")
    write_page(made, out)
    output.line(f"written: {out} ({len(made.runs)} runs, {len(made.charts)} figures)")
    if figures is not None:
        written = write(made.charts, figures, forms)
        output.line(f"written: {len(written)} {' and '.join(forms)} files in {figures}")
