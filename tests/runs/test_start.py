"""Begin a run, open it again, copy it: whose directory it is, what is written, what a failure leaves."""

from __future__ import annotations

import contextlib
import datetime
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fedcore
from fedcore.base.errors import ConfigError, RunDirectoryError, StorageError
from fedcore.base.serial import read_tensors
from fedcore.client.setup import Setup
from fedcore.runs import directory
from fedcore.runs.api import started
from fedcore.runs.directory import RunDirectory
from fedcore.runs.run import Run
from fedcore.runs.saved import SavedConfig
from fedcore_testing import model_bytes
from fedcore_testing.federation import small_config
from tests.sentences import raises, warns

SET_UP = Setup, "build"


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_opened_run_has_the_configuration_that_the_new_one_was_trained_with(tmp_path):
    config = small_config(tmp_path, autotune=True, model="simple-cnn", dataset="digits")
    with Run.new(config) as first:
        assert first.config.out == first.directory.path
        assert first.config.memory_format != "auto"
    assert Run.open(first.directory.path, allow_code=False).config == first.config


def test_a_run_of_a_device_that_is_not_there_is_read_on_the_cpu(tmp_path, monkeypatch):
    there = {"device": "cuda", "precision": "tf32"}
    monkeypatch.setattr("fedcore.runs.run.SavedConfig", lambda values, *more: SavedConfig({**values, **there}, *more))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    result = fedcore.run(small_config(tmp_path))
    path = result.directory
    assert fedcore.load_run(path).metrics == result.metrics
    with warns(RuntimeWarning, "'cuda'", "cpu"):
        assert fedcore.evaluate_run(path)["global"] == result.metrics["global"]
    with raises(ConfigError, "--device", "'cuda'"):
        fedcore.resume(path, changes={"rounds": 9})
    assert fedcore.resume(path, changes={"rounds": 9, "device": "cpu"}).summary["rounds"] == 9
    assert fedcore.resume(path).summary["rounds"] == 9


def test_a_copy_is_set_up_with_its_own_directory(tmp_path):
    with Run.new(small_config(tmp_path)) as first:
        with raises(RunDirectoryError):
            Run.open(first.directory.path, allow_code=False, out=tmp_path / "copy")
        assert not (tmp_path / "copy").exists()
    copy = Run.open(first.directory.path, allow_code=False, out=tmp_path / "copy")
    assert copy.config.out == copy.directory.path == tmp_path / "copy"
    assert copy.changes == {"out": (str(first.directory.path), str(tmp_path / "copy"))}
    assert copy.directory.partition_file.exists()


@pytest.mark.parametrize("finished", [False, True])
def test_of_two_runs_begun_in_one_directory_the_second_leaves_the_first_alone(tmp_path, monkeypatch, finished):
    """Both have found it free, and the first is at work, or done, before the second writes anything."""
    config, build, files = small_config(tmp_path, rounds=1), vars(Setup)["build"], {}
    with contextlib.ExitStack() as at_work:

        def overtaken(*arguments, **named):
            monkeypatch.setattr(*SET_UP, build)
            experiment, state = at_work.enter_context(started(config))
            if finished:
                experiment.train(state)
                at_work.close()
            files.update(files_of(config.out))
            return Setup.build(*arguments, **named)

        monkeypatch.setattr(*SET_UP, overtaken)
        with raises(RunDirectoryError), started(config):
            pass
        assert files
        assert files_of(config.out) == files


@pytest.fixture
def unnamed(tmp_path, monkeypatch):
    """A configuration without a directory, in a folder without ``runs``, within one second of the clock."""
    monkeypatch.chdir(tmp_path)
    now = datetime.datetime(2026, 1, 2, 3, 4, 5)
    monkeypatch.setattr(directory, "datetime", SimpleNamespace(datetime=SimpleNamespace(now=lambda: now)))
    return small_config(tmp_path).model_copy(update={"out": None})


def test_runs_that_begin_in_the_same_second_have_directories_of_their_own(unnamed, monkeypatch):
    """The second begins while the first is being set up."""
    build, paths = vars(Setup)["build"], []
    with contextlib.ExitStack() as at_work:

        def overtaken(*arguments, **named):
            monkeypatch.setattr(*SET_UP, build)
            paths.append(at_work.enter_context(Run.new(unnamed)).directory.path.name)
            return Setup.build(*arguments, **named)

        monkeypatch.setattr(*SET_UP, overtaken)
        first = at_work.enter_context(Run.new(unnamed))
        assert [*paths, first.directory.path.name] == ["20260102-030405-fedavg", "20260102-030405-fedavg-1"]
        assert first.config.out == first.directory.path


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("runs/ctrlc", "ctrlc"),
        ("runs/20260101-120000-ctrlc", "ctrlc"),
        ("runs/search/trial-1", "search/trial-1"),
        ("sweeps/mu/runs/moon_mu=[1]", "sweeps/mu/moon_mu=[1]"),
        ("sweeps/mu/runs/moon_mu=[1]", "moon_mu=[1]"),
    ],
)
def test_the_name_of_a_run_in_a_list_leads_to_its_folder(tmp_path, monkeypatch, folder, name):
    monkeypatch.chdir(tmp_path)
    Path(folder).mkdir(parents=True)
    (Path(folder) / "config.yaml").touch()
    with raises(RunDirectoryError, f"{folder}?"):
        RunDirectory.open(Path(name))
    with raises(RunDirectoryError):
        RunDirectory.open(tmp_path / "other")


