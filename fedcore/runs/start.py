"""The one way to start a run: resolve the configuration, set up once, start the engine."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedcore.base import objects, registry
from fedcore.base.choices import public_share
from fedcore.base.config import RunConfig
from fedcore.base.errors import ConfigError, RunDirectoryError
from fedcore.base.user_modules import refuse_while_importing
from fedcore.client.worker_spec import WorkerSpec
from fedcore.data import DECLARED, Partition, load_partition
from fedcore.data.content import data_digest
from fedcore.engines.protocol import Engine
from fedcore.models.placement import Placement
from fedcore.runs.directory import RunDirectory
from fedcore.runs.opened import OpenedRun
from fedcore.runs.provenance import versions
from fedcore.runs.resolve import ResolvedRun, resolve, resolve_partition
from fedcore.runs.saved import HOW_TO_CHANGE, Binding, ConfigFile, SavedConfig, bound, partition_digest
from fedcore.runs.tracking import resolve_trackers
from fedcore.runs.trust import check_code, check_places, check_places_inside, code_in, places_in
from fedcore.server.scope import Federation
from fedcore.storage.files import sync_tree

CHANGEABLE = frozenset({"rounds", "patience", "workers", "data_dir", "device", "client_timeout"})
"""Options that can change when a run is resumed; of these only rounds, patience and device can change its bits."""

Make = Callable[[WorkerSpec], Engine]


@contextmanager
def begin(
    config: RunConfig | ResolvedRun, given: Partition | None = None, *, reached: bool = False
) -> Iterator[OpenedRun]:
    """Set up a new run and write its directory, configuration and partition; the block may train in it.

    The directory is this process's until the block ends. It is deleted again where the block raises before a round was
    finished.

    :param given: the partition, in place of the configured one.
    :param reached: the caller has an engine that reaches clients which hold their own data.
    :raises ConfigError: and its kin, before anything is written.
    """
    refuse_while_importing()
    run = config if isinstance(config, ResolvedRun) else resolve(config)
    run = run.updated(trackers=resolve_trackers(run.config.trackers))
    run, partition = _partitioned(run, given, reached)
    if run.config.patience is not None and not partition.test.sizes.any():
        raise ConfigError("--patience looks at the clients' held-out parts; add --client-test-fraction 0.2")
    with _chosen(run.config) as out:
        setup = run.updated(out=out).set_up()
        with RunDirectory.create(out, with_clients=not partition.is_declared) as directory:
            try:
                partition = partition.save(directory.partition_file)
                digests = _digest_of(partition), data_digest(run.dataset)
                file = ConfigFile.of(setup.config, *digests, versions(setup.config))
                directory.checkpoints.binding = file.binding
                directory.write_config(file)  # last: it makes the folder a run to be resumed
                yield OpenedRun(setup, run.dataset, partition, directory, file)
            except BaseException:
                if not directory.metrics.length:  # there is nothing to resume
                    directory.discard()
                raise


def _chosen(config: RunConfig) -> AbstractContextManager[Path]:
    """Return the new run directory's path: the configured one, or a reserved one of a default name."""
    if config.out is None:
        return RunDirectory.reserve(list(config.plugins))
    return nullcontext(RunDirectory.choose(config.out))


def reopen(
    path: Path,
    *,
    allow_code: bool,
    allow_outside: bool = True,
    reached: bool = False,
    changes: Mapping[str, Any] | None = None,
    out: Path | None = None,
) -> OpenedRun:
    """Read a run's directory and set the run up again.

    :param changes: options that take other values than in its configuration.
    :param allow_code: see :func:`fedcore.runs.experiment.resume`.
    :param allow_outside: likewise; it makes no difference where no tracker is started.
    :param reached: as for :func:`begin`.
    :param out: copy the run to this new directory and use the copy.
    :raises RunDirectoryError: there is no run in ``path``, its files do not belong together, or ``out`` is not empty.
    :raises ConfigError: it needs one of the permissions, or an engine that reaches its clients.
    """
    refuse_while_importing()
    directory = RunDirectory.open(path)
    saved, source = directory.read_saved(), path / "config.yaml"
    changes = changes or {}
    if not changes.keys() <= CHANGEABLE:
        raise ConfigError(f"only {', '.join(sorted(CHANGEABLE))} can change when a run is resumed")
    config = RunConfig.create({**saved.values, **changes, "out": str(directory.path)})
    check_code([name for name in code_in(config) if not objects.is_lent(name)], source, allow=allow_code)
    if not allow_outside:
        check_places(places_in(config, directory.path), source, allow=False)
        check_places_inside(config, directory.path)
    run = resolve(config)
    partition = load_partition(directory.partition_file, run.dataset)
    if partition.is_declared:
        _require_reached(reached, path)
        directory = directory.without_clients()
    data = data_digest(run.dataset)
    binding = Binding(bound(saved.values), _digest_of(partition), data, saved.changes)
    _check_digests(saved, binding, directory.path)
    file, changed = ConfigFile(saved.values, binding, saved.versions), tuple(changes)
    if out is not None:
        out = RunDirectory.choose(out)
        file = replace(file, values={**saved.values, "out": str(directory.path)})
        run, changed = run.updated(out=out), (*changed, "out")
    setup = run.set_up()
    if out is not None:
        directory = _copied(directory, out, with_clients=not partition.is_declared)
        if partition.file is not None:
            partition = partition.at(directory.path / partition.file.name)
    directory.checkpoints.binding = binding
    return OpenedRun(setup, run.dataset, partition, directory, file, changed)


