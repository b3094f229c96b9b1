"""A recipe run as a sweep, and its table: the paper's figures and ours, cell by cell."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedcore import ConfigError, DataError, FedcoreError, RunConfig, UnknownNameError
from fedcore.data import default_data_dir, load_dataset
from fedcore.tools import Json, digest
from fedcore_reproduce.recipe import Cell, Printed, Recipe, Scale
from fedcore_study import SweepResult
from fedcore_study.tools import Figure, Listener, RunRecord, SweepDirectory, SweepSpec, read_run, resolved, run_sweep

Note = Callable[[str], None]


@dataclass(frozen=True)
class Ours:
    """Our figure under one heading over seeds, as a fraction.

    :param protocol: the protocol of the heading that the figure was measured under.
    :param difference: our figure minus the paper's, in points.
    """

    figure: Figure | None
    protocol: str | None
    difference: float | None


@dataclass(frozen=True)
class ResultCell:
    """A cell with the results of its runs.

    :param ours: by heading; empty if nothing was run. ``reason`` says why.
    :param values: each seed's accuracy under the first heading.
    :param seeds: the number of seeds with figures, of ``planned`` seeds.
    """

    row: str
    column: str
    paper: Printed
    ours: dict[str, Ours] = field(default_factory=dict)
    values: dict[int, float] = field(default_factory=dict)
    seeds: int = 0
    planned: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Reproduction:
    """A reproduced table, or the chosen rows and columns of it."""

    recipe: Recipe
    scale: Scale
    directory: Path
    cells: list[ResultCell]

    def columns(self) -> dict[str, list[ResultCell]]:
        """Return the cells of each column, in the table's order."""
        by_name: dict[str, list[ResultCell]] = {}
        for cell in self.cells:
            by_name.setdefault(cell.column, []).append(cell)
        return by_name


@dataclass(frozen=True)
class Plan:
    """The runs of a recipe on this machine.

    :param cells: the cells of the chosen rows and columns. A cell that cannot be run here has a reason.
    :param runs: the identities of a cell's runs, one per seed, by row and column.
    :param sweep: the sweep of all runs; None if there are no runs.
    """

    recipe: Recipe
    scale: Scale
    cells: list[Cell]
    runs: dict[tuple[str, str], list[str]]
    sweep: SweepSpec | None


def plan(
    recipe: Recipe,
    scale: Scale,
    *,
    changes: Mapping[str, Json] | None = None,
    seeds: int | None = None,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    note: Note = lambda message: None,
) -> Plan:
    """Plan a recipe's runs; a cell whose data set cannot be loaded is not run, and ``note`` gets the reason.

    :param changes: options of this machine, such as ``data_dir`` and ``device``, by name.
    :param seeds: how many, instead of the recipe's number.
    :param rows: names of the rows to plan, exactly as in the table. Empty means all.
    :param columns: names of the columns to plan. Empty means all.
    :raises ConfigError: plugins cannot be combined, or a plugin has no such option; names the recipe's file.
    :raises UnknownNameError: the table has no such row or column.
    """
    spec = recipe.spec(scale, changes, seeds)
    cells: list[Cell] = []
    runs: dict[tuple[str, str], list[str]] = {}
    unavailable: dict[str, str] = {}
    for cell in _chosen(recipe, scale, rows, columns):
        if cell.choice is not None:
            configs = [spec.run(cell.choice, seed) for seed in spec.seeds]
            try:
                identities = [digest(resolved(config)) for config in configs]
            except FedcoreError as error:
                raise ConfigError(f"{recipe.file}: row {cell.row!r}, column {cell.column!r}: {error}") from None
            name = configs[0].dataset
            if name not in unavailable:
                unavailable[name] = _why_not(configs[0], note)
            if unavailable[name]:
                cell = dataclasses.replace(cell, choice=None, reason=unavailable[name])
            else:
                runs[cell.row, cell.column] = identities
        cells.append(cell)
    choices = [cell.choice for cell in cells if cell.choice is not None]
    sweep = SweepSpec.create({**spec.model_dump(by_alias=True), "cases": choices}) if choices else None
    return Plan(recipe, scale, cells, runs, sweep)


