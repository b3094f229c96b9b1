"""What others do to a run's directory while it is trained."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from unittest.mock import Mock

import pytest

import fedcore
from fedcore.base.errors import ConfigError, RunDirectoryError, StorageError
from fedcore.runs.api import started
from fedcore.runs.checkpoint import Note
from fedcore.runs.run import Run
from fedcore.server.state import ServerState
from tests.reliability import damages, kills
from tests.sentences import raises


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> damages.Made:
    return damages.make(tmp_path_factory.mktemp("made"), "stateful", finished=False)


def moved(out: Path) -> None:
    out.rename(out.with_name("elsewhere"))


def replaced(out: Path) -> None:
    shutil.copytree(out, out.with_name("elsewhere"))
    (out / "metrics.jsonl").write_bytes(b"")


def written_to(out: Path) -> None:
    shutil.copytree(out, out.with_name("elsewhere"))
    with (out / "metrics.jsonl").open("a") as file:
        file.write("{}\n")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (moved, "No such file or directory"),
        (shutil.rmtree, "No such file or directory"),
        (replaced, "another process writes to it: it has 0 bytes"),
        (written_to, "another process writes to it"),
    ],
)
def test_a_run_whose_directory_is_taken_away_stops(
    made: damages.Made, tmp_path: Path, change: Callable[[Path], None], words: str
) -> None:
    """It does not go on in silence with a directory that lacks what was in it; what was moved is as good as before."""
    out = tmp_path / "run"
    with started(damages.configured(made.path.parent, "stateful", out=out)) as (experiment, state):
        state = experiment.one_round(state)
        experiment.settle()
        change(out)
        with pytest.raises(RunDirectoryError, match=words):
            experiment.one_round(state)
    assert not (out / "summary.json").exists()
    if change is not shutil.rmtree:
        resumed = fedcore.resume(tmp_path / "elsewhere").directory
        assert kills.differences(damages.left(resumed), made.whole) == []


def test_an_evaluation_that_training_overtakes_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training deletes the states of older checkpoints; none of them is lost."""
    out, last_state = tmp_path / "run", Run.last_state
    with started(damages.configured(tmp_path, "personal", participation=1.0, out=out)) as (experiment, state):
        state = experiment.one_round(state)
        experiment.settle()

        def overtaken(run: Run, note: Note) -> ServerState:
            nonlocal state
            found = last_state(run, note)
            for _ in range(2):
                state = experiment.one_round(state)
            experiment.settle()
            return found

        monkeypatch.setattr(Run, "last_state", overtaken)
        with raises(RunDirectoryError):
            fedcore.evaluate_run(out)


def test_a_run_is_read_and_resumed_at_a_path_that_is_no_text(made: damages.Made, tmp_path: Path) -> None:
    """Linux takes any bytes for names."""
    odd = Path(os.fsdecode(bytes(tmp_path) + b"/\xff"))
    shutil.copytree(made.path, odd)
    page = tmp_path / "page.html"
    commands = [
        ("evaluate", odd),
        ("compare", odd, *damages.COMPARED),
        ("report", odd, "--out", page),
        ("resume", odd, "--rounds", 4),
    ]
    for command in commands:
        result = damages.run(*command)
        assert result.exit_code == 0, result.output
    assert kills.rounds_done(odd) == 4


def test_a_run_cannot_begin_at_a_path_that_is_no_text(made: damages.Made, tmp_path: Path) -> None:
    """Its config.yaml could not be read back."""
    odd = Path(os.fsdecode(bytes(tmp_path) + b"/\xff"))
    with raises(ConfigError, "--out"):
        fedcore.run(damages.configured(made.path.parent, "stateful", out=odd))
    assert not odd.exists()


def test_a_checkpoint_that_fails_is_named_although_ctrl_c_ended_the_wait(
    made: damages.Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(damages.configured(made.path.parent, "stateful", out=tmp_path / "run")) as (experiment, _):
        experiment.settle()
        writing = Future[None]()
        experiment._writing = writing
        monkeypatch.setattr(writing, "result", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            experiment.settle()
        monkeypatch.undo()
        writing.set_exception(StorageError("no room"))
        with pytest.raises(StorageError, match="no room"):
            experiment.settle()
