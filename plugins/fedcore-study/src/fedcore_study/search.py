"""A search for options by Optuna: trials, compared and pruned on the clients' held-out parts by ``best_by``.

With several seeds a trial is a run of each, and its figure the mean over them. The test set plays no part in it. The
study is kept in ``study.log``, a file of JSON lines: the same command goes on. Trials are proposed four at a time,
whatever the number of processors. Only a ``--parallel`` above four changes which trials a search proposes: it proposes
as many at a time as it runs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedcore import ConfigError, FedcoreError, RunConfig, UnknownNameError
from fedcore.tools import files, flag_of, full_name, process, protocols, registry, safe_yaml, settings
from fedcore_study.comparisons.measures import Measure, judge
from fedcore_study.sweeps.child import Task
from fedcore_study.sweeps.directory import ASKED, SEARCH, STUDY, SweepDirectory
from fedcore_study.sweeps.processes import Job, Start, run_jobs
from fedcore_study.sweeps.run import default_parallel, resolved
from fedcore_study.sweeps.spec import SweepSpec, axis_name, read_values
from fedcore_study.sweeps.warm import starting

if TYPE_CHECKING:
    from fedcore.data import Dataset

BEST = "best.yaml"

TOGETHER = 4
"""The least number of trials that are proposed together, from the results of the trials before them."""

NOTHING_HELD_OUT = "no round has this figure on held-out parts: the clients hold too few samples, or training diverged"

Listener = Callable[[int, str, Mapping[str, Any]], None]
"""Called with a trial's number, an event (``start``, ``finished``, ``pruned``, ``failed``), its details."""


@dataclass(frozen=True)
class Axis:
    """An option to search: from ``low`` to ``high``, on a logarithmic scale where ``log``, or one of ``choices``."""

    name: str
    low: float | int = 0
    high: float | int = 0
    log: bool = False
    choices: tuple[Any, ...] = ()

    def __str__(self) -> str:
        """Return the axis as ``--search`` takes it, without its name."""
        if self.choices:
            return ",".join(map(str, self.choices))
        return f"{self.low}..{self.high}" + ":log" * self.log

    @property
    def ends(self) -> tuple[Any, ...]:
        """The choices, or the two bounds."""
        return self.choices or (self.low, self.high)

    def suggest(self, trial: Any) -> Any:
        """Return a trial's value."""
        if self.choices:
            return self.choices[trial.suggest_categorical(self.name, range(len(self.choices)))]
        if isinstance(self.low, int) and isinstance(self.high, int):
            return trial.suggest_int(self.name, self.low, self.high, log=self.log)
        return trial.suggest_float(self.name, float(self.low), float(self.high), log=self.log)


@dataclass(frozen=True)
class Trial:
    """A trial that ended: ``value`` is its best figure on held-out parts, None where it gave none.

    Over several seeds it is the mean of each seed's best figure; of a pruned trial the best mean of a round.
    """

    number: int
    state: str
    value: float | None
    options: Mapping[str, Any]
    directories: Sequence[Path]
    """A run's for each seed."""

    @property
    def directory(self) -> Path:
        """The first seed's run."""
        return self.directories[0]


@dataclass(frozen=True)
class SearchResult:
    """All trials of a study, and the best of those that were finished; None without any."""

    directory: Path
    measure: Measure
    trials: list[Trial]
    best: Trial | None


def parse_search(text: str) -> Axis:
    """Read ``lr=0.001..0.1:log``, ``batch-size=8..64`` or ``plugin=moon,fedprox``.

    :raises ConfigError: the text has another form, or names no option of a run.
    """
    name, equals, values = text.partition("=")
    low, dots, high = values.partition("..")
    high, colon, scale = high.partition(":")
    axis = axis_name(name.strip())
    try:
        if not (equals and values) or scale not in ("", "log") or (colon and not scale):
            raise ValueError("neither a range nor values")
        if not dots:
            return Axis(axis, choices=tuple(read_values(values)))
        bounds = [float(part) if set(part) & set(".eE") else int(part) for part in (low, high)]
        if bounds[0] >= bounds[1] or (scale and bounds[0] <= 0):
            raise ValueError("the first bound must be the lower one, and above 0 on a logarithmic scale")
    except ValueError as error:
        raise ConfigError(
            f"--search {text!r}: write OPTION=LOW..HIGH, OPTION=LOW..HIGH:log or OPTION=VALUE,VALUE ({error})"
        ) from None
    return Axis(axis, bounds[0], bounds[1], bool(scale))


