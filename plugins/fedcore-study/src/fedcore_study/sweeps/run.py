"""A whole sweep: plan, check, run the unfinished runs, report. Imports no torch until it plans."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcore import ConfigError, FedcoreError, RunConfig, RunDirectoryError
from fedcore.tools import code_in, key, process, registry, saved, settings
from fedcore_study.sweeps.child import Task
from fedcore_study.sweeps.cluster import submit_jobs
from fedcore_study.sweeps.directory import SweepDirectory
from fedcore_study.sweeps.objects import SweepObjects, check_objects
from fedcore_study.sweeps.processes import Job, Listener, Outcome, run_jobs
from fedcore_study.sweeps.spec import SweepSpec
from fedcore_study.sweeps.warm import starting

if TYPE_CHECKING:
    from fedcore.data import Dataset
    from fedcore.tools import PluginSet

MEMORY_PER_RUN = 1.5 * 2**30
"""Bytes that a run is taken to need, for the default of ``parallel``: torch and a data set of CIFAR's size."""

LOADED = ("dataset", "model", "augment", "public", "precision")
"""Options for which a plan loads the data again, next to the data folder, the engine and the device."""

COMBINED = (
    *("plugins", "projection", "weights", "buffers", "optimizer", "local_epochs", "local_steps"),
    *("system", "clients", "participation", "min_clients"),
)
"""Options on which it depends whether plugins, model and data can be combined."""


@dataclass(frozen=True, repr=False)
class SweepResult:
    """The outcomes of a sweep's runs.

    :param outcomes: of the runs that were asked for, in order; those that were finished before took 0 seconds.
    """

    directory: Path
    outcomes: list[Outcome]
    interrupted: bool
    objects: Mapping[registry.Key, Any] = field(default_factory=dict)
    """What the program gave instead of names, for :func:`fedcore_study.report`."""

    def __repr__(self) -> str:
        """Return one line: how many runs ended how, and the folder."""
        counts = Counter(outcome.status for outcome in self.outcomes)
        ended = ", ".join(f"{number} {status}" for status, number in counts.items())
        return f"<SweepResult {len(self.outcomes)} runs: {ended}; {self.directory}>"

    def named(self, status: str) -> list[Outcome]:
        """Return the runs with one status."""
        return [outcome for outcome in self.outcomes if outcome.status == status]

    def how_to_go_on(self) -> str:
        """Return the command that goes on with the sweep, with the flags that its unfinished runs need."""
        directory = SweepDirectory(self.directory)
        plan = directory.plan()
        names = [outcome.name for outcome in self.outcomes if outcome.status != "finished"]
        left = [(directory.run_directory(name), plan[name]) for name in names]  # their code was permitted
        flags = " --allow-code" * any(code_in(config) for _, config in left)
        flags += " --allow-outside" * any(saved.places_in(config, folder) for folder, config in left)
        return f"fedcore sweep {shlex.quote(str(self.directory))}{flags}"


def check_named(
    spec: SweepSpec,
    source: object,
    folder: Path | None,
    own: Collection[str],
    *,
    allow_code: bool,
    allow_outside: bool,
) -> None:
    """Refuse code that a sweep's file or folder names, and places that a folder names, unless the user allows them.

    :param source: the file or the folder, for the message.
    :param folder: the folder of a sweep that is extended; None for a new sweep.
    :param own: names and settings that the user gave directly.
    :raises ConfigError: with the first name or place, and the flag that allows it.
    """
    configs = [config for _, config in spec.cells()]
    saved.check_code((name for config in configs for name in code_in(config)), source, allow=allow_code, own=own)
    if folder is not None:
        places = (place for config in configs for place in saved.places_in(config, folder))
        saved.check_places(places, source, allow=allow_outside, own=own)