def run(
    planned: Plan,
    out: Path,
    *,
    parallel: int | None = None,
    listen: Listener = lambda name, event, details: None,
) -> tuple[Reproduction, SweepResult | None]:
    """Run the unfinished runs of a recipe in the sweep directory ``out``, and make its table.

    :returns: the table, with notes on runs that failed or were stopped; and the sweep's result, if there were
        runs at all.
    :raises ConfigError: or a subclass. Nothing has run by then.
    """
    if planned.sweep is None:
        return _table(planned, out, {}, {}), None
    result = run_sweep(planned.sweep, out, parallel=parallel, listen=listen)
    directory = SweepDirectory(out)
    outcomes = {outcome.name: outcome for outcome in result.outcomes}
    records: dict[str, RunRecord] = {}
    reasons: dict[str, str] = {}
    for name, config in directory.plan().items():
        if name not in outcomes:
            continue  # of another recipe, or another number of seeds
        if outcomes[name].status == "finished":
            records[digest(config)] = read_run(directory.run_directory(name), lambda message: None)
        else:
            reasons[digest(config)] = f"{outcomes[name].status}: {outcomes[name].message}".removesuffix(": ")
    return _table(planned, directory.path, records, reasons), result


def _chosen(recipe: Recipe, scale: Scale, rows: Sequence[str], columns: Sequence[str]) -> list[Cell]:
    """Return the cells where the named rows and columns cross, in the table's order."""
    for kind, names, parts in (("row", rows, recipe.rows), ("column", columns, recipe.columns)):
        known = [part.name for part in parts]
        for name in names:
            if name not in known:
                raise UnknownNameError(f"{kind} of {recipe.label} of {recipe.method}", name, known)
    return [
        cell
        for cell in recipe.cells(scale)
        if (not rows or cell.row in rows) and (not columns or cell.column in columns)
    ]


def _why_not(config: RunConfig, note: Note) -> str:
    """Return why a run's data set cannot be loaded; empty if it can."""
    try:
        load_dataset(config.dataset, config.data_dir)
    except DataError as error:
        note(str(error))
        return f"data set {config.dataset} cannot be loaded from {config.data_dir or default_data_dir()}"
    return ""


def _table(planned: Plan, out: Path, records: Mapping[str, RunRecord], reasons: Mapping[str, str]) -> Reproduction:
    cells = []
    for cell in planned.cells:
        identities = planned.runs.get((cell.row, cell.column), [])
        recorded = [records[identity] for identity in identities if identity in records]
        reason = f"not run: {cell.reason}" if cell.reason else ""
        reason = next((reasons[identity] for identity in identities if identity in reasons), reason)
        headings = planned.recipe.protocols if recorded else {}
        ours = {heading: _ours(recorded, protocols, cell.paper) for heading, protocols in headings.items()}
        values = _values(recorded, next((each.protocol for each in ours.values()), None))
        cells.append(
            ResultCell(cell.row, cell.column, cell.paper, ours, values, len(recorded), len(identities), reason)
        )
    return Reproduction(planned.recipe, planned.scale, out, cells)


def _values(runs: Sequence[RunRecord], protocol: str | None) -> dict[int, float]:
    """Return the accuracy under a protocol by seed."""
    evaluations = {run.config.seed: run.final(protocol) for run in runs} if protocol else {}
    return {seed: evaluation.value for seed, evaluation in evaluations.items() if evaluation}


def _ours(runs: Sequence[RunRecord], protocols: Sequence[str], paper: Printed) -> Ours:
    """Return the runs' accuracy under the first protocol that all of them have figures for."""
    for protocol in protocols:
        accuracies = [evaluation.value for run in runs if (evaluation := run.final(protocol)) is not None]
        figure = Figure.of(accuracies)
        if figure is not None and len(accuracies) == len(runs):
            return Ours(figure, protocol, None if paper.mean is None else 100 * figure.mean - paper.mean)
    return Ours(None, None, None)
