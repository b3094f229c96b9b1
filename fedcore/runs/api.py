"""Run, resume or evaluate an experiment: the functions that Python programs and the command line call."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from fedcore.base import registry
from fedcore.base.config import RunConfig
from fedcore.base.errors import ConfigError
from fedcore.base.identity import preset_options
from fedcore.base.process import one_thread
from fedcore.base.registry import lent
from fedcore.data import Partition
from fedcore.runs.objects import (
    DatasetObject,
    MetricObjects,
    ModelObjects,
    PartitionObject,
    PluginObjects,
    count_of,
    name_objects,
    objects_again,
)
from fedcore.runs.progress import noting, only_notes
from fedcore.runs.result import RunResult
from fedcore.runs.run import Make, Run
from fedcore.runs.training import Experiment, OnRound
from fedcore.server.round import Notify
from fedcore.server.state import ServerState


def run(
    config: RunConfig | None = None,
    *,
    model: ModelObjects | None = None,
    plugins: PluginObjects | None = None,
    dataset: DatasetObject | None = None,
    partition: PartitionObject | None = None,
    engine: Make | str | None = None,
    metrics: MetricObjects | None = None,
    progress: bool = True,
    notify: Notify | None = None,
    on_round: OnRound | None = None,
    preset: str | None = None,
    fast_dev_run: bool = False,
    **options: Any,
) -> RunResult:
    """Train as configured, in a new run directory.

    ``fedcore.run(rounds=20, alpha=0.1, plugins="moon")`` takes the options as arguments. ``fedcore.run(config)`` takes
    a :class:`RunConfig`, such as the ``config`` of an earlier result; further arguments replace its options.

    A run uses the global random generators of torch, NumPy and Python, and torch's number of threads, which belong to
    the whole process. They are seeded wherever a network, a data set or a partitioner may draw from them, and restored
    after the run. Threads of one program that call fedcore take turns, with a warning. Other code of the program should
    draw from a generator of its own meanwhile: a draw from a global generator can change the run's numbers, so that the
    same seed gives other results. After each round fedcore compares the generators' states with those that it left. A
    note tells if they differ. A draw while fedcore itself uses a generator leaves no trace. What the program
    has set for torch, which are default dtype and device, ``torch.autocast`` and ``torch.no_grad``, changes no run.

    :param config: the options to start from; default the options' defaults.
    :param model: an object instead of a name: a class of networks, a factory ``(num_classes, input_shape)``, or a
        network. If the network is not a ``SplitModel``, its last linear layer becomes the classifier. Of a
        list of n models, client k gets number k mod n (``client_models``).
    :param plugins: a plugin's class or name, several in a list, or a mapping to their options.
    :param dataset: a :class:`~fedcore.data.Dataset` or its loader, arrays or tensors (x_train, y_train, x_test,
        y_test), or a pair (train, test) of torch's data sets.
    :param partition: a name, a partitioner, one array of positions in the training set per client, in a list or a
        mapping by the clients' names, or a :class:`Partition`. Arrays and a :class:`Partition` give the number of
        clients, also next to another number in ``config`` or ``preset``. In a :meth:`Partition.declared` partition the
        clients hold their own data; ``engine`` has to reach them.
    :param engine: a name, or a function that makes an engine.
    :param metrics: names or classes (:class:`fedcore.Metric`) of what an evaluation measures next to accuracy and loss.
    :param progress: show the progress: in a notebook below the cell, in a terminal as the command does, elsewhere as a
        line a minute on stderr.
    :param notify: called with an event's name and details (``start``, ``client``, ``round``, ``note``, ``done``,
        ``stopped``), instead of the progress.
    :param on_round: called after every round with its row of ``result.history``. If it returns True, the run ends after
        this round; other values end nothing. An exception ends the run, too; the round is saved.
    :param preset: the name of a known setting, such as ``"cifar10-moon"``, whose options the given ones replace.
    :param fast_dev_run: only try whether everything runs, on two batches of one client. It needs the package
        fedcore-console. The result's directory does not exist any more.
    :param options: options of :class:`RunConfig`, by name.
    :raises ConfigError: or a subclass. Nothing has been written by then.
    :raises CallbackError: ``on_round`` raised.
    :raises RoundFailedError: a round has too few usable updates. The directory holds the last finished round.
    :raises Interrupted: Ctrl-C. The directory holds the last finished round, too. Before the first finished round every
        error deletes the directory.
    """
    if config is not None and not isinstance(config, RunConfig):
        raise ConfigError(f"fedcore.run got a {type(config).__name__}; write options by name: fedcore.run(rounds=5)")
    if isinstance(engine, str):
        options["engine"], engine = engine, None
    config = RunConfig() if config is None else config
    known, options = ({} if preset is None else preset_options(preset)), {**count_of(partition), **options}
    if known or options:
        config = RunConfig.create({**known, **config.model_dump(exclude_unset=True), **options})
    config, objects = name_objects(config, model, plugins, dataset, metrics, partition)
    made = partition if isinstance(partition, Partition) else None
    with one_thread(), lent(objects), _display(notify, progress) as shown:
        if fast_dev_run:
            trial = registry.needed("feature", "fast_dev_run", "--fast-dev-run")
            tried: RunResult = trial(config, partition=made, engine=engine, notify=shown, on_round=on_round)
            return tried
        with Run.new(config, partition=made) as new:
            return new.train(notify=shown, make=engine, on_round=on_round)


@contextmanager
def started(
    config: RunConfig, *, notify: Notify | None = None, engine: Make | None = None
) -> Iterator[tuple[Experiment, ServerState]]:
    """Prepare a run in a new run directory and start its engine. It is for callers that go round by round."""
    with one_thread(), Run.new(config) as new:
        initial = new.initial()
        with new.started(initial, notify, engine) as experiment:
            yield experiment, initial


def resume(
    path: Path | str,
    *,
    model: ModelObjects | None = None,
    plugins: PluginObjects | None = None,
    dataset: DatasetObject | None = None,
    metrics: MetricObjects | None = None,
    progress: bool = True,
    notify: Notify | None = None,
    on_round: OnRound | None = None,
    allow_code: bool = False,
    allow_outside: bool = False,
    engine: Make | None = None,
    changes: Mapping[str, Any] | None = None,
    out: Path | str | None = None,
) -> RunResult:
    """Go on with a run from its last checkpoint, with the same options and to the same bits.

    If the last checkpoint or a client's state that it names is damaged, the run goes on from the checkpoint before.

    :param model: the object that was passed to :func:`run`. It is needed if config.yaml names it ``object:...``.
    :param plugins: the plugins that were passed to :func:`run`, as for ``model``. Options given with them have to be
        those of the run.
    :param dataset: the data set that was passed to :func:`run`, as for ``model``.
    :param metrics: metrics that replace the run's own from now on. They are needed, too, if config.yaml names them
        ``object:...``.
    :param progress: as in :func:`run`.
    :param notify: as in :func:`run`.
    :param on_round: as in :func:`run`.
    :param allow_code: import code that the run's configuration names as ``module:...``. Use it only for a directory
        that you trust.
    :param allow_outside: let the run's trackers write, and its engine connect, outside of the directory, as its
        configuration says.
    :param engine: as in :func:`run`.
    :param changes: new values for options of :data:`fedcore.base.identity.CHANGEABLE`; config.yaml records them. A run
        with more rounds has the same bits as a new run with so many rounds, if neither the learning rate's schedule nor
        a method depends on their number.
    :param out: copy the run to this new directory and resume the copy; ``path`` stays unchanged.
    :raises RunDirectoryError: ``path`` holds no run, none of its checkpoints is whole, its files do not belong
        together, or another process trains it.
    :raises ConfigError: the run needs one of the permissions.
    """
    out = None if out is None else Path(os.path.expanduser(out))
    again = _reopened(path, model, plugins, dataset, allow_code, metrics, changes, allow_outside=allow_outside, out=out)
    with again as reopened, _display(notify, progress) as shown:
        return reopened.train(notify=shown, make=engine, on_round=on_round)


@contextmanager
def _display(notify: Notify | None, progress: bool) -> Iterator[Notify]:
    """Yield the function that follows a run: the caller's, or the display that suits this program."""
    if notify is not None or not progress:
        yield notify or only_notes
        return
    from fedcore.runs.terminal import script_display  # here: it imports rich

    with script_display() as display:
        yield display