def test_labels_are_kept_with_the_run_and_change_nothing_else(unnamed):
    labels = {"name": "first", "tags": ["a", "b"], "note": "lr 0.1\nsecond line"}
    named = fedcore.run(unnamed, **labels)
    assert named.directory.name == "20260102-030405-first"
    kept = RunDirectory.open(named.directory).read_config()
    assert {name: getattr(kept, name) for name in labels} == labels
    again = fedcore.run(named.config)
    assert again.directory.name == "20260102-030405-fedavg"
    assert (again.config.name, again.config.tags, again.config.note) == (None, [], None)
    first, second = (read_tensors(result.directory / "model.safetensors")[0] for result in (named, again))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_run_that_fails_before_it_has_begun_gives_its_default_directory_back(unnamed, monkeypatch):
    def fails(*arguments, **named):
        assert [path.name for path in Path("runs").iterdir()] == ["20260102-030405-fedavg"]
        raise ConfigError("no such device")

    monkeypatch.setattr(RunDirectory, "write_config", fails)
    with raises(ConfigError), Run.new(unnamed):
        pass
    assert not Path("runs").exists()


def test_a_default_directory_that_cannot_be_made_is_named(unnamed):
    Path("runs").write_text("")
    with (
        raises(RunDirectoryError),
        Run.new(unnamed),
    ):
        pass


def test_a_run_that_cannot_be_begun_leaves_nothing(tmp_path, monkeypatch):
    def full(*arguments):
        raise StorageError("cannot write config.yaml: No space left on device")

    monkeypatch.setattr(RunDirectory, "write_config", full)
    with (
        raises(StorageError),
        Run.new(small_config(tmp_path, out=tmp_path / "deep" / "run")),
    ):
        pass
    assert not (tmp_path / "deep").exists()


def test_a_process_that_is_killed_while_it_hashes_the_data_leaves_no_folder(tmp_path, monkeypatch):
    """In a folder without config.yaml a run can neither begin nor go on."""
    config, there = small_config(tmp_path, out=tmp_path / "run"), []
    for name in ("data_digest", "versions"):
        monkeypatch.setattr(f"fedcore.runs.run.{name}", lambda of: there.append(config.out.exists()) or "")
    with contextlib.suppress(Exception), Run.new(config):
        pass
    assert there == [False, False]


def test_a_finished_run_without_checkpoints_is_not_trained_or_evaluated_again(tmp_path):
    result = fedcore.run(small_config(tmp_path))
    shutil.rmtree(result.directory / "checkpoint")
    before = {path: path.read_bytes() for path in result.directory.iterdir() if path.is_file()}
    with warns(RuntimeWarning):
        again = fedcore.resume(result.directory)
    assert again.metrics == result.metrics
    assert {path: path.read_bytes() for path in result.directory.iterdir() if path.is_file()} == before
    with raises(RunDirectoryError):
        fedcore.resume(result.directory, changes={"rounds": 9})
    with raises(RunDirectoryError):
        fedcore.evaluate_run(result.directory)


def test_a_run_whose_checkpoints_are_lost_keeps_its_records(tmp_path):
    with started(small_config(tmp_path, rounds=5, out=tmp_path / "run")) as (experiment, state):
        for _ in range(3):
            state = experiment.one_round(state)
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    before = files_of(tmp_path)
    for read in (fedcore.resume, fedcore.evaluate_run, lambda run: fedcore.resume(run, out=tmp_path / "copy")):
        with raises(RunDirectoryError, "3 rounds", "fedcore train --config"):
            read(tmp_path / "run")
    assert files_of(tmp_path) == before
    (tmp_path / "run" / "metrics.jsonl").unlink()
    assert fedcore.resume(tmp_path / "run").summary["rounds"] == 5
    (tmp_path / "run" / "summary.json").write_text("{half")
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    with raises(RunDirectoryError, "5"):
        fedcore.resume(tmp_path / "run")


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(tmp_path):
    """The checkpoint of the third round is written while the next three rounds train."""
    config = small_config(tmp_path, rounds=7, checkpoint_every=3, out=tmp_path / "whole")
    whole = fedcore.run(config)
    with started(config.model_copy(update={"out": tmp_path / "run"})) as (experiment, state):
        for _ in range(6):
            state = experiment.one_round(state)
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    with warns(RuntimeWarning, "6 rounds"):
        again = fedcore.resume(tmp_path / "run")
    assert model_bytes(again) == model_bytes(whole)
    assert [record["round"] for record in again.records] == list(range(7))


def test_a_resume_leaves_files_that_fedcore_did_not_write(tmp_path):
    """Next to the checkpoints and states, of which it keeps the last ones."""
    run = fedcore.run(small_config(tmp_path, "moon", rounds=1)).directory
    mine = [run / "checkpoint" / "best.safetensors", run / "checkpoint" / "notes.txt", run / "clients" / "000000" / "x"]
    for path in mine:
        path.write_text("mine")
    assert fedcore.resume(run, changes={"rounds": 4}).summary["rounds"] == 4
    assert [path.read_text() for path in mine] == ["mine"] * 3
    assert len(list((run / "checkpoint").glob("0*"))) == 2
