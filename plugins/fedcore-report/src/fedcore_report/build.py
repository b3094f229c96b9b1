"""The parts of a report, made from runs that were read: tables and charts."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedcore import ConfigError, RunConfig, UnknownNameError
from fedcore.tools import code_in, key, method, protocols, registry, rounds, safe_yaml, saved
from fedcore_report import breakdowns, lines
from fedcore_report.charts import Chart, Curves, Omitted
from fedcore_report.opening import Opening, Ranking, Table, main_protocol, opening, rankings
from fedcore_study.tools import (
    BASELINE,
    Comparison,
    Group,
    Measure,
    RunRecord,
    by_seed,
    by_value,
    check_reported,
    counted,
    distinct,
    group_runs,
    joined,
    mapping_in,
    named,
    option,
    relabelled,
    shown,
    tuned_runs,
    uses_alpha,
    with_global_model,
)


@dataclass(frozen=True)
class Section:
    """The part of the page about one group of runs."""

    title: str
    """Empty for the only group."""
    settings: str
    """All settings in which the group differs from the others."""
    opening: Opening
    main: str
    """The protocol that comes first."""
    parts: dict[str, list[Chart]]
    """The charts by heading. The results' charts are first, and their heading is empty."""
    others: dict[str, list[Chart]]
    """The charts of the other protocols."""
    omitted: list[Omitted]

    @property
    def charts(self) -> list[Chart]:
        """All charts of the section."""
        return [chart for charts in (*self.parts.values(), *self.others.values()) for chart in charts]


@dataclass(frozen=True)
class Report:
    """Everything that the page shows."""

    title: str
    setting: str
    """Data, model, partition, clients, rounds and seeds in one line."""
    created: str
    notes: list[str]
    sections: list[Section]
    ranks: list[Ranking]
    """The methods' ranks over the sections, by protocol, if these are of different data."""
    runs: dict[Path, str]
    """The text of each run's config.yaml, versions included, by the run's directory."""
    details: dict[str, Table]
    """The tables at the end by title: the runs, settings that they share, machines, versions."""

    @property
    def charts(self) -> list[tuple[str, Chart]]:
        """All charts of the page, each with the title of its section."""
        ranks: list[tuple[str, Chart]] = [("", ranking.chart) for ranking in self.ranks]
        return [*ranks, *((section.title, chart) for section in self.sections for chart in section.charts)]


def heading(folders: Sequence[Path]) -> str:
    """Return the usual heading of a report: the names of the first folders."""
    return ", ".join(folder.resolve().name for folder in folders[:3]) + ", ..." * (len(folders) > 3)


