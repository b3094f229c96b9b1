"""``runs``: find, show, compare, label and delete the runs of a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcore import ConfigError, RunDirectoryError, UnknownNameError
from fedcore.tools import StorageError, nearest, options, output
from fedcore_study.words import counted

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from fedcore_study.runs.deletion import Removal
    from fedcore_study.runs.overview import Overview

app = typer.Typer(
    help="Look back at runs: list, show, compare, label and delete them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

COLUMNS: dict[str, Callable[[Overview], Any]] = {
    "when": lambda run: run.begun and run.begun.timestamp(),
    "run": lambda run: run.title,
    "method": lambda run: run.method,
    "data": lambda run: run.dataset,
    "rounds": lambda run: run.done,
    "accuracy": lambda run: run.accuracy,
    "state": lambda run: run.state,
    "tags": lambda run: " ".join(run.labels.tags) or None,
}
"""The columns of the table, with the values that sort its rows."""
DESCENDING = ("when", "rounds", "accuracy")

Run = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's folder, or the beginning of its name or folder in the list.")
]
Runs = Annotated[
    list[str], typer.Argument(metavar="RUN...", help="Runs: folders, or beginnings of names or folders in the list.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Delete without a question.")]


@app.command("list")
def list_(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[FOLDER]", help="Runs, sweeps, or folders of them. [default: runs and sweeps]"),
    ] = None,
    sort: Annotated[str, typer.Option(metavar="COLUMN", help=f"One of {', '.join(COLUMNS)}.")] = "when",
    method: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only runs of this method; moon+uscc for both.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(metavar="NAME", help="Only runs on this data set.")] = None,
    tag: Annotated[
        list[str] | None, typer.Option(metavar="TAG", help="Only runs with this tag. Can be repeated.")
    ] = None,
    state: Annotated[
        str | None, typer.Option(metavar="STATE", help="Only finished, stopped, running or broken runs.")
    ] = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """List the runs in a folder and below it, the latest first.

    The accuracy is that of the first protocol measured: of the global model on the test set, if there is one.
    """
    from fedcore_study.runs.overview import STATES, find_runs, find_usual_runs

    if sort not in COLUMNS:
        raise UnknownNameError("column", sort, COLUMNS)
    if state is not None and state not in STATES:
        raise UnknownNameError("state", state, STATES)
    runs = find_usual_runs(output.note) if folder is None else find_runs(folder, output.note)
    wanted: list[tuple[str, str, Callable[[Overview], Sequence[str | None]]]] = [
        *(("method", name, lambda run: [run.method, *_parts(run.method)]) for name in _parts(method)),
        *([("data set", dataset, lambda run: [run.dataset])] if dataset is not None else []),
        *(("tag", one, lambda run: run.labels.tags) for one in tag or ()),
        *([("state", state, lambda run: [run.state])] if state is not None else []),
    ]
    listed = runs
    for column, value, values in wanted:
        listed = [run for run in listed if value in values(run)]
        known = sorted({str(one) for run in runs for one in values(run) if one is not None})
        if runs and value not in known and column != "state":
            near = nearest(value, known)
            output.note(f"no run here has the {column} {value!r}" + (f". Did you mean {near!r}?" if near else ""))
    listed = _sorted(listed, sort)
    if as_json:
        output.print_json([run.to_json() for run in listed])
        return
    if listed:
        from fedcore_study.cli.runs_tables import runs_table

        output.stdout().print(runs_table(listed))
    else:
        output.note(f"there is no {'such run' if wanted else 'run'} in {folder or 'runs or sweeps'}")


@app.command("show")
def show(run: Run, as_json: options.Json = False, debug: options.Debug = False) -> None:
    """Show a run's setting, figures, labels, sessions and files, and the command that resumes it."""
    from fedcore_study.runs.details import details
    from fedcore_study.runs.overview import find_run

    shown_run = details(find_run(run), output.note)
    if as_json:
        output.print_json(shown_run)
        return
    from fedcore_study.cli.runs_tables import details_tables

    _print(details_tables(shown_run))