def check_search(spec: SweepSpec, axes: Sequence[Axis]) -> None:
    """Refuse a search that cannot work.

    :raises ConfigError: Optuna is not installed, runs have no held-out parts, an axis is no option of a trial, or a
        choice or bound is no value of its option.
    """
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError("--optuna needs optuna, which is not installed: pip install optuna")
    if not axes:
        raise ConfigError("--optuna has nothing to search; add --search lr=0.001..0.1:log, for example")
    names = [axis.name for axis in axes]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"--search {twice[0]} is given twice; give it once: a range, or all values as {twice[0]}=A,B")
    if spec.grid or spec.cases:
        raise ConfigError("--optuna takes --search, no --grid and no cases")
    base = spec.run({}, spec.seeds[0])
    _chooses(base)
    if not base.client_test_fraction and not base.partition.endswith(".json"):
        raise ConfigError("--optuna compares trials on the clients' held-out parts; add --client-test-fraction 0.2")
    if base.protocols and not base.validation_share and not {*protocols.HELD_OUT} & {*base.protocols}:
        raise ConfigError("--optuna compares trials by personal or global_local; add --protocol personal")
    unused = [axis.name for axis in axes if "." in axis.name and axis.name.rpartition(".")[0] not in base.plugins]
    if unused and "plugins" not in names:
        plugin = unused[0].rpartition(".")[0]
        if not (plugin in registry.available("plugin") or registry.package_of("plugin", plugin)):
            raise UnknownNameError("plugin", plugin, registry.available("plugin"), f"It stands in --search {unused[0]}")
        raise ConfigError(f"--search {unused[0]}: no trial has this plugin; add --plugin {plugin}")
    # A wrong value would spend the trials that draw it. Each is tried alone: two that do not fit cost one trial.
    combinations = next((axis.choices for axis in axes if axis.name == "plugins"), ())
    for choice in [{"plugins": chosen} for chosen in combinations] or [{}]:
        for axis in axes:
            for value in axis.ends:
                resolved(spec.run({**choice, axis.name: value}, spec.seeds[0]))


def _chooses(config: RunConfig) -> tuple[Measure, Dataset]:
    """Return the figure by which trials are compared, and the data set, whose task may bring figures of its own.

    :raises ConfigError: the run does not measure it.
    """
    from fedcore.data import load_dataset

    dataset = load_dataset(config.dataset, config.data_dir, config.task)
    own = dataset.task.metrics.items()
    return judge(config, {name: {True: -1, None: 0}.get(metric.lower_is_better, 1) for name, metric in own}), dataset


def search(
    spec: SweepSpec,
    axes: Sequence[Axis],
    trials: int,
    out: Path,
    *,
    listen: Listener = lambda number, event, details: None,
    parallel: int | None = None,
) -> SearchResult:
    """Run trials until so many of the study in ``out`` have ended; a trial that fails does not stop the others.

    Optuna's TPE sampler proposes the options, seeded with the runs' seed, for ``TOGETHER`` trials at a time, or
    ``parallel`` if that is more. A trial is pruned when its best figure is worse than the median, in the same round,
    of the trials before these that ran to their end: at least four, after a quarter of the rounds. Over several seeds
    the figure of a round is the mean over the seeds, as soon as all of them are through that round.

    :param spec: options of every trial, and the seeds of each.
    :param parallel: runs side by side; default one per core as far as memory allows, at most four; one on
        a CUDA device.
    :raises ConfigError: as :func:`check_search`; the study's file is damaged, or has other options or axes.
    """
    check_search(spec, axes)
    with contextlib.ExitStack() as stack:
        stack.enter_context(SweepDirectory(out).lock())
        _check_study(out / STUDY)
        start = stack.enter_context(starting())
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        base = spec.run({}, spec.seeds[0])
        measure, dataset = _chooses(base)
        parallel = parallel or min(TOGETHER, default_parallel([base]))
        workers = None if parallel == 1 else process.cores() // parallel if process.cores() > parallel else 0
        stack.callback(optuna.logging.set_verbosity, optuna.logging.get_verbosity())
        optuna.logging.set_verbosity(optuna.logging.ERROR)  # the listener reports trials
        study = optuna.create_study(
            study_name="fedcore",
            direction="maximize" if measure.sign > 0 else "minimize",
            storage=JournalStorage(JournalFileBackend(str(out / STUDY))),
            load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=base.rounds // 4),
        )
        _check_same(study, base, dataset, spec.seeds, axes, out / STUDY)
        # Trials of a process that was killed. Their runs tell their rounds again, which are in the study already.
        begun = [optuna.trial.Trial(study, trial._trial_id) for trial in study.trials if not trial.state.is_finished()]
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "The reported value is ignored")
        left = trials - sum(trial.state.is_finished() for trial in study.trials)
        while left > 0:
            # By the number of trials: a study that goes on proposes what one does that was never stopped.
            study.sampler = optuna.samplers.TPESampler(seed=spec.seeds[0] + len(study.trials))
            proposed = begun[:left] or [study.ask() for _ in range(min(max(TOGETHER, parallel), left))]
            begun = []
            batch = _Batch(spec, axes, measure, out.resolve(), proposed, workers, listen)
            interrupted = batch.run(parallel, start)
            for asked in batch.asked.values():
                if asked.state:
                    value = asked.value(measure) if asked.state == "complete" else None
                    study.tell(asked.trial, value, state=optuna.trial.TrialState[asked.state.upper()])
            if interrupted:
                raise KeyboardInterrupt
            left -= len(proposed)
    return _result(study, axes, measure, out, spec)


