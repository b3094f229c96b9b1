"""One run: its configuration, plugins, data, partition, model and directory, from the first round to its result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from fedcore.base import registry
from fedcore.base.config import RunConfig
from fedcore.base.errors import ConfigError, RunDirectoryError
from fedcore.base.identity import CHANGEABLE, judged_by, short_name
from fedcore.base.metrics import sign
from fedcore.base.process import one_thread
from fedcore.base.registry import refuse_while_importing
from fedcore.base.tensors import clone
from fedcore.client.messages import ClientSite, Engine
from fedcore.client.setup import Setup
from fedcore.data import DECLARED, Dataset, Partition, fitted, load_partition
from fedcore.data.dataset import data_digest
from fedcore.models.placement import Placement, has_device, resolve_device
from fedcore.runs.cautions import (
    evaluation_cautions,
    option_cautions,
    schedule_cautions,
    version_cautions,
)
from fedcore.runs.checkpoint import Note
from fedcore.runs.directory import RunDirectory
from fedcore.runs.evaluation import Evaluator
from fedcore.runs.progress import noting, only_notes
from fedcore.runs.provenance import COMMIT, session, versions
from fedcore.runs.resolve import (
    require_held_out,
    resolve_config,
    resolve_partition,
    resolve_trackers,
    set_up,
    tracking,
)
from fedcore.runs.result import RunResult
from fedcore.runs.resuming import Finished, Refused, TrainOn, next_state
from fedcore.runs.rounds import may_be_unsaved
from fedcore.runs.saved import (
    SavedConfig,
    check_code,
    check_places,
    code_in,
    partition_digest,
    places_in,
)
from fedcore.runs.training import Experiment, OnRound
from fedcore.server.round import Notify
from fedcore.server.scope import Federation
from fedcore.server.state import ServerState

Make = Callable[[ClientSite], Engine]
"""Makes an engine for the clients of a run."""


@dataclass(frozen=True)
class Run:
    """One run, in memory and on the disk. :meth:`new` and :meth:`open` make it."""

    setup: Setup
    dataset: Dataset
    partition: Partition
    directory: RunDirectory
    file: SavedConfig
    """The run's config.yaml. The run's other files have to agree with it."""
    asked: frozenset[str] = frozenset()
    """The names of the options that were given anew at a resume. They may keep their values."""

    @classmethod
    @contextmanager
    def new(
        cls, config: RunConfig, *, dataset: Dataset | None = None, partition: Partition | None = None
    ) -> Iterator[Self]:
        """Begin a run: write its directory, configuration and partition. The block may train it.

        The directory belongs to this process until the block ends. It is deleted again if the block raises before a
        round was finished.

        :param dataset: the configured data set, if it is loaded already.
        :param partition: a partition instead of the configured one.
        :raises ConfigError: or a subclass. Nothing has been written by then.
        """
        refuse_while_importing()
        config, dataset = resolve_config(config, dataset)
        config = config.model_copy(update={"trackers": resolve_trackers(config.trackers)})
        partition = resolve_partition(config, dataset, partition)
        dataset = fitted(dataset, partition, config.training_clients)
        if partition.is_declared:
            config = config.model_copy(update={"partition": DECLARED})
        if config.unseen_clients and not partition.test.sizes[config.training_clients :].any():
            raise ConfigError(
                "--unseen-clients: none holds samples out; add --client-test-fraction 0.2 or more, or name larger ones"
            )
        for option, is_set in (
            ("--validation-share", config.validation_share > 0),
            ("--patience", config.patience is not None),
            ("--best-by", config.best_by != "accuracy"),
            ("--keep best", config.keep == "best"),
        ):
            if is_set:
                require_held_out(option, config, partition)
        setup, prepared = set_up(config, dataset, partition)
        judge = judged_by(config, dataset.task.metrics)
        if not sign(judge, setup.metrics):  # a wrong one is refused before anything is written
            raise ConfigError(f"--best-by {judge}: neither more nor less of it is better; choose another figure")
        if config.keep == "best" and setup.layout.personal:
            raise ConfigError(
                f"--keep best keeps a global model, but parameters such as {min(setup.layout.personal)!r} stay on the "
                "clients; leave it out"
            )
        names = [config.name] if config.name else map(short_name, config.plugins)
        # The digests take their time. A process that is killed meanwhile leaves no folder.
        digests = _digest_of(partition), data_digest(dataset), versions(setup.config)
        with RunDirectory.create(config.out, names, with_clients=not partition.is_declared) as directory:
            setup = replace(setup, config=setup.config.model_copy(update={"out": directory.path}))
            partition.save(directory.partition_file)
            file = SavedConfig(setup.config.written(), *digests)
            directory.write_config(file)  # last: with this file the folder is a run that can be resumed
            yield cls(setup, setup.placement.on_host(prepared), partition, directory, file)

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        allow_code: bool,
        allow_outside: bool = True,
        changes: Mapping[str, Any] | None = None,
        out: Path | None = None,
        reads: bool = False,
    ) -> Self:
        """Read a run's directory and set the run up again.

        :param allow_code: see :func:`fedcore.resume`.
        :param allow_outside: see :func:`fedcore.resume`. It makes no difference if no tracker is started.
        :param changes: new values for options of the run's configuration.
        :param out: copy the run to this new directory and use the copy.
        :param reads: the run will not be trained. If this machine lacks its CUDA device, the CPU takes its place.
        :raises RunDirectoryError: there is no run in ``path``, its files do not belong together, or ``out`` is not
            empty.
        :raises ConfigError: the run needs one of the permissions, or an engine that reaches its clients.
        """
        refuse_while_importing()
        directory = RunDirectory.open(path)
        saved, source = directory.read_saved(), path / "config.yaml"
        changes = changes or {}
        if not changes.keys() <= CHANGEABLE:
            raise ConfigError(f"only {', '.join(sorted(CHANGEABLE))} can change when a run is resumed")
        config = RunConfig.create({**saved.values, **changes, "out": str(directory.path)})
        if reads and not has_device(config.device):
            config = config.model_copy(update={"device": "cpu"})
        if config.precision == "tf32" and resolve_device(config.device).type == "cpu":
            config = config.model_copy(update={"precision": "float32"})  # a CPU has no TF32
        code = [name for name in code_in(config) if not registry.is_lent(name)]
        check_code(code, source, allow=allow_code, own=changes.get("metrics", ()))
        if not allow_outside:
            check_places(places_in(config, directory.path), source, allow=False)
        config, dataset = resolve_config(config)
        partition = load_partition(directory.partition_file, dataset)
        dataset = fitted(dataset, partition, config.training_clients)
        if partition.is_declared:
            directory = RunDirectory(directory.path, with_clients=False)  # they keep their states themselves
        saved.require(_digest_of(partition), data_digest(dataset), directory.path)
        if changes.get("patience") is not None:
            require_held_out("--patience", config, partition)
        file, asked = saved, {*changes}
        if out is not None:
            out = out.resolve()
            file = replace(saved, values={**saved.values, "out": str(directory.path)})  # where it is now
            config = config.model_copy(update={"out": out})
            asked.add("out")
        setup, dataset = set_up(config, dataset, partition)
        dataset = setup.placement.on_host(dataset)
        run = cls(setup, dataset, partition, directory, file, frozenset(asked))
        if out is not None:
            if latest := directory.checkpoints.load():
                run._next(latest)
            elif directory.read_summary() is None:
                run._unsaved_rounds()
            directory = directory.copied(out)
            run = replace(run, directory=directory)
        directory.checkpoints.binding = saved.binding
        return run

    @property
    def config(self) -> RunConfig:
        """The run's configuration, as everything in this process uses it."""
        return self.setup.config

    @property
    def changes(self) -> dict[str, tuple[Any, Any]]:
        """The options whose values are others from here on, with the values before and after."""
        now = self.config.model_dump(mode="json")
        before = {name: RunConfig.model_fields[name].default for name in self.asked} | {**self.file.values}
        return {name: (before[name], now[name]) for name in sorted(self.asked) if before[name] != now[name]}

    @contextmanager
    def federation(self, make: Make | None = None) -> Iterator[Federation]:
        """Start the configured engine, or the engine that ``make`` returns, and close it when the block ends."""
        if make is None and self.partition.is_declared:
            raise ConfigError(
                f"the clients of {self.directory.path} hold their own data; fedcore federate server reaches them, and "
                "fedcore federate server --resume RUN_DIR goes on"
            )
        dataset = self.setup.placement.dataset(self.dataset)
        make = make or registry.resolve("engine", self.config.engine)
        partition = self.partition
        for _, changed in self.setup.plugins.each("assign_samples", setup=self.setup, partition=partition):
            partition = changed or partition
        site = ClientSite(self.config, dataset, partition, self.directory.clients.root)
        engine = registry.call("engine", self.config.engine, make, site)
        try:
            yield Federation(self.setup, dataset, partition, engine, self.directory.clients)
        finally:
            engine.close()

    @contextmanager
    def started(
        self,
        state: ServerState,
        notify: Notify | None = None,
        make: Make | None = None,
        on_round: OnRound | None = None,
    ) -> Iterator[Experiment]:
        """Start the engine and the trackers, for callers that go round by round from a state of the run."""
        follow: Notify = notify or only_notes
        notes: Any = self.partition.info["notes"]
        begun_with = {**self.file.versions, COMMIT: next(iter(self.directory.sessions.read()), {}).get("commit")}
        cautions = [*version_cautions(self.config, begun_with), *self.dataset.notes]
        if not state.round:
            cautions += [*evaluation_cautions(self.setup, self.partition), *option_cautions(self.setup)]
        begun = {"directory": self.directory.path, "config": self.config, "round": state.round}
        follow("start", {**begun, "notes": [*notes, *cautions]})
        with ExitStack() as stack:
            if trackers := self.config.trackers:
                follow = stack.enter_context(tracking(trackers).tracked(self.config, self.directory.path, follow))
            federation = stack.enter_context(self.federation(make))
            self.directory.sessions.append({**session(self.setup), "clients": self.partition.info.get("names")})
            yield stack.enter_context(Experiment(federation, self.directory, follow, on_round))

    def train(
        self, *, notify: Notify | None = None, make: Make | None = None, on_round: OnRound | None = None
    ) -> RunResult:
        """Train the rest of the run; for a new run, all of it. It raises as :func:`fedcore.run`."""
        notify = notify or only_notes
        note = noting(notify)
        with one_thread(), self.directory.lock():
            if self.directory.read_summary() is not None and not self.directory.checkpoints.any():
                return self._finished_for_good(note)
            step = self.recover(note)
            state = step.state
            if isinstance(step, Finished):
                if step.note:
                    note(step.note)
            elif "rounds" in self.changes:
                before, _ = self.changes["rounds"]
                for caution in schedule_cautions(before, self.setup, state.round):
                    note(caution)
            with self.started(state, notify, make, on_round) as experiment:
                if state.phase == "train":
                    self.directory.reopen_finished()
                if self.changes:
                    self.directory.write_config(self.file.with_changes(self.changes, state.round))
                experiment.train(state)
        return self.result()

    def _finished_for_good(self, note: Note) -> RunResult:
        """Return the result of a finished run whose checkpoints were deleted. It is not trained again.

        :raises RunDirectoryError: it should get other options, such as more rounds.
        """
        if self.changes:
            raise RunDirectoryError(
                f"{self.directory.path} is finished, and without its checkpoints it cannot go on; start a new run: "
                f"fedcore train --config {self.directory.path / 'config.yaml'}"
            )
        note("the run is finished, and its checkpoints were deleted; nothing was trained")
        return self.result()

    def evaluate(self, *, notify: Notify | None = None) -> dict[str, Any]:
        """Return the metrics of the last checkpoint. It writes nothing, and raises as :func:`fedcore.evaluate_run`."""
        note = noting(notify or only_notes)
        if (trained_on := self.file.values["device"]) != self.config.device:
            note(f"this machine has no device {trained_on!r}, on which the run trained: evaluated on cpu")
        state = self.last_state(note)
        try:
            with one_thread(), self.federation() as federation:
                experiment = Experiment(federation, self.directory, lambda event, details: None)
                experiment.evaluator = Evaluator(federation)  # of every protocol
                return experiment.final_metrics(state)
        except RunDirectoryError as error:
            if self.directory.checkpoints.has_loaded():
                raise
            raise RunDirectoryError(
                f"another process trains {self.directory.path}, and deleted the checkpoint while it was being "
                "evaluated; evaluate again when that process has ended"
            ) from error

    def result(self) -> RunResult:
        """Return the result of :meth:`train` of a finished run. It raises as :func:`fedcore.load_run`."""
        damage: list[str] = []
        summary = self.directory.read_summary(damage.append)
        if summary is None:
            problem = damage[0] if damage else f"{self.directory.path} is not finished; go on with it"
            raise RunDirectoryError(f"{problem}: {self.directory.how_to_resume}")
        self.directory.metrics.read(noting(only_notes))
        network = Placement.plain().model(self.setup.model).eval()
        inputs = self.directory.load_model(network)
        config = self.config.model_copy(update={"out": None, "name": None, "tags": [], "note": None})
        return RunResult(network, inputs, self.directory.path, summary, config, self.setup.metrics, self.dataset.task)

    def initial(self) -> ServerState:
        """Return the state before the first round."""
        return ServerState(model=clone(self.setup.model.state_dict()))

    def last_state(self, note: Note) -> ServerState:
        """Return the state of the last checkpoint. It writes nothing.

        :param note: called with a message if the state is not that of the run's end: files are damaged or missing.
        :raises RunDirectoryError: there is no checkpoint, or it belongs to another run.
        """
        state = self.directory.checkpoints.load(note=note)
        finished = self.directory.read_summary() is not None
        if state is None:
            if finished:
                raise RunDirectoryError(
                    f"{self.directory.path} is finished and its checkpoints were deleted: neither it nor its clients' "
                    "models can be evaluated again. summary.json has its figures"
                )
            self._unsaved_rounds()
            raise RunDirectoryError(
                f"{self.directory.path} has no checkpoint yet; first run: {self.directory.how_to_resume}"
            )
        self.check(state)
        recorded = sum("round" in record for record in self.directory.metrics.read())
        if recorded > state.round or (finished and state.phase != "done"):
            note(f"rounds recorded: {recorded}; the last checkpoint is of round {state.round}, before any correction")
        return state

    def recover(self, note: Note) -> TrainOn | Finished:
        """Return how the run goes on from its newest whole checkpoint or from the start; restore the directory to it.

        :raises RunDirectoryError: none of its checkpoints can be used, they are missing, or it has more rounds than it
            should get.
        """
        state = self._whole_state(note)
        if state is None:
            if recorded := self._unsaved_rounds():
                note(f"no checkpoint was written before the run was stopped, after {recorded} rounds: it begins again")
            self.directory.restore(None)
            return TrainOn(self.initial())
        step = self._next(state)
        if state.phase == "done" and isinstance(step, TrainOn):
            state = self._whole_state(note, phase="post_train")
            if state is None:
                raise RunDirectoryError(
                    f"--rounds {self.config.rounds}: {self.directory.path} is finished, but the checkpoint at the end "
                    "of its training, from which more rounds could go on, is missing"
                )
            step = self._next(state)
        self.directory.restore(state)
        return step

    def _next(self, state: ServerState) -> TrainOn | Finished:
        """Return how the run goes on from a checkpoint; see :func:`~fedcore.runs.resuming.next_state`."""
        step = next_state(state, self.config, self.asked)
        if isinstance(step, Refused):
            raise RunDirectoryError(f"{self.directory.path} {step.reason}")
        return step

    def _whole_state(self, note: Note, phase: str | None = None) -> ServerState | None:
        """Return the state of the newest checkpoint whose files and records are whole; None if there is none."""
        store, metrics = self.directory.checkpoints, self.directory.metrics
        state = store.load(check=lambda loaded: metrics.check(loaded.metrics_bytes), note=note, phase=phase)
        if state is not None:
            self.check(state)
        return state

    def _unsaved_rounds(self) -> int:
        """Return how many rounds a run without checkpoints records. Going on would begin again and cut them off.

        :raises RunDirectoryError: there are so many that the checkpoints were lost.
        """
        recorded = self.directory.metrics.content().count(b"\n")
        finished = recorded and (self.directory.path / "model.safetensors").exists()
        if finished or not may_be_unsaved(recorded, self.config.checkpoint_every):
            raise RunDirectoryError(
                f"{self.directory.path} records {recorded} rounds, but its checkpoints are missing: it cannot go on. "
                "Put its folder checkpoint/ back, or train again, to the same bits: fedcore train --config "
                f"{self.directory.path / 'config.yaml'} --out NEW_FOLDER"
            )
        return recorded

    def check(self, state: ServerState) -> None:
        """Refuse a checkpoint of another run, or of another model than the configuration's.

        :raises RunDirectoryError: with the differences.
        """
        self.file.require_binding(self.directory.checkpoints.meta["binding"], self.directory.path)

        models = self.setup.model.state_dict(), state.model
        expected, saved = ({name: (tensor.shape, tensor.dtype) for name, tensor in model.items()} for model in models)
        differing = [name for name in sorted({*expected, *saved}) if expected.get(name) != saved.get(name)]
        if differing:
            raise RunDirectoryError(
                f"the checkpoint in {self.directory.path} is not of the model that config.yaml describes, or that was "
                f"given: they differ in {', '.join(differing[:3])}{' and others' * (len(differing) > 3)}"
            )


def _digest_of(partition: Partition) -> str:
    return partition_digest(partition.sha256, partition.info)
