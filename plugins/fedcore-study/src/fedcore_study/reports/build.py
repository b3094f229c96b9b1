"""A report put together: which tables and charts it has, from runs that were read."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedcore import ConfigError
from fedcore.base.identity import key, method
from fedcore.base.protocols import PROTOCOLS
from fedcore.base.safe_yaml import read_yaml
from fedcore.runs.saved import check_code, code_in
from fedcore_study.comparisons import formats
from fedcore_study.comparisons.comparison import compare
from fedcore_study.comparisons.groups import Group, by_seed, grouped
from fedcore_study.comparisons.groups import field as option
from fedcore_study.comparisons.records import Found, RunRecord
from fedcore_study.reports import gather
from fedcore_study.reports.charts import Chart, Omitted


@dataclass(frozen=True)
class Table:
    """Cells as text."""

    caption: str
    heads: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Section:
    """What is shown of one group of runs.

    :param settings: all in which it differs from other groups. ``name`` begins its figures' files.
    :param findings: what its tables show, in sentences.
    """

    title: str
    settings: str
    name: str
    findings: list[str]
    tables: list[Table]
    charts: list[Chart]
    omitted: list[Omitted]


@dataclass(frozen=True)
class RunText:
    """One run's configuration as its config.yaml has it, versions included."""

    name: str
    path: str
    config: str


@dataclass(frozen=True)
class Report:
    """Everything that the page shows."""

    title: str
    created: str
    notes: list[str]
    overview: Table
    sections: list[Section]
    settings: list[Table]
    runs: list[RunText] = field(default_factory=list)


def build(
    found: Found,
    notes: Sequence[str],
    *,
    title: str,
    by: Sequence[str] = ("plugin",),
    data_dir: Path | None = None,
    points: int = 500,
    progress: Callable[[str], None] = lambda message: None,
    allow_code: bool = False,
) -> Report:
    """Put a report together.

    :param notes: what was noticed while the runs were read. ``points``: test samples in an embedding, 0 for none.
    :param allow_code: import what the runs' configurations name as ``module:...``.
    :raises ConfigError: there is no run, two of the same settings and seed, or one that names code.
    """
    if not found.runs:
        raise ConfigError("there is no run to report yet")
    for run in found.runs:
        check_code(code_in(run.config), run.path / "config.yaml", allow=allow_code)
    fields = [option(name) for name in by]
    common, groups = grouped(found.runs, fields)
    for group in groups:
        for runs in group.rows.values():
            by_seed(runs)
    said = list(notes)
    if found.waiting:
        said.append(f"{len(found.waiting)} planned runs have not begun: {', '.join(found.waiting)}")
    colors = {label: i for i, label in enumerate(dict.fromkeys(label for group in groups for label in group.rows))}
    sections, telling = [], _telling(groups)
    for number, group in enumerate(groups, start=1):
        progress(f"group {number} of {len(groups)}")
        section, cautions = _section(group, telling, colors, by, data_dir, points)
        sections.append(section)
        said += [f"{section.title}: {note}" if len(groups) > 1 else note for note in cautions]
    return Report(
        title=title,
        created=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        notes=said,
        overview=_overview(found.runs),
        sections=sections,
        settings=[_common(common), *_versions(found.runs)],
        runs=[RunText(run.path.name, str(run.path), _config_text(run)) for run in found.runs],
    )


def _section(
    group: Group,
    telling: Sequence[str],
    colors: dict[str, int],
    by: Sequence[str],
    data_dir: Path | None,
    points: int,
) -> tuple[Section, list[str]]:
    """Return a group's section, and what a reader has to know of its tables."""
    from fedcore_study.reports import samples  # torch, scikit-learn

    dataset = samples.find_dataset(group, data_dir)
    names = None if isinstance(dataset, str) else samples.class_names(dataset)
    made = [*gather.records_of(group, colors, names), samples.partition_pictures(group, dataset)]
    if points:
        made += samples.embeddings(group, dataset, points)
    told = {name: group.settings[name] for name in telling}
    tables, findings, cautions = _results(group, by)
    section = Section(
        title=_named(told) or "Results",
        settings=_named(group.settings) if len(told) < len(group.settings) else "",
        name=_named(told),
        findings=findings,
        tables=tables,
        charts=[chart for chart in made if isinstance(chart, Chart)],
        omitted=_joined([chart for chart in made if isinstance(chart, Omitted)]),
    )
    return section, cautions