def resolved(config: RunConfig, plugins: PluginSet | None = None) -> RunConfig:
    """Return a run with all options of its plugins and trackers, as a sweep's plan has it; loads no data.

    :param plugins: the run's, where they are created already.
    :raises ConfigError: or a subclass. A name or option is unknown, or plugins cannot be combined.
    """
    from fedcore.tools import PluginSet, plugin_options, resolve_trackers

    options = plugin_options(config, plugins or PluginSet.create(config.plugins))
    return config.model_copy(update={"plugins": options, "trackers": resolve_trackers(config.trackers)})


def plan_sweep(spec: SweepSpec) -> list[tuple[str, RunConfig]]:
    """Return the runs of a sweep, each with a readable name, checked as far as possible before they run.

    :raises ConfigError: or a subclass, with the run that cannot work: names, options, conflicts, missing data.
    """
    from fedcore.client import Setup
    from fedcore.tools import PluginSet, resolve_config

    planned: list[tuple[str, RunConfig]] = []
    loaded: dict[str, tuple[RunConfig, Dataset]] = {}
    checked: set[str] = set()
    for label, config in spec.cells():
        try:
            plugins = PluginSet.create(config.plugins)
            config = resolved(config, plugins)
            values = settings(config)
            data = key([str(config.data_dir), config.engine, config.device, *(values[name] for name in LOADED)])
            if data not in loaded:
                loaded[data] = resolve_config(config)
            combined = key([data, *(values.get(name) for name in COMBINED)])
            if combined not in checked:
                loaded_dataset, dataset = loaded[data]
                resolved_names = {name: getattr(loaded_dataset, name) for name in ("model", "device")}
                Setup.build(config.model_copy(update=resolved_names), dataset, plugins)
                checked.add(combined)
        except FedcoreError as error:
            raise type(error)(f"run {label}: {error}") if type(error) is ConfigError else error from None
        planned.append((label, config))
    return planned


def run_sweep(
    spec: SweepSpec | None,
    out: Path,
    *,
    rounds: int | None = None,
    parallel: int | None = None,
    listen: Listener = lambda name, event, details: None,
    allow_code: bool = False,
    allow_outside: bool = False,
    submit: str | None = None,
    parameters: Mapping[str, Any] | None = None,
    objects: SweepObjects | None = None,
) -> SweepResult:
    """Run the unfinished runs of a sweep, each in a process of its own.

    Every stream of random numbers derives from a run's seed, so that runs that differ in the method only have the
    same clients, cohorts and initial weights.

    :param spec: None goes on with everything that was ever planned in ``out``.
    :param rounds: next to ``spec``: everything that was ever planned in ``out`` gets at least so many rounds. Finished
        runs go on.
    :param parallel: runs side by side; default one per core as far as memory allows, one on a CUDA device.
    :param listen: called with a run's name, an event (``plan``, ``start``, ``round``, an outcome's status), details.
    :param allow_code: import the code that runs in ``out`` name as ``module:...``; names of ``spec`` are yours.
    :param allow_outside: let their trackers write outside of their directories.
    :param submit: run each as a job of submitit's on ``slurm`` or ``local``, with ``parameters`` of its executor.
    :param objects: the objects that names of ``spec`` stand for.
    :raises ConfigError: or a subclass. Nothing has run by then.
    """
    objects = SweepObjects() if objects is None else objects
    # The process that forks the runs imports torch while this one does, to plan.
    with registry.lent(objects.objects), starting() if submit is None else contextlib.nullcontext() as start:
        sent = objects.as_bytes()
        planned = plan_sweep(spec) if spec else []
        directory = SweepDirectory(out)
        if spec is None:
            directory.plan()  # there must be one, before a lock file is written
        with directory.lock():
            if spec is None:
                configs = directory.plan()
                names = list(configs)
                _require_checkpoints(directory, configs, names)
            else:
                _require_checkpoints(directory, *directory.extended(planned, rounds))
                names = directory.add(spec.as_yaml(), planned, rounds)
                configs = directory.plan()
            check_objects(objects.objects, {directory.run_directory(name): configs[name] for name in names})
            left = [name for name in names if directory.standing(name, configs[name].rounds) != "finished"]
            own = [config for _, config in planned]
            _check_permissions(directory, {name: configs[name] for name in left}, own, allow_code, allow_outside)
            if parallel is None:  # a cluster's own queue decides
                parallel = len(left) if submit == "slurm" else default_parallel(configs[name] for name in left)
            parallel = max(1, min(parallel, len(left)))
            asked = {name: configs[name].rounds for name in names}
            longer = [name for name in left if directory.standing(name) == "finished"]
            plan = {"runs": names, "left": left, "longer": longer, "parallel": parallel, "rounds": asked}
            listen("", "plan", {**plan, "out": directory.path})

            def listening(name: str, event: str, details: Mapping[str, Any]) -> Any:
                if event in ("start", "failed"):
                    directory.keep_failure(name, details.get("message", ""))
                return listen(name, event, details)

            # A run next to others trains by itself: workers of its own would only add memory and start-up.
            workers = 0 if parallel > 1 and submit != "slurm" else None
            jobs = []
            for name in left:
                values = configs[name].model_dump(mode="json")
                task = Task(
                    str(directory.run_directory(name)), values, workers, allow_code, allow_outside, objects=len(sent)
                )
                jobs.append(Job(name, [task.as_text()], directory.log_file(name), sent))
            if submit is not None:
                files = directory.path / "jobs"
                ran, interrupted = submit_jobs(
                    jobs, submit, files, parallel=parallel, parameters=parameters or {}, listen=listening
                )
            else:
                assert start is not None
                ran, interrupted = run_jobs(jobs, parallel, listening, start)
    by_name = {outcome.name: outcome for outcome in ran}
    outcomes = [by_name.get(name) or Outcome(name, "finished") for name in names]
    return SweepResult(directory.path, outcomes, interrupted, objects.objects)