@contextmanager
def federation(opened: OpenedRun, make: Make | None = None) -> Iterator[Federation]:
    """Start the configured engine, or the one that ``make`` gives, and close it when the block ends."""
    setup, directory = opened.setup, opened.directory
    dataset = Placement.of(setup.config, setup.model).dataset(opened.dataset)
    make = make or registry.resolve("engine", setup.config.engine)
    spec = WorkerSpec(setup.config, dataset, opened.partition, directory.clients.root)
    engine = registry.call("engine", setup.config.engine, make, spec)
    try:
        yield Federation(setup, dataset, opened.partition, engine, directory.clients)
    finally:
        engine.close()


def _copied(directory: RunDirectory, out: Path, *, with_clients: bool) -> RunDirectory:
    """Copy a run's directory.

    :raises RunDirectoryError: it cannot be written, or a process trains in one of them.
    """
    with RunDirectory.create(out, with_clients=with_clients) as made:
        try:
            with directory.lock():
                _copy_content(directory.path, made.path)
        except BaseException as error:
            made.discard()
            if isinstance(error, OSError):
                raise RunDirectoryError(f"{directory.path} cannot be copied to {out}: {error}") from error
            raise
    return made


def _copy_content(source: Path, target: Path) -> None:
    """Copy files and folders, which can be written to in the copy even where the source is an archive that cannot.

    They are on the disk when it returns.
    """
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, copy_function=shutil.copyfile)
    for folder, _, _ in os.walk(target):
        os.chmod(folder, os.stat(folder).st_mode | stat.S_IRWXU)
    sync_tree(target)


def _check_digests(saved: SavedConfig, binding: Binding, path: Path) -> None:
    """Refuse a partition or data that config.yaml was not written with."""
    what = {"partition": "partition.json", "data": "the data set's content"}
    differing = [words for name, words in what.items() if saved.digests[name] != binding.digests()[name]]
    if differing:
        raise RunDirectoryError(
            f"{path} does not hold together, it was begun with something else: {' and '.join(differing)}. "
            f"{HOW_TO_CHANGE}"
        )


def _digest_of(partition: Partition) -> str:
    return partition_digest(partition.sha256, partition.info)


def _partitioned(run: ResolvedRun, given: Partition | None, reached: bool) -> tuple[ResolvedRun, Partition]:
    """Return the partition, and the run with a configuration that names it."""
    if given is None:
        return run, resolve_partition(run.config, run.dataset)
    if given.num_clients != run.config.clients:
        raise ConfigError(f"clients is {run.config.clients}, but the partition has {given.num_clients} clients")
    if given.is_declared:
        _require_reached(reached, "this federation")
        if public_share(run.config.public) is not None:
            raise ConfigError(
                f"--public {run.config.public} is a share of the training set that simulated clients split, but these "
                "clients hold their own data; name a data set that the server and each of them have"
            )
        run = run.updated(partition=DECLARED)
    return run, given


def _require_reached(reached: bool, what: object) -> None:
    """Refuse the configured engine for clients that hold their own data: it cannot reach them."""
    if not reached:
        raise ConfigError(
            f"the clients of {what} hold their own data; fedcore federate server reaches them, and "
            "fedcore federate server --resume RUN_DIR goes on"
        )