def _check_study(file: Path) -> None:
    """Refuse a file that was cut off, as by a full disk, or holds foreign bytes: Optuna would write on in it."""
    if not file.exists():
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("it is cut off")
                files.parse_json(line)["op_code"]
            except (ValueError, LookupError, TypeError) as error:
                raise ConfigError(
                    f"{file}: line {number} is damaged ({error}). Delete it and the lines after it, to go on without "
                    "the trials that end there; or name another --out, for a new search"
                ) from None


def _check_same(
    study: Any, base: RunConfig, dataset: Dataset, seeds: Sequence[int], axes: Sequence[Axis], file: Path
) -> None:
    """Refuse other options, samples or axes: trials could not be compared, and a choice is kept as its place."""
    from fedcore.data import data_digest

    defaults = settings(RunConfig())
    asked = {flag_of(name): value for name, value in settings(base).items() if value != defaults[name]}
    asked |= {"--seeds": ",".join(map(str, seeds))} if len(seeds) > 1 else {}
    asked["SHA-256 of the samples"] = data_digest(dataset)[:12]
    asked |= {f"{SEARCH}{axis.name}": str(axis) for axis in axes}
    kept = study.user_attrs.get(ASKED)
    if kept is None:
        study.set_user_attr(ASKED, asked)
        return
    for name in kept | asked:
        before, now = (values.get(name, "not given") for values in (kept, asked))
        if before != now:
            raise ConfigError(
                f"{file} is of another search: {name} was {before} and is {now} now. Give the same options to go on, "
                "or name another --out, for a new search"
            )


@dataclass
class _Asked:
    """A trial that was proposed and is under way."""

    trial: Any
    """Optuna's."""
    options: dict[str, Any]
    figures: dict[int, dict[int, float]]
    """The figures of the rounds until now, by seed and round."""
    left: int
    """The seeds whose runs have not ended."""
    begun: bool = False
    problem: str = ""
    """Why a run failed; the others then end after their round."""
    means: list[float] = field(default_factory=list)
    """The mean over the seeds of each round that all of them are through."""
    pruned: bool = False
    state: str = ""
    """How it ended, as Optuna names it; empty while it runs, and for good if it was interrupted."""

    def value(self, measure: Measure) -> float:
        """Return the mean over the seeds of each one's best figure; of a pruned trial the best mean of a round."""
        if self.pruned:
            return measure.best(self.means)
        return fmean(measure.best([*of_seed.values()]) for of_seed in self.figures.values())