def build(
    records: Sequence[RunRecord],
    notes: Sequence[str],
    *,
    title: str,
    by: Sequence[str] = ("plugin",),
    tuned: Sequence[str] = (),
    labels: Mapping[str, str] | None = None,
    baseline: str | None = None,
    metric: str | None = None,
    protocol: str | None = None,
    data_dir: Path | None = None,
    points: int = 500,
    reported: Sequence[str] = (),
    progress: Callable[[str], None] = lambda message: None,
    allow_code: bool = False,
) -> Report:
    """Make the parts of a report.

    :param notes: warnings about the runs' files.
    :param tuned: options that each row has its own value of.
    :param labels: names for rows, by the names that they would have.
    :param baseline: the row that differences are to, in the groups that have it; by default fedavg.
    :param metric: the figure that is shown wherever accuracy stands, by its name in ``summary.json``.
    :param protocol: the protocol that comes first; see :func:`~fedcore_report.opening.main_protocol`.
    :param points: the number of test samples in an embedding, 0 for none.
    :param reported: figures of plugins' reports to show in the tables, such as ``attack.success``.
    :param allow_code: import what the runs' configurations name as ``module:...``.
    :raises ConfigError: there is no run, two runs have the same settings and seed, a run names code, or no finished run
        reports a figure.
    """
    fields, all_notes = [option(name) for name in by], list(notes)
    chosen, own = tuned_runs(records, fields, tuned, all_notes.append)
    runs = distinct(chosen, fields, all_notes.append)
    if not runs:
        raise ConfigError("there is no run to report yet")
    for run in runs:
        saved.check_code(
            (name for name in code_in(run.config) if not registry.is_lent(name)),
            run.path / "config.yaml",
            allow=allow_code,
        )
    if metric is not None:
        runs = _compared_by(runs, metric, all_notes)
    if protocol is not None and not any(protocol in run.protocols for run in runs):
        raise UnknownNameError("protocol", protocol, sorted({name for run in runs for name in run.protocols}))
    common, groups = group_runs(runs, fields, own)
    groups = relabelled(groups, labels or {})
    baseline = (labels or {}).get(baseline or "", baseline)
    for group in groups:
        for each in group.rows.values():
            by_seed(each)
    rows = dict.fromkeys(label for group in groups for label in group.rows)
    if baseline is not None and baseline not in rows:
        raise UnknownNameError("baseline", baseline, rows)
    check_reported(runs, reported)
    if unfinished := [f"{run.path.name} ({_state(run)})" for run in runs if not run.finished]:
        all_notes.append(f"{len(unfinished)} of {len(runs)} runs are not finished: {', '.join(unfinished)}")
    colors = {label: number for number, label in enumerate(rows)}
    telling = _telling(groups)
    rows_by = ["plugin" if name == "plugins" else name for name in fields]
    asked = Comparison("", rows_by, common=common, reported=reported, tuned=own)
    sections = []
    groups = [_with_global_models(group) for group in groups]
    for number, group in enumerate(groups, start=1):
        progress(f"group {number} of {len(groups)}")
        main = main_protocol(group, protocol)
        opened = opening(group, asked, main, colors, baseline)
        sections.append(_section(group, opened, main, telling, colors, data_dir, points))
    details = {
        f"{len(runs)} runs": _overview(runs),
        "Settings that all runs share": Table(
            ["option", "value"], [[n, _short(v)] for n, v in common.items()], words=2
        ),
        "Machine and commit": _machines(runs),
        "Versions of what the runs used": _versions(runs),
    }
    return Report(
        title=title,
        setting=_setting(runs),
        created=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        notes=all_notes,
        sections=sections,
        ranks=rankings(groups, asked, colors),
        runs={run.path: _config_text(run) for run in runs},
        details={name: table for name, table in details.items() if table.rows},
    )


def _compared_by(runs: Sequence[RunRecord], metric: str, notes: list[str]) -> list[RunRecord]:
    """Return the runs that measured a figure, to be compared by it; a note counts those that did not.

    :raises ConfigError: it is not known whether more of it is better, or no run measured it.
    """
    measure = Measure.of(metric, {name: sign for run in runs for name, sign in run.signs.items()})
    asked = [replace(run, compared=measure.name) for run in runs]
    measured = [run for run in asked if run.protocols]
    if not measured:
        known = sorted({name for run in runs for protocol in run.protocols for name in run.metrics(protocol, None)})
        raise ConfigError(
            f"--metric {metric}: no run measured it; metrics of the runs: {', '.join(known) or 'none'}. --metric of "
            "train and resume adds one"
        )
    if len(measured) < len(runs):
        notes.append(f"{len(runs) - len(measured)} of {len(runs)} runs did not measure {measure.name} and are left out")
    return measured


def _with_global_models(group: Group) -> Group:
    """Return a group in which methods without own models have their global model's figures, if others have own ones."""
    if not any("personal" in run.protocols for runs in group.rows.values() for run in runs):
        return group
    rows = {label: [with_global_model(run, "personal") for run in runs] for label, runs in group.rows.items()}
    return Group(group.settings, rows)