@app.command("diff")
def diff(
    one: Annotated[str, typer.Argument(metavar="RUN", help="A run, as for show.")],
    other: Annotated[str, typer.Argument(metavar="RUN", help="The run to compare it with.")],
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show the options in which two runs differ, side by side, and the difference of their figures."""
    from fedcore_study.runs.details import details, difference
    from fedcore_study.runs.overview import find_run

    runs = find_run(one), find_run(other)
    if runs[0].path.samefile(runs[1].path):
        raise ConfigError(f"{one} and {other} are the same run; name two")
    first, second = (details(run, output.note) for run in runs)
    differences = difference(first, second)
    if as_json:
        output.print_json(differences)
        return
    from fedcore_study.cli.runs_tables import difference_tables

    _print(difference_tables(differences, [run.title for run in runs], [run.folder for run in runs]))


@app.command("tag")
def tag(
    runs: Runs,
    add: Annotated[list[str] | None, typer.Option(metavar="TAG", help="Add a tag. Can be repeated.")] = None,
    remove: Annotated[list[str] | None, typer.Option(metavar="TAG", help="Remove a tag. Can be repeated.")] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name the run. Empty: no name.")] = None,
    note: Annotated[str | None, typer.Option(metavar="TEXT", help="Replace the note. Empty: no note.")] = None,
    debug: options.Debug = False,
) -> None:
    """Change the labels of runs: tags, name and note. They are kept in labels.json in the run's folder."""
    from fedcore_study.runs.labels import alone, require_tags, write_labels
    from fedcore_study.runs.overview import read_overview

    if not add and not remove and name is None and note is None:
        raise ConfigError("say what to change: --add TAG, --remove TAG, --name NAME or --note TEXT")
    tagged = _runs_of(runs)
    if name and len(tagged) > 1:
        raise ConfigError(f"--name {name} is for one run, and {len(tagged)} are named; tags are for several")
    _require_whole(tagged)
    with alone(run.path.resolve() for run in tagged):
        now = [read_overview(run.path, run.folder) for run in tagged]
        _require_whole(now)
        require_tags(remove or [], [run.labels for run in now])
        changed = [run.labels.changed(add=add or [], remove=remove or [], name=name, note=note) for run in now]
        for run, labels in zip(now, changed, strict=True):
            write_labels(run.path, labels)
    for run, labels in zip(now, changed, strict=True):
        parts = [f"name {labels.name}"] if labels.name else []
        parts += [f"tags {', '.join(labels.tags)}"] if labels.tags else []
        parts += [f"note: {labels.note}"] if labels.note else []
        output.line(f"{run.folder}: {', '.join(parts) or 'no labels'}")


@app.command("rm")
def rm(runs: Runs, yes: Yes = False, debug: options.Debug = False) -> None:
    """Delete runs with everything in their folders, after a question."""
    from fedcore_study.runs.deletion import whole

    removals = [whole(run) for run in _runs_of(runs)]
    _delete(removals, "", yes=yes)


@app.command("clean")
def clean(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Runs, sweeps, or folders of them.")] = Path(
        "runs"
    ),
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="List what would be deleted.")] = False,
    yes: Yes = False,
    debug: options.Debug = False,
) -> None:
    """Delete what no result needs, after a question.

    These are the checkpoints and clients' states of finished runs, and the folders of runs that stopped before their
    first round was finished. Figures, history and global models stay.
    """
    from fedcore_study.runs.deletion import without_loss
    from fedcore_study.runs.overview import find_runs

    removals = list(without_loss(find_runs(folder, output.note), output.note))
    if not removals:
        output.note(f"there is nothing to delete in {folder}")
        return
    lost = ""
    if any(removal.names for removal in removals):
        lost = (
            "Without its checkpoints and its clients' states a finished run cannot get more rounds or be evaluated "
            "again, and clients' own models are lost. Its figures, its history and its global model stay."
        )
    _delete(removals, lost, yes=yes, dry_run=dry_run)


def _delete(removals: Sequence[Removal], lost: str, *, yes: bool, dry_run: bool = False) -> None:
    """Show what would be deleted, ask, and delete it."""
    from fedcore_study.cli.runs_tables import removals_table
    from fedcore_study.runs.deletion import delete

    console = output.stderr()
    console.print(removals_table(removals))
    if lost:
        console.print(output.text(lost))
    count = _amount(removals)
    if dry_run:
        output.note(f"{count} would be deleted; without --dry-run it is")
        return
    if not yes:
        try:
            yes = typer.confirm(f"Delete {count}?", err=True)
        except typer.Abort:
            console.print()
            raise ConfigError("nothing was deleted, because nobody answered; add --yes to delete") from None
    if not yes:
        output.note("nothing was deleted")
        return
    deleted = []
    for removal in removals:
        try:
            delete(removal)
        except StorageError:
            raise
        except RunDirectoryError as error:
            output.note(f"{removal.run.folder} stays: {error}")
        else:
            deleted.append(removal)
    if deleted:
        output.line(f"deleted {_amount(deleted)}")
    else:
        output.note("nothing was deleted")


def _amount(removals: Sequence[Removal]) -> str:
    return f"{output.size(sum(removal.bytes for removal in removals))} of {counted(len(removals), 'run')}"


def _print(parts: Iterable[Table | Text]) -> None:
    """Print the parts of a page, with empty lines between them. A command in it stays in one line."""
    from rich.text import Text

    for place, part in enumerate(parts):
        output.stdout().print(*([""] if place else []), part, sep="\n", soft_wrap=isinstance(part, Text))


def _runs_of(texts: Sequence[str]) -> list[Overview]:
    """Return the runs that the user names, each once."""
    from fedcore_study.runs.overview import find_run

    overviews = [find_run(text) for text in texts]
    return list({run.path.resolve(): run for run in overviews}.values())


def _require_whole(runs: Iterable[Overview]) -> None:
    """Refuse broken runs."""
    for run in runs:
        if run.state == "broken":
            raise ConfigError(run.problem)


def _parts(method: str | None) -> list[str]:
    return method.split("+") if method else []


def _sorted(runs: Sequence[Overview], column: str) -> list[Overview]:
    """Return the runs in the order of a column. Runs without a value come last."""
    value = COLUMNS[column]
    with_value = sorted((run for run in runs if value(run) is not None), key=value, reverse=column in DESCENDING)
    return with_value + [run for run in runs if value(run) is None]