def _telling(groups: Sequence[Group]) -> list[str]:
    """Return the settings that are enough to tell groups apart, the first ones of a configuration preferred."""
    chosen: list[str] = []

    def apart(names: Sequence[str]) -> int:
        return len({key([group.settings[name] for name in names]) for group in groups})

    for name in groups[0].settings:
        if apart([*chosen, name]) > apart(chosen):
            chosen.append(name)
    return chosen


def _results(group: Group, by: Sequence[str]) -> tuple[list[Table], list[str], list[str]]:
    """Return what ``compare`` prints of a group's finished runs, by protocol: tables, findings, notes.

    A protocol that clients measure has a second table, of the spread over clients.
    """
    tables: list[Table] = []
    findings: list[str] = []
    notes: dict[str, None] = {}
    runs = [run for runs in group.rows.values() for run in runs if run.finished]
    for protocol in PROTOCOLS:
        if not any(run.final(protocol) for run in runs):
            continue
        comparison = compare(runs, protocol=protocol, by=by)
        (block,) = comparison.blocks
        notes |= dict.fromkeys(block.notes)
        findings += [f"{protocol}: {sentence}" for sentence in block.findings]
        rows = [formats.cells(comparison, block, row) for row in block.rows]
        tables.append(Table(f"Finished runs, {protocol}", formats.headings(comparison, block), rows))
        if PROTOCOLS[protocol].on_clients:
            columns = [formats.columns(comparison, block)[0], *formats.client_columns()]
            rows = [[column.cell(row) for column in columns] for row in block.rows]
            tables.append(Table(f"Over the clients, {protocol}", [column.heading for column in columns], rows))
    return tables, findings, list(notes)


def _overview(runs: Sequence[RunRecord]) -> Table:
    rows = []
    for run in runs:
        last = gather.final_accuracy(run)
        lost = sum(len(line.get("failures") or []) for line in run.rounds)
        rows.append(
            [
                run.path.name,
                method(run.config.plugins),
                run.config.dataset,
                str(run.config.seed),
                gather.state(run),
                f"{100 * last[1]:.2f} ({last[0]})" if last else "-",
                str(lost),
            ]
        )
    return Table("", ["run", "method", "data set", "seed", "state", "accuracy %", "client failures"], rows)


def _common(common: dict[str, Any]) -> Table:
    rows = [[name, _short(value)] for name, value in common.items()]
    return Table("Settings that all runs share", ["option", "value"], rows)


def _versions(runs: Sequence[RunRecord]) -> list[Table]:
    """Return the versions of what was installed; of each run where they differ."""
    found: dict[str, dict[str, list[str]]] = {}
    for run in runs:
        versions = (_config(run) or {}).get("versions")
        for name, version in (versions if isinstance(versions, dict) else {}).items():
            found.setdefault(str(name), {}).setdefault(str(version), []).append(run.path.name)
    if not found:
        return []
    rows = []
    for name, versions in sorted(found.items()):
        for version, where in versions.items():
            rows.append([name, version, "" if len(where) == len(runs) else f"{len(where)} of {len(runs)} runs"])
    return [Table("Versions", ["package", "version", ""], rows)]


def _config(run: RunRecord) -> dict[str, Any] | None:
    values = read_yaml(_config_text(run))
    return values if isinstance(values, dict) else None


def _config_text(run: RunRecord) -> str:
    return (run.path / "config.yaml").read_text(encoding="utf-8")


def _joined(omitted: Sequence[Omitted]) -> list[Omitted]:
    """Say once what holds for several figures."""
    titles: dict[str, list[str]] = {}
    for entry in omitted:
        titles.setdefault(entry.reason, []).append(entry.title)
    return [Omitted("; ".join(names), reason) for reason, names in titles.items()]


def _named(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_short(value)}" for name, value in settings.items())


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(value) or "none"
    return "-" if value is None else str(value)
