"""The contract of an engine, as one function."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedcore import FedcoreError, RunResult
from fedcore.engines import ClientFailure, ClientSite, ClientTask, Engine, FailureKind, Outcome, Reply
from fedcore.server import Federation, ServerScope
from fedcore.tools import Run, process, registry
from fedcore_testing.compare import require_same_states
from fedcore_testing.federation import federate, model_bytes, records, small_config
from fedcore_testing.probe import Probe, ProbeOfEach
from fedcore_testing.trial import HERE, RUN, importable_in_workers

CLIENTS = 5
RAISING = 1
NAME = Probe.__name__.lower()
SENT = {
    "x": torch.arange(3.0),
    "large": torch.arange(40_000.0).view(200, 200).t(),
    "whole": torch.tensor([[1, 2**40]]),
    "scalar": torch.tensor(0.1, dtype=torch.float64),
    "none": torch.zeros(0, 4),
    "flags": torch.tensor([True, False]),
}
"""What every question carries: sizes, layouts and types that transports stumble over."""

MakeEngine = Callable[[ClientSite], Engine]


def check_engine(engine: str | MakeEngine, folder: Path, *, workers: Sequence[int] = (1, 2), **options: Any) -> None:
    """Check an engine: one outcome per task, in any order; failures as values; the local engine's bits.

    The engine gets tasks directly, is closed twice, and runs a federation with pauses, states, payloads, questions and
    a client that raises. An engine that never answers is not detected; give the test a time limit.

    :param engine: a function that makes it from a ``ClientSite``, or the name under which it is installed.
    :param folder: for the run directories.
    :param workers: the numbers of workers to run it with.
    :param options: further options of RunConfig.
    :raises AssertionError: names the defect.
    """
    try:
        make: MakeEngine = registry.resolve("engine", engine) if isinstance(engine, str) else engine
    except FedcoreError as error:
        raise AssertionError(str(error)) from error
    with importable_in_workers():
        for count in workers:
            _check_conversation(make, folder / f"conversation-{count}", {**options, "workers": count})
    reference = _federation(folder, None, **{**options, "workers": 0})
    with importable_in_workers():
        for count in workers:
            result = _federation(folder, make, **{**options, "workers": count})
            _require_same(reference, result, f"with workers={count}")


def _federation(folder: Path, make: MakeEngine | None, **options: Any) -> RunResult:
    run = {
        **RUN,
        "rounds": 3,
        "clients": CLIENTS,
        "participation": 1.0,
        "model": f"{HERE}with_batch_norm",
        "local_epochs": 2,
    }
    plugins, silent = ((Probe, {"raising": [RAISING]}), ProbeOfEach), lambda event, details: None
    try:
        return federate(folder, *plugins, notify=silent, engine=make, **{**run, **options})
    except Exception as error:  # whatever an engine does is a finding
        raise AssertionError(f"a federation ends with {type(error).__name__}: {error}") from error


def _require_same(expected: RunResult, result: RunResult, where: str) -> None:
    """Compare two runs; the messages of failures may differ."""
    for ours, theirs in zip(_records(expected), _records(result), strict=True):
        number = ours.get("round", "after the last")
        for key in ("failures", "ignored"):
            assert ours[key] == theirs[key], (
                f"{where}, round {number}: {key} are {theirs[key]}, with the local engine {ours[key]}"
            )
        different = [key for key in ours if ours[key] != theirs.get(key)]
        assert not different, f"{where}, round {number}: {different[0]!r} differs from the local engine's"
    require_same_states(expected, result, f"{where} and with the local engine")
    assert model_bytes(expected) == model_bytes(result), (
        f"{where}, the bits of the model differ from the local engine's"
    )


def _records(result: RunResult) -> list[dict[str, Any]]:
    lines = records(result)
    for record in lines:
        for key in ("failures", "ignored"):
            record[key] = [(entry["client"], entry["kind"]) for entry in record[key]]
    return lines


def _check_conversation(make: MakeEngine, folder: Path, options: Mapping[str, Any]) -> None:
    """Send an engine a server's tasks and check each outcome."""
    config = small_config(folder, (Probe, {"raising": [RAISING]}), out=folder, **{**RUN, "clients": CLIENTS, **options})
    with process.one_thread(), Run.new(config) as run:
        engine = make(ClientSite(run.config, run.dataset, run.partition, folder / "clients"))
        try:
            federation = Federation(run.setup, run.dataset, run.partition, engine, run.directory.clients)
            _converse(ServerScope(federation, run.initial(), 0, "evaluation"))
        except BaseException:
            with contextlib.suppress(Exception):
                engine.close()
            raise
        _twice("close()", engine.close)