class _Batch:
    """Trials that were proposed together. The study learns of their ends when all have ended."""

    def __init__(
        self,
        spec: SweepSpec,
        axes: Sequence[Axis],
        measure: Measure,
        out: Path,
        trials: Sequence[Any],
        workers: int | None,
        listen: Listener,
    ) -> None:
        self._spec, self._measure, self._out, self._workers, self._listen = spec, measure, out, workers, listen
        seeds = spec.seeds
        self.asked = {
            _name(trial.number): _Asked(trial, _drawn(spec, axes, trial), {seed: {} for seed in seeds}, len(seeds))
            for trial in trials
        }
        """In the order of the proposals."""
        self._runs = {
            name: (asked, seed)
            for trial, asked in self.asked.items()
            for seed, name in zip(seeds, _names(trial, seeds), strict=True)
        }

    def run(self, parallel: int, start: Start) -> bool:
        """Run the trials; returns whether they were interrupted. Options that make no run fail their trial."""
        jobs = []
        for name, (asked, seed) in self._runs.items():
            try:
                config = self._spec.run(asked.options, seed)
            except FedcoreError as error:
                self._end(asked, str(error))
                continue
            task = Task(str(self._out / "runs" / name), config.model_dump(mode="json"), self._workers, judged=True)
            jobs.append(Job(name, [task.as_text()], self._out / "logs" / f"{name}.log"))
        return run_jobs(jobs, parallel, self._hear, start)[1]

    def _hear(self, name: str, event: str, details: Mapping[str, Any]) -> bool:
        """Take an event of a run; returns False if its trial is pruned or has failed."""
        asked, seed = self._runs[name]
        if event == "start" and not asked.begun:
            asked.begun = True
            self._listen(asked.trial.number, "start", {"options": asked.options})
        elif event == "begun":
            for note in details["notes"]:
                self._listen(asked.trial.number, "note", {"message": note})
        elif event in ("finished", "failed"):
            self._end(asked, details["message"])
        elif event == "round" and (value := details["validation"]) is not None:
            round = details["round"]
            asked.figures[seed][round] = value
            if not asked.pruned and all(round in of_seed for of_seed in asked.figures.values()):
                asked.means.append(fmean(of_seed[round] for of_seed in asked.figures.values()))
                asked.trial.report(asked.means[-1], round - 1)
                asked.pruned = asked.trial.should_prune()
        return not (asked.pruned or asked.problem)

    def _end(self, asked: _Asked, problem: str) -> None:
        """Take the end of a run. After the last one keep the trial's end, and tell the listener.

        A trial also failed if a run of it gave no figure.
        """
        asked.left -= 1
        asked.problem = asked.problem or problem
        if asked.left:
            return
        if asked.problem or not all(asked.figures.values()):
            asked.state = "fail"
            self._listen(asked.trial.number, "failed", {"message": asked.problem or NOTHING_HELD_OUT})
        else:
            asked.state = "pruned" if asked.pruned else "complete"
            event = "pruned" if asked.pruned else "finished"
            self._listen(asked.trial.number, event, {"best": self._measure.printed(asked.value(self._measure))})


def _drawn(spec: SweepSpec, axes: Sequence[Axis], trial: Any) -> dict[str, Any]:
    """Return a trial's options. The plugins come first: an option of a plugin that the trial lacks is not drawn."""
    drawn = {axis.name: axis.suggest(trial) for axis in axes if axis.name in ("plugins", "trackers")}
    config = spec.run(drawn, spec.seeds[0])
    used = [*config.plugins, *config.trackers]
    for axis in axes:
        plugin = axis.name.rpartition(".")[0]
        if axis.name not in drawn and (not plugin or full_name(plugin, used) in used):
            drawn[axis.name] = axis.suggest(trial)
    return drawn


def _name(number: int) -> str:
    return f"trial-{number:04d}"


def _names(trial: str, seeds: Sequence[int]) -> list[str]:
    """Return the names of a trial's runs."""
    return [trial] if len(seeds) == 1 else [f"{trial}-seed-{seed}" for seed in seeds]


def _result(study: Any, axes: Sequence[Axis], measure: Measure, out: Path, spec: SweepSpec) -> SearchResult:
    choices = {axis.name: axis.choices for axis in axes}

    def options(drawn: Mapping[str, Any]) -> dict[str, Any]:
        return {name: choices[name][value] if choices[name] else value for name, value in drawn.items()}

    trials = [
        Trial(
            t.number,
            t.state.name.lower(),
            # Optuna keeps the last figure of a pruned trial, next to the best ones of others.
            measure.best([*t.intermediate_values.values()]) if t.state.name == "PRUNED" else t.value,
            options(t.params),
            [out / "runs" / name for name in _names(_name(t.number), spec.seeds)],
        )
        for t in study.trials
        if t.state.is_finished()
    ]
    done = [trial for trial in trials if trial.state == "complete"]
    best = max(done, key=lambda trial: measure.sign * (trial.value or 0.0), default=None)
    if best is not None:
        config = spec.run(best.options, spec.seeds[0])
        files.write_text(out / BEST, safe_yaml.write_yaml(config.model_dump(mode="json", exclude_defaults=True)))
    return SearchResult(out, measure, trials, best)
