"""Reports in Python: what the command report does, as a function of a script or notebook."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path

from fedcore.tools import registry
from fedcore_study.tools import StudiedRuns, find_runs, listed_runs, run_folders


def report(
    runs: StudiedRuns | Iterable[StudiedRuns],
    out: str | PathLike[str] = "report.html",
    *,
    title: str | None = None,
    by: str | Sequence[str] = "plugin",
    tuned: str | Sequence[str] = (),
    labels: Mapping[str, str] | None = None,
    baseline: str | None = None,
    metric: str | None = None,
    protocol: str | None = None,
    data_dir: str | PathLike[str] | None = None,
    points: int = 500,
    reported: Sequence[str] = (),
    allow_code: bool = False,
    force: bool = False,
) -> Path:
    """Write one HTML page about runs, as the command ``fedcore report``; returns its path.

    :param runs: runs or sweeps: directories or results, one or several.
    :param title: the page's heading; default the names of the first runs.
    :param by: the options that distinguish methods: ``plugin``, or options of a run.
    :param tuned: options that each row has its own value of, as for ``fedcore_study.compare``.
    :param labels: names for rows, by the names that they would have.
    :param baseline: the row that differences are to; default ``fedavg`` where there is one.
    :param metric: the figure that stands wherever accuracy does, such as ``auroc``.
    :param protocol: the protocol that comes first; default ``personal`` or ``global``, whichever all methods have.
    :param data_dir: the folder of the data sets' files; default what each run used.
    :param points: test samples in the picture of the features; 0 leaves it out.
    :param reported: show figures of plugins' reports in the tables, such as ``["attack.success"]``.
    :param allow_code: import what the runs name as ``module:...``.
    :param force: overwrite an existing page.
    :raises ConfigError: or a subclass: no runs, or the page exists.
    """
    from fedcore_report.build import build, heading
    from fedcore_report.page import check_target, write_page

    page = Path(out)
    check_target(page, force=force)
    runs = listed_runs(runs)
    folders, notes = run_folders(runs), list[str]()
    with registry.lent({key: value for run in runs for key, value in getattr(run, "objects", {}).items()}):
        made = build(
            find_runs(folders, notes.append),
            notes,
            title=title or heading(folders),
            by=[by] if isinstance(by, str) else list(by),
            tuned=[tuned] if isinstance(tuned, str) else tuned,
            labels=labels,
            baseline=baseline,
            metric=metric,
            protocol=protocol,
            data_dir=None if data_dir is None else Path(data_dir),
            points=points,
            reported=reported,
            allow_code=allow_code,
        )
    for note in made.notes:
        warnings.warn(note, RuntimeWarning, stacklevel=2)
    write_page(made, page)
    return page