def evaluate_run(
    path: Path | str,
    *,
    model: ModelObjects | None = None,
    plugins: PluginObjects | None = None,
    dataset: DatasetObject | None = None,
    metrics: MetricObjects | None = None,
    notify: Notify | None = None,
    allow_code: bool = False,
) -> dict[str, Any]:
    """Compute the metrics of a run's last checkpoint again. It writes nothing.

    The other arguments are as for :func:`resume`.

    :param notify: called with ``note`` and its message if a damaged checkpoint was skipped, or if the CPU takes the
        place of a CUDA device that this machine does not have.
    :returns: ``metrics`` as in ``summary.json``: the figures by protocol. Other entries are ``global_reason``, if there
        is no global model, and the clients that failed.
    :raises RunDirectoryError: there is no checkpoint.
    """
    with _reopened(path, model, plugins, dataset, allow_code, metrics, reads=True) as reopened:
        return reopened.evaluate(notify=notify)


def load_run(
    path: Path | str,
    *,
    model: ModelObjects | None = None,
    plugins: PluginObjects | None = None,
    dataset: DatasetObject | None = None,
    metrics: MetricObjects | None = None,
    allow_code: bool = False,
) -> RunResult:
    """Return a finished run as :func:`run` returned it: figures, history, configuration and model. It writes nothing.

    The arguments are as for :func:`resume`.

    :raises RunDirectoryError: there is no finished run in ``path``, or its files do not belong together.
    """
    with _reopened(path, model, plugins, dataset, allow_code, metrics, reads=True) as reopened:
        return reopened.result()


