"""Studies in Python: what the commands sweep and compare do, as functions of a script or notebook."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from fedcore import ConfigError
from fedcore_study.sweeps.directory import SweepDirectory, new_folder
from fedcore_study.sweeps.objects import SweepObjects
from fedcore_study.sweeps.spec import SweepSpec, changed, read_earlier, read_spec

if TYPE_CHECKING:
    import pandas

    from fedcore import RunResult
    from fedcore_study.sweeps.run import SweepResult

StudiedRuns: TypeAlias = "str | PathLike[str] | RunResult | SweepResult"
"""A run or sweep: its directory, or what ``fedcore.run`` or :func:`sweep` returned."""


def sweep(
    grid: Mapping[str, Any] | str | PathLike[str] | None = None,
    seeds: int | Sequence[int] | None = None,
    *,
    out: str | PathLike[str] | SweepResult | None = None,
    settings: Mapping[str, Any] | None = None,
    preset: str | None = None,
    parallel: int | None = None,
    quiet: bool = False,
    allow_code: bool = False,
    allow_outside: bool = False,
    **options: Any,
) -> SweepResult:
    """Run a grid of methods, settings and seeds, several runs side by side; finished runs are not run again.

    A run that fails does not stop the others: a warning names it.

    :param grid: axis -> values, for example ``{"plugin": ["fedavg", "moon"], "alpha": [0.1, 0.5]}``. An axis is
        ``plugin``, another option of a run, or ``PLUGIN.OPTION``. Plugins, ``model`` and ``dataset`` can be objects, as
        for :func:`fedcore.run`, also of a script or notebook. A path is that of a sweep's YAML file. Without a grid,
        the sweep in ``out`` goes on, with the options that are given here.
    :param seeds: how many (3 means 0, 1 and 2), or which; by default the seed 0.
    :param out: the sweep's folder, or its result, which also holds its objects; default ``sweeps/`` and the time.
    :param settings: ``PLUGIN.OPTION`` -> value, in each run that has the plugin.
    :param preset: the name of a known setting, whose options the grid and ``options`` replace.
    :param parallel: runs side by side; default one per core as far as memory allows, one on a CUDA device.
    :param quiet: show no progress.
    :param allow_code: import what a sweep's file, or a run that ``out`` holds already, names as ``module:...``.
    :param allow_outside: let trackers of these write outside of their directories.
    :param options: options of every run, as of :class:`fedcore.RunConfig`, such as ``rounds=10``. ``model``,
        ``plugins`` and ``dataset`` can be objects.
    :raises ConfigError: or a subclass, before anything runs.
    :raises Interrupted: Ctrl-C. The runs have stopped with checkpoints; the same call goes on.
    """
    from fedcore.tools import typed_code
    from fedcore_study.cli.sweep_display import script_display
    from fedcore_study.sweeps.run import check_named, run_sweep

    objects, place = SweepObjects(getattr(out, "objects", {})), None if out is None else run_folders(out)[0]
    spec, folder, goes_on = _asked_for(grid, seeds, place, settings or {}, options, objects, preset)
    file = out if goes_on else grid
    if spec is not None and isinstance(file, (str, PathLike)):  # the names of a result or mapping are the program's
        own = [*typed_code(objects.named(name, value) for name, value in options.items())]
        own += [f"{name}={value}" for name, value in (settings or {}).items()]
        check_named(spec, file, folder if goes_on else None, own, allow_code=allow_code, allow_outside=allow_outside)
    with script_display(quiet=quiet) as display:
        result = run_sweep(
            spec,
            folder,
            rounds=options.get("rounds") if goes_on else None,
            parallel=parallel,
            listen=display,
            allow_code=allow_code,
            allow_outside=allow_outside,
            objects=objects,
        )
    for outcome in result.named("failed"):
        warnings.warn(f"{outcome.name} failed: {outcome.message}", RuntimeWarning, stacklevel=2)
    if result.interrupted:
        from fedcore import Interrupted

        how = "the same call" if result.objects else result.how_to_go_on()
        raise Interrupted(f"the sweep in {result.directory} was interrupted; {how} goes on")
    return result


def compare(
    runs: StudiedRuns | Iterable[StudiedRuns],
    *,
    protocol: str | Sequence[str] = "global",
    metric: str = "accuracy",
    by: str | Sequence[str] = "plugin",
    tuned: str | Sequence[str] = (),
    labels: Mapping[str, str] | None = None,
    baseline: str | None = None,
    target: float | None = None,
    round: int | None = None,
    confidence: float = 0.95,
    clients: bool = False,
    reported: Sequence[str] = (),
    each: bool = False,
) -> pandas.DataFrame:
    """Compare methods over seeds: one row per method, with mean, deviation and the paired difference to a baseline.

    Columns: ``accuracy_mean``, ``accuracy_std`` and ``seeds``; ``difference``, with its interval from
    ``difference_low`` to ``difference_high`` and its pairs ``difference_seeds``; ``p`` of the paired t-test, ``p_holm``
    corrected for all comparisons of a table, and the ``verdict`` (better, worse, same, few: too few seeds, none: no
    pair; missing where the difference is the same on every seed);
    ``seeds_needed`` for a difference of this size to be found; ``seconds`` per round; further costs: ``cost_seconds``
    of all rounds, ``cost_MB-down``, ``cost_MB-up``, ``cost_memory`` in MiB, ``cost_epsilon``. Runs of other
    data or settings have rows of their own, and the index names these settings. ``attrs`` of the frame holds
    ``findings`` and ``notes`` in sentences, and ``ranks`` over several data sets.

    :param runs: runs or sweeps: directories or results, one or several.
    :param protocol: the protocol of the figure, such as ``global``; several give the index a first level. Under
        ``personal``, methods without own models have their global model's figure on the same samples.
    :param metric: the figure to compare, as ``summary.json`` names it: ``accuracy``, ``loss``, ``macro-f1``; over
        clients ``macro-f1_mean``, ``worst10``; a metric of yours as ``module:mine.Top2``. Its short name replaces
        ``accuracy`` in the columns.
    :param by: the options that make a row: ``plugin``, options of a run, or ``name``.
    :param tuned: options that each row has its own value of, such as ``["lr", "mu"]``; of several values the best on
        held-out parts counts. Default those that a search tried.
    :param labels: names for rows, by the names that they would have.
    :param baseline: the row that differences are to; default ``fedavg`` if there is one.
    :param target: an accuracy in (0, 1]; adds rounds and bytes until it is first reached.
    :param round: compare after so many rounds, unfinished runs too; default at the end of finished runs.
    :param confidence: of the intervals; the tests have the level that belongs to it.
    :param clients: add how the figure is spread over the clients, for a protocol that these measure, and as
        ``client_NAME`` that of each client with a name.
    :param reported: add figures of plugins' reports, such as ``["attack.success"]``.
    :param each: one row per run instead, in long form for plots.
    :raises ConfigError: nothing to compare, names that do not exist, or runs that contradict one another.
    """
    from fedcore_study.comparisons import frame
    from fedcore_study.comparisons.compare import check_reported, compare_protocols, measure_of
    from fedcore_study.comparisons.groups import distinct, option
    from fedcore_study.comparisons.records import find_runs
    from fedcore_study.comparisons.tuned import tuned_runs
    from fedcore_study.comparisons.usable import usable

    def warn(message: str) -> None:
        warnings.warn(message, RuntimeWarning, stacklevel=3)

    records = find_runs(run_folders(runs), warn)
    fields = [by] if isinstance(by, str) else list(by)
    own = [tuned] if isinstance(tuned, str) else list(tuned)
    protocols = [protocol] if isinstance(protocol, str) else list(protocol)
    if each:
        if len(protocols) > 1:
            raise ConfigError("each=True has one row per run: give one protocol")
        if clients or target is not None:
            raise ConfigError("each=True has one row per run, without clients and target: leave these out")
        (protocol,) = protocols
        measure, _ = measure_of(records, metric)
        of_rows = [option(name) for name in fields]
        chosen, own = tuned_runs(records, of_rows, own, warn)
        kept = distinct(usable(chosen, protocol, round, warn, measure.name), of_rows, warn)
        check_reported(kept, reported, round)
        asked = [measure.name, *reported]
        return frame.of_runs(kept, fields, protocol, round, asked, tuned=own, labels=labels or {})
    comparisons = compare_protocols(
        records,
        protocols,
        metric=metric,
        by=fields,
        tuned=own,
        labels=labels,
        baseline=baseline,
        target=target,
        round=round,
        confidence=confidence,
        by_client=clients,
        reported=reported,
        warn=warn,
    )
    return frame.of_protocols(comparisons)


def _asked_for(
    grid: Mapping[str, Any] | str | PathLike[str] | None,
    seeds: int | Sequence[int] | None,
    out: Path | None,
    settings: Mapping[str, Any],
    options: Mapping[str, Any],
    objects: SweepObjects,
    preset: str | None,
) -> tuple[SweepSpec | None, Path, bool]:
    """Return the grid, None for all that a folder has planned; the sweep's folder; and whether that sweep goes on."""
    base = {name: objects.named(name, value) for name, value in options.items()}
    if grid is None and out is not None and SweepDirectory.is_one(out):
        if not (base or settings or preset or seeds is not None):
            return None, out, True
        return changed(read_earlier(SweepDirectory(out).spec_file), base, {}, seeds, settings, preset=preset), out, True
    before = SweepSpec() if grid is None or isinstance(grid, Mapping) else read_spec(Path(grid))
    axes = grid if isinstance(grid, Mapping) else {}
    if grid is None and seeds is None:
        raise ConfigError("nothing to sweep: give a grid such as {'plugin': ['fedavg', 'moon']}, or seeds=3")
    plain = {name: _axis(objects, name, values) for name, values in axes.items()}
    spec = changed(before, base, plain, seeds, settings, preset=preset)
    usual = Path("sweeps") / Path(grid).stem if isinstance(grid, (str, PathLike)) else new_folder()
    return spec, out or usual, False


def _axis(objects: SweepObjects, name: str, values: Any) -> Any:
    """Return an axis's values by their names; a single value is an axis of one."""
    listed = values if isinstance(values, (list, tuple)) else [values]
    return [objects.named(name, value) for value in listed]


def listed_runs(runs: StudiedRuns | Iterable[StudiedRuns]) -> list[Any]:
    """Return one run or sweep, or several, as a list."""
    one = isinstance(runs, (str, PathLike)) or hasattr(runs, "directory")
    return [runs] if one else list(runs)  # type: ignore[arg-type]


def run_folders(runs: StudiedRuns | Iterable[StudiedRuns]) -> list[Path]:
    """Return the directories of runs and sweeps."""
    return [Path(getattr(run, "directory", run)) for run in listed_runs(runs)]