def _require_checkpoints(directory: SweepDirectory, plan: Mapping[str, RunConfig], names: Iterable[str]) -> None:
    """Refuse finished runs that get more rounds, but have no checkpoint to go on from.

    :raises RunDirectoryError: with the commands that help.
    """
    stuck = [
        directory.run_directory(name)
        for name in names
        if directory.standing(name) == "finished"
        and directory.standing(name, plan[name].rounds) != "finished"
        and not any((directory.run_directory(name) / "checkpoint").glob("*.safetensors"))
    ]
    if stuck:
        paths = " ".join(shlex.quote(os.path.relpath(path)) for path in stuck[:4]) + " ..." * (len(stuck) > 4)
        raise RunDirectoryError(
            f"{len(stuck)} finished runs are to get more rounds, but their checkpoints were deleted (runs clean). "
            f"Sweep in a new folder (--out), or delete these runs to train them again: fedcore runs rm {paths}"
        )


def _check_permissions(
    directory: SweepDirectory, left: Mapping[str, RunConfig], own: Sequence[RunConfig], code: bool, outside: bool
) -> None:
    """Refuse code and places that runs in the folder name, but the sweep that was asked for does not."""
    named = {name for config in own for name in code_in(config)}
    for name, config in left.items():
        folder, source = directory.run_directory(name), f"{directory.path / 'sweep.json'}: run {name}"
        saved.check_code(code_in(config), source, allow=code, own=named)
        if config.trackers:
            places = {place for one in own for place in saved.places_in(one, folder)}
            saved.check_places(saved.places_in(config, folder), source, allow=outside, own=places)


def default_parallel(configs: Iterable[RunConfig]) -> int:
    """Return how many runs go side by side: one per core as far as memory allows, one on a CUDA device."""
    from fedcore.models import resolve_device

    if any(resolve_device(config.device).type == "cuda" for config in configs):
        return 1
    return max(1, min(process.cores(), int(available_memory() / MEMORY_PER_RUN)))


def available_memory() -> float:
    """Return the bytes of memory that can be had without swapping, a container's limit considered."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        free = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:
        group = Path("/sys/fs/cgroup")
        limit = float((group / "memory.max").read_text())  # "max", no number, where there is no limit
        free = min(free, limit - float((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return free