def _converse(scope: ServerScope) -> None:
    engine = scope.federation.engine
    workers = getattr(engine, "workers", None)
    assert isinstance(workers, int), f"engine.workers is {workers!r}; it says how many tasks run side by side"
    assert workers >= 1, f"engine.workers is {workers}; one task at a time is 1"
    for number, key in enumerate(("first", "second")):
        scope.share(key, {NAME: {"number": torch.tensor(100.0 * number)}})

    plain = _tasks("plain")
    for window in (None, 1):
        tasks = _tasks(f"window-{window}")
        _require_answers(tasks, _outcomes(engine, tasks, window))
    _require_answers(plain, _outcomes(engine, plain, iterator=iter(plain)))
    assert not _outcomes(engine, []), "run([]) yields outcomes"

    mixed = [replace(task, shared=("first", "second")[task.client % 2]) for task in _tasks("shared")]
    _require_answers(mixed, _outcomes(engine, mixed))

    tasks = _tasks("raising", "fails")
    outcomes = _outcomes(engine, tasks)
    _require_failure(outcomes[tasks[RAISING].id], "raised", "a client that raises", "fails, as it should")
    _require_answers([task for task in tasks if task.client != RAISING], outcomes)

    lost = ClientTask("lost", "fit_resume", 0, 0, session="check-never-begun", shared="first", meta={"epoch": 1})
    _require_failure(_outcomes(engine, [lost])["lost"], "session_lost", "a session that no worker holds")

    abandoned = iter(engine.run(_tasks("abandoned")))
    next(abandoned)
    getattr(abandoned, "close", lambda: None)()
    after = _tasks("after")
    _require_answers(after, _outcomes(engine, after))

    _twice("unshare(key)", lambda: engine.unshare("first"))
    kept = [replace(task, shared="second") for task in _tasks("kept")]
    _require_answers(kept, _outcomes(engine, kept))
    engine.unshare("second")


def _twice(subject: str, call: Callable[[], None]) -> None:
    """Call an idempotent function twice."""
    for time in ("", " a second time"):
        try:
            call()
        except Exception as error:
            raise AssertionError(f"{subject}{time} raises {type(error).__name__}: {error}") from error


def _tasks(name: str, question: str = "answer") -> list[ClientTask]:
    """Return one question task per client."""
    return [
        ClientTask(
            id=f"check-{name}-{client}",
            kind="ask",
            client=client,
            round=0,
            shared="first",
            tensors=SENT,
            meta={"plugin": NAME, "question": question},
        )
        for client in range(CLIENTS)
    ]


def _outcomes(
    engine: Engine, tasks: Sequence[ClientTask], window: int | None = None, iterator: Iterable[ClientTask] | None = None
) -> dict[str, Outcome]:
    """Run tasks and return their outcomes by task id; each task has exactly one.

    :param iterator: runs the tasks from an iterator over them, in place of the sequence.
    """
    try:
        pairs = list(engine.run(tasks if iterator is None else iterator, window=window))
    except Exception as error:
        raise AssertionError(
            f"run raises {type(error).__name__}: {error}; what happens to a client is a ClientFailure"
        ) from error
    outcomes: dict[str, Outcome] = {}
    waiting = {task.id for task in tasks}
    for task, outcome in pairs:
        assert isinstance(outcome, (Reply, ClientFailure)), f"an outcome is a {type(outcome).__name__}"
        assert task.id in waiting, f"run yields an outcome of {task.id!r}, which it was not given"
        assert task.id not in outcomes, f"run yields {task.id!r} twice"
        outcomes[task.id] = outcome
    missing = sorted(waiting - set(outcomes))
    assert not missing, f"run(window={window}) ends without an outcome of {missing[0]!r}"
    return outcomes


def _require_answers(tasks: Sequence[ClientTask], outcomes: Mapping[str, Outcome]) -> None:
    """Compare each answer with the question that its client received."""
    for task in tasks:
        outcome = outcomes[task.id]
        assert isinstance(outcome, Reply), f"{task.id!r} failed: {outcome}"
        expected = {**SENT, "answer": SENT["x"] + 1000 * task.client + (100 if task.shared == "second" else 0)}
        missing = sorted(set(expected) - set(outcome.tensors))
        assert not missing, f"{task.id!r}: the tensor {missing[0]!r} did not come back"
        for name, tensor in expected.items():
            _require_equal(outcome.tensors[name], tensor, f"{task.id!r} (shared {task.shared!r}): tensor {name!r}")


def _require_equal(value: Tensor, expected: Tensor, subject: str) -> None:
    form, wanted = ((tuple(tensor.shape), str(tensor.dtype)) for tensor in (value, expected))
    assert form == wanted, f"{subject} comes back as {form}, expected {wanted}"
    assert torch.equal(value, expected), (
        f"{subject} comes back with other values: another client's, or another payload's"
    )


def _require_failure(outcome: Outcome, kind: FailureKind, subject: str, words: str = "") -> None:
    assert isinstance(outcome, ClientFailure), f"{subject} gives a result, expected a ClientFailure of kind {kind!r}"
    assert outcome.kind == kind, f"{subject} is a failure of kind {outcome.kind!r}, expected {kind!r}"
    assert words in outcome.message, f"{subject}: the failure's message does not say why ({outcome.message!r})"