def _section(
    group: Group,
    opened: Opening,
    main: str,
    telling: Sequence[str],
    colors: dict[str, int],
    data_dir: Path | None,
    points: int,
) -> Section:
    from fedcore_report import samples  # torch, scikit-learn

    dataset = samples.find_dataset(group, data_dir)
    names = None if isinstance(dataset, str) else dataset.strata[1]
    matrices, further = breakdowns.confusions(group, names, main)
    others = {
        protocol: [*_results(group, opened, colors, protocol), *further.get(protocol, ())]
        for protocol in dict.fromkeys((*protocols.EVALUATED, *opened.intervals, *further))
        if protocol != main
    }
    parts: dict[str, Iterable[Chart | Omitted]] = {
        "": _first(group, opened, colors, main, others),
        "Clients": [breakdowns.by_client(group, colors, main), *samples.partition_pictures(group, dataset)],
        "Classes": [
            *breakdowns.by_domain(group),
            breakdowns.by_class(group, names),
            *matrices,
        ],
        "Costs": [
            *(chart.once() for chart in lines.against_costs(group, colors, main)),
            *breakdowns.participation(group),
            breakdowns.bytes_sent(group),
            breakdowns.seconds(group),
        ],
        "Losses": lines.losses(group, colors),
        "Figures of plugins": lines.reported(group, colors),
        "Features": samples.embeddings(group, dataset, points) if points else [],
    }
    charts_by_part = {name: list(charts) for name, charts in parts.items()}
    shown = _drawn_once({**charts_by_part, **{f"protocol {name}": charts for name, charts in others.items()}})
    in_title = {name: group.settings[name] for name in telling if name in group.settings}
    return Section(
        title=named(in_title),
        settings=named(group.settings) if len(in_title) < len(group.settings) else "",
        opening=opened,
        main=main,
        parts={name: shown[name] for name in charts_by_part},
        others={name: charts for name in others if (charts := shown[f"protocol {name}"])},
        omitted=_joined(
            [chart for charts in charts_by_part.values() for chart in charts if isinstance(chart, Omitted)]
        ),
    )


def _first(
    group: Group,
    opened: Opening,
    colors: Mapping[str, int],
    main: str,
    others: Mapping[str, Sequence[Chart | Omitted]],
) -> list[Chart | Omitted]:
    """Return the charts of the results under the protocol that comes first."""
    charts = _results(group, opened, colors, main)
    if not any(isinstance(chart, Curves) for each in (charts, *others.values()) for chart in each):
        figure = lines.named(lines.measure_of(group))
        charts.append(Omitted(f"{figure} over rounds", "no run has been evaluated twice yet"))
    return charts


def _results(group: Group, opened: Opening, colors: Mapping[str, int], protocol: str) -> list[Chart | Omitted]:
    """Return the figure over rounds, its last third, the paired differences by seed, and metrics' curves."""
    charts: list[Chart | Omitted] = []
    drawn = lines.over_rounds(group, colors, protocol)
    if drawn is not None:
        charts.append(drawn.once())
        if (end := drawn.last_third()) is not None:
            charts.append(end.once())
    if len(group.rows) > 1 and protocol in opened.intervals:
        charts.append(opened.intervals[protocol])
    return [*charts, *(chart.once() for chart in lines.of_metrics(group, colors, protocol))]


def _drawn_once(parts: Mapping[str, Sequence[Chart | Omitted]]) -> dict[str, list[Chart]]:
    """Return the charts of each part without those that equal an earlier one, whose caption then names both."""
    kept: dict[str, list[Chart]] = {}
    places: dict[str, tuple[str, int]] = {}
    for name, charts in parts.items():
        kept[name] = []
        for chart in (chart for chart in charts if isinstance(chart, Chart)):
            content = f"{type(chart)}{replace(chart, name='', title='', about='')}"
            if content in places:
                part, number = places[content]
                same = kept[part][number]
                kept[part][number] = replace(same, about=f"{same.about} {chart.title}: the same picture.")
            else:
                places[content] = name, len(kept[name])
                kept[name].append(chart)
    return kept


def _telling(groups: Sequence[Group]) -> list[str]:
    """Return settings that suffice to tell groups apart, as early ones of a configuration as possible."""
    chosen: list[str] = []

    def apart(names: Sequence[str]) -> int:
        return len({key([group.settings.get(name) for name in names]) for group in groups})

    for name in dict.fromkeys(name for group in groups for name in group.settings):
        if apart([*chosen, name]) > apart(chosen):
            chosen.append(name)
    return chosen


def _setting(runs: Sequence[RunRecord]) -> str:
    """Return data, model, partition, clients, rounds and seeds in one line, each with up to three values."""
    kinds = zip(*(_setting_of(run.config) for run in runs), strict=True)
    parts = [" or ".join(values) for values in map(dict.fromkeys, kinds) if len(values) <= 3]
    seeds = sorted({run.config.seed for run in runs})
    listed = f" ({', '.join(map(str, seeds))})" if len(seeds) <= 5 else ""
    return ", ".join([*parts, f"{counted(len(seeds), 'seed')}{listed}"])


