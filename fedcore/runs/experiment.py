"""Run, resume or evaluate an experiment: the functions that Python programs and the command line call."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedcore.base.config import RunConfig
from fedcore.base.errors import ConfigError, RunDirectoryError
from fedcore.base.tensors import copy_into
from fedcore.base.threads import one_thread
from fedcore.base.user_modules import refuse_while_importing
from fedcore.data import Partition
from fedcore.models.placement import Placement, resolve_device
from fedcore.runs.cautions import (
    data_cautions,
    evaluation_cautions,
    option_cautions,
    schedule_cautions,
    version_cautions,
)
from fedcore.runs.checkpoint import Note
from fedcore.runs.given import DatasetObject, Given, ModelObject, PluginObjects, given_again, name_objects
from fedcore.runs.notebook import notebook_display
from fedcore.runs.opened import OpenedRun
from fedcore.runs.provenance import session
from fedcore.runs.resolve import ResolvedRun
from fedcore.runs.result import RunResult
from fedcore.runs.start import Make, begin, federation, reopen
from fedcore.runs.tracking import tracked
from fedcore.runs.training import Experiment, Interrupted
from fedcore.server.round import Notify
from fedcore.server.state import ServerState

__all__ = [
    "Experiment",
    "Interrupted",
    "RunResult",
    "evaluate_run",
    "go_on",
    "load_run",
    "resume",
    "run",
    "started",
]

UNFINISHED = (
    "the run was finished, as its summary.json says, but its last checkpoint is missing or damaged: what follows the "
    "one before it is computed again"
)


def run(
    config: RunConfig | ResolvedRun | None = None,
    *,
    model: ModelObject | None = None,
    plugins: PluginObjects | None = None,
    dataset: DatasetObject | None = None,
    notify: Notify | None = None,
    engine: Make | None = None,
    partition: Partition | None = None,
) -> RunResult:
    """Train as configured, in a new run directory.

    A run uses torch's global random generator and number of threads, which belong to the whole process. Threads of one
    program that call fedcore take turns, with a warning. What else the program does meanwhile is to draw from a
    ``torch.Generator`` of its own: a draw from the global one can change the run's numbers, so that the same seed gives
    other results. After each round fedcore compares the generator's state with the one that it left, and a note says
    where they differ; a draw while fedcore itself uses the generator leaves no trace.

    :param config: default a configuration without any option.
    :param model: in place of a name: a class of networks, a factory ``(num_classes, input_shape)``, or a network. If
        it is no ``SplitModel``, its last linear layer becomes the classifier.
    :param plugins: plugin classes, in a list or as a mapping to their options; names may stand among them.
    :param dataset: a :class:`~fedcore.data.Dataset` or its loader, arrays or tensors (x_train, y_train, x_test,
        y_test), or a pair (train, test) of torch's data sets.
    :param partition: who holds which samples, in place of the configured partition. A :meth:`Partition.declared` one is
        of clients that hold their own data; ``engine`` has to reach them.
    :param engine: makes the engine in place of the configured one; for engines that are objects of the caller's.
    :param notify: called with an event's name and details (``start``, ``client``, ``round``, ``done``); by default a
        notebook shows the progress.
    :raises ConfigError: and its kin, before anything is written.
    :raises RoundFailedError: too few usable updates; the directory holds the last finished round.
    :raises Interrupted: Ctrl-C; likewise. Without a finished round no error leaves a directory.
    """
    refuse_while_importing()
    config, given, notify = RunConfig() if config is None else config, Given(), notify or notebook_display()
    if not isinstance(config, (RunConfig, ResolvedRun)):
        raise ConfigError(f"fedcore.run got a {type(config).__name__}; give a RunConfig: fedcore.RunConfig(rounds=5)")
    if model is not None or plugins is not None or dataset is not None:
        if isinstance(config, ResolvedRun):
            raise ConfigError("a resolved run has its model, plugins and data set; give objects with a RunConfig")
        config, given = name_objects(config, model, plugins, dataset)
        changed = given.workers(config)
        config = config.model_copy(update=changed)
        if changed:
            _noting(notify or _only_notes)(given.note)
    with (
        one_thread(),
        given.lent(),
        started(config, notify=notify, engine=engine, partition=partition) as (experiment, state),
    ):
        return experiment.train(state)


@contextmanager
def started(
    config: RunConfig | ResolvedRun,
    *,
    notify: Notify | None = None,
    engine: Make | None = None,
    partition: Partition | None = None,
) -> Iterator[tuple[Experiment, ServerState]]:
    """Prepare a run in a new run directory and start its engine; for callers that go round by round."""
    with one_thread(), begin(config, partition, reached=engine is not None) as opened:
        initial = opened.initial()
        with _running(opened, initial, notify, engine) as experiment:
            yield experiment, initial


def resume(
    path: Path | str,
    *,
    model: ModelObject | None = None,
    plugins: PluginObjects | None = None,
    dataset: DatasetObject | None = None,
    notify: Notify | None = None,
    allow_code: bool = False,
    allow_outside: bool = False,
    engine: Make | None = None,
    changes: Mapping[str, Any] | None = None,
    out: Path | None = None,
) -> RunResult:
    """Go on with a run from its last checkpoint, with the same options and to the same bits.

    A checkpoint that is damaged, or names a client's state that is, is passed over for the one before it.

    :param model: the object that :func:`run` was given, likewise ``plugins`` and ``dataset``; needed for those that
        config.yaml names ``object:...``.
    :param notify: as in :func:`run`; also called with ``note`` and its ``message``.
    :param allow_code: import what its configuration names as ``module:...``; do so for a directory that you trust.
    :param allow_outside: let its trackers write, and its engine connect, where its configuration says, outside of the
        directory.
    :param engine: as in :func:`run`.
    :param changes: options of :data:`fedcore.runs.start.CHANGEABLE` with other values from here on, recorded in
        config.yaml. With more rounds the bits are those of a run of so many if neither the learning rate's schedule
        nor a method looks at their number.
    :param out: copy the run to this new directory and resume the copy; ``path`` stays unchanged.
    :raises RunDirectoryError: there is no run in ``path``, none of its checkpoints is whole, its files do not belong
        together, or it is being trained.
    :raises ConfigError: it needs one of the permissions.
    """
    path, notify = Path(path), notify or notebook_display()
    saved, given = given_again(path, model, plugins, dataset)
    if saved is not None and (changed := given.workers(saved)):
        changes = {**(changes or {}), **changed}
        _noting(notify)(given.note)
    with one_thread(), given.lent():
        opened = reopen(
            path,
            allow_code=allow_code,
            allow_outside=allow_outside,
            reached=engine is not None,
            changes=changes,
            out=out,
        )
        return go_on(opened, notify=notify, engine=engine)


def go_on(opened: OpenedRun, *, notify: Notify | None = None, engine: Make | None = None) -> RunResult:
    """Train what is left of a reopened run; see :func:`resume`."""
    note = _noting(notify)
    with one_thread(), opened.directory.lock():
        finished = opened.directory.read_summary(note) is not None
        state = opened.recover(note) or opened.initial()
        if finished and state.phase != "done" and not opened.changed:
            note(UNFINISHED)
        if "rounds" in opened.changed:
            before, _ = opened.changed["rounds"]
            for caution in schedule_cautions(before, opened.config, state.round):
                note(caution)
        with _running(opened, state, notify, engine) as experiment:
            opened.record_changes(state)
            return experiment.train(state)


def evaluate_run(
    path: Path | str,
    *,
    model: ModelObject | None = None,
    plugins: PluginObjects | None = None,
    dataset: DatasetObject | None = None,
    notify: Notify | None = None,
    allow_code: bool = False,
) -> dict[str, Any]:
    """Recompute the metrics of a run's last checkpoint; writes nothing.

    :param model: as for :func:`resume`, likewise ``plugins`` and ``dataset``.
    :param notify: called with ``note`` and its message where a damaged checkpoint was passed over.
    :param allow_code: as for :func:`resume`.
    :raises RunDirectoryError: there is no checkpoint.
    """
    path = Path(path)
    _, given = given_again(path, model, plugins, dataset)
    with one_thread(), given.lent():
        opened, note = reopen(path, allow_code=allow_code), _noting(notify)
        state = opened.last_state(note)
        recorded = sum("round" in record for record in opened.directory.read_metrics())
        if state.phase != "done" and opened.directory.read_summary(note) is not None:
            note(UNFINISHED)
        elif recorded > state.round:
            note(f"{recorded} rounds are recorded, and the last checkpoint is of {state.round}: that one is evaluated")
        with federation(opened) as running:
            return Experiment(running, opened.directory, _silent).final_metrics(state)


def load_run(
    path: Path | str,
    *,
    model: ModelObject | None = None,
    plugins: PluginObjects | None = None,
    dataset: DatasetObject | None = None,
    allow_code: bool = False,
) -> RunResult:
    """Return a finished run as :func:`run` returned it: figures, history, configuration and model; writes nothing.

    :param model: as for :func:`resume`, likewise ``plugins``, ``dataset`` and ``allow_code``.
    :raises RunDirectoryError: there is no finished run in ``path``, or its files do not belong together.
    """
    path = Path(path)
    _, given = given_again(path, model, plugins, dataset)
    with one_thread(), given.lent():
        opened = reopen(path, allow_code=allow_code)
        damage: list[str] = []
        summary = opened.directory.read_summary(damage.append)
        if summary is None:
            problem = damage[0] if damage else f"{path} is not finished; go on with it"
            raise RunDirectoryError(f"{problem}: {opened.directory.how_to_resume}")
        opened.directory.note_damaged_metrics(_noting(_only_notes))
        network = Placement.plain().model(opened.setup.model).eval()
        copy_into(network.state_dict(), opened.directory.read_model())
        return RunResult(summary["metrics"], network, opened.directory.path, summary, opened.config)


@contextmanager
def _running(opened: OpenedRun, state: ServerState, notify: Notify | None, make: Make | None) -> Iterator[Experiment]:
    notify = notify or _only_notes
    notes: Any = opened.partition.info["notes"]
    cautions = [*version_cautions(opened.config, opened.file.versions), *data_cautions(opened.dataset)]
    cautions += [] if state.round else evaluation_cautions(opened.setup, opened.partition)
    cautions += option_cautions(opened.config)
    notify(
        "start",
        {
            "directory": opened.directory.path,
            "config": opened.config,
            "round": state.round,
            "notes": [*notes, *cautions],
        },
    )
    with (
        tracked(opened.config, opened.directory.path, notify) as notify,
        federation(opened, make) as running,
    ):
        recorded = session(opened.config, opened.setup.model, resolve_device(opened.config.device))
        opened.directory.sessions.append(recorded)
        with Experiment(running, opened.directory, notify) as experiment:
            yield experiment


def _noting(notify: Notify | None) -> Note:
    """Return a message callback that calls ``notify``."""
    return lambda message: (notify or _silent)("note", {"message": message})


def _only_notes(event: str, details: Mapping[str, Any]) -> None:
    """Tell a caller that passed no ``notify``, for example that a tracker was switched off."""
    if event == "note":
        warnings.warn(details["message"], RuntimeWarning, stacklevel=2)


def _silent(event: str, details: Mapping[str, Any]) -> None:
    """Ignore all events."""