def client_model(
    path: Path | str,
    client: int,
    *,
    model: ModelObjects | None = None,
    plugins: PluginObjects | None = None,
    dataset: DatasetObject | None = None,
    allow_code: bool = False,
) -> nn.Module:
    """Return a client's own model after a run's last checkpoint, on the CPU, in eval mode. It writes nothing.

    It is the model of the protocol ``personal``, and returns (features, logits). A client that never trained has the
    global model, or what the method makes of that on its data (FedBABU). The other arguments are as for :func:`resume`.

    :param client: the client's number, from 0.
    :raises ConfigError: the clients of the run have no models of their own, the run has no such client, or the package
        fedcore-export, which makes the model, is not installed.
    :raises RunDirectoryError: there is no run in ``path``, or it has no checkpoint.
    :raises PluginCallError: ``personal_model`` raised.
    """
    with _reopened(path, model, plugins, dataset, allow_code, reads=True) as reopened:
        own_model = registry.needed("feature", "own_model", "client_model")
        network: nn.Module = own_model(reopened, client, noting(only_notes))[0]
        return network


@contextmanager
def _reopened(
    path: Path | str,
    model: ModelObjects | None,
    plugins: PluginObjects | None,
    dataset: DatasetObject | None,
    allow_code: bool,
    metrics: MetricObjects | None = None,
    changes: Mapping[str, Any] | None = None,
    **how: Any,
) -> Iterator[Run]:
    """Open a run, with the objects that its configuration names.

    :param how: see :meth:`Run.open`.
    """
    path, changes = Path(os.path.expanduser(path)), dict(changes or {})
    again = objects_again(path, model, plugins, dataset)
    if metrics is not None:
        config, measured = name_objects(RunConfig(), metrics=metrics)
        again |= measured
        changes["metrics"] = config.metrics
    with one_thread(), lent(again):
        yield Run.open(path, allow_code=allow_code, changes=changes, **how)