def _setting_of(config: RunConfig) -> tuple[str, ...]:
    partition = Path(config.partition).name
    if partition == "classes":
        partition += f" ({config.classes_per_client} per client)"
    elif uses_alpha(partition):
        partition += f" (alpha {config.alpha:g})"
    imbalance = getattr(config, "imbalance", 1)
    long_tail = f", imbalance {imbalance:g}" if imbalance > 1 else ""
    unseen = config.clients - config.training_clients
    never = f", {unseen} of them never trained" if unseen else ""
    share = "" if config.participation == 1 else f", {100 * config.participation:g} % in each round"
    work = f"{config.local_steps} local steps" if config.local_steps else f"{config.local_epochs} local epochs"
    work = work.removesuffix("s") if work.startswith("1 ") else work
    return (
        f"{shown(config.dataset)}{long_tail}",
        f"model {joined(list(map(shown, config.client_models or [config.model])))}",
        f"partition {partition}",
        f"{config.clients} clients{never}{share}",
        f"{config.rounds} rounds of {work}",
    )


def _state(run: RunRecord) -> str:
    """Return the progress of a run in words."""
    if run.finished:
        return "finished"
    return f"{len(run.rounds)} of {run.config.rounds} rounds" if run.rounds else "no round yet"


def _final(run: RunRecord) -> str:
    """Return the last figure of a run, finished or not, with its protocol: the first of ``EVALUATED`` it has."""
    for protocol in protocols.EVALUATED:
        end = run.final(protocol) or next(iter(reversed(run.curve(protocol))), None)
        if end is not None:
            return f"{Measure(run.figure).printed(end.value)} ({protocol})"
    return "-"


def _overview(runs: Sequence[RunRecord]) -> Table:
    rows = []
    for run in runs:
        failed = sum(rounds.errors(rounds.lost(line)) for line in run.rounds if "failures" in line)
        names = [run.path.name, method(run.config.plugins), run.config.dataset, _state(run)]
        rows.append([*names, str(run.config.seed), _final(run), str(failed)])
    return Table(["run", "method", "data set", "state", "seed", "figure", "client failures"], rows, words=4)


def _machines(runs: Sequence[RunRecord]) -> Table:
    """Return the machines of the runs' processes, and fedcore's commit if it was a checkout."""
    runs_by_machine: dict[tuple[str, ...], set[str]] = {}
    for run in runs:
        for session in run.sessions:
            machine = mapping_in(session, "machine")
            values = (session.get("commit"), *(machine.get(name) for name in ("cpu", "gpu", "system", "cores")))
            runs_by_machine.setdefault(tuple(map(_short, values)), set()).add(run.path.name)
    rows = [[*values, str(len(names))] for values, names in runs_by_machine.items()]
    return Table(["commit", "processor", "GPU", "system", "cores", "runs"], rows, words=4)


def _versions(runs: Sequence[RunRecord]) -> Table:
    """Return the versions of installed packages, without packages of plugins that no run has."""
    used = {BASELINE, *(name for run in runs for name in run.config.plugins)}
    of_plugins = {name: point.dist.name for name, point in registry.available("plugin").items() if point.dist}
    idle = set(of_plugins.values()) - {package for name, package in of_plugins.items() if name in used}
    runs_by_version: dict[str, dict[str, list[str]]] = {}
    for run in runs:
        config = safe_yaml.read_yaml(_config_text(run))
        versions = mapping_in(config, "versions") if isinstance(config, dict) else {}
        for name, version in versions.items():
            if name not in idle:
                runs_by_version.setdefault(str(name), {}).setdefault(str(version), []).append(run.path.name)
    rows = [
        [name, version, "" if len(where) == len(runs) else f"{len(where)} of {len(runs)} runs"]
        for name, versions in sorted(runs_by_version.items())
        for version, where in versions.items()
    ]
    return Table(["package", "version", ""], rows, words=3)


def _config_text(run: RunRecord) -> str:
    return (run.path / "config.yaml").read_text(encoding="utf-8")


def _joined(omitted: Sequence[Omitted]) -> list[Omitted]:
    """Join the figures that are omitted for the same reason."""
    titles = by_value({entry.title: entry.reason for entry in omitted})
    return [Omitted("; ".join(names), reason) for reason, names in titles.items()]


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(value) or "none"
    return "-" if value is None else str(value)
