"""A run or sweep directory that comes from a stranger: it cannot have code run, or anything written elsewhere."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import fedcore
from fedcore.base.errors import ConfigError
from fedcore.base.serial import read_tensors, write_tensors
from fedcore.cli.app import app
from fedcore.runs.directory import RunDirectory
from fedcore.runs.saved import SavedConfig
from fedcore_study.sweeps.directory import SweepDirectory
from fedcore_testing import federate
from tests.sentences import raises

CODE = "import pathlib\npathlib.Path('ran').touch()\ndef model(num_classes, input_shape): ...\n"


def cli(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return federate(tmp_path_factory.mktemp("own"), "moon", rounds=1).directory


@pytest.fixture
def run(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a run, in a working folder that holds a module which leaves a trace when it is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "strange_code.py").write_text(CODE)
    return Path(shutil.copytree(finished, tmp_path / "theirs"))


def change(run: Path, **values: object) -> None:
    """Change a run's configuration as somebody would who knows of its digest."""
    saved = SavedConfig.read(run / "config.yaml")
    replace(saved, values={**saved.values, **values}).write(run / "config.yaml")


FIELDS = [
    {"model": "module:strange_code.model"},
    {"dataset": "module:strange_code.model"},
    {"public": "module:strange_code.model"},
    {"engine": "module:strange_code.model"},
    {"plugins": {"module:strange_code.model": {}}},
    {"trackers": {"module:strange_code.model": {}}},
]


@pytest.mark.parametrize("values", FIELDS, ids=[next(iter(values)) for values in FIELDS])
def test_code_that_a_file_names_is_not_imported(run: Path, tmp_path: Path, values: dict[str, object]) -> None:
    change(run, **values)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    commands = [("resume", run), ("evaluate", run), ("report", run), ("train", "--config", run / "config.yaml")]
    for command in commands:
        result = cli(*command)
        assert result.exit_code == 2, result.output
        assert "module:strange_code.model" in result.stderr
        assert "--allow-code" in result.stderr
    assert not (tmp_path / "ran").exists()
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert {path.name for path in tmp_path.iterdir()} == {"strange_code.py", "theirs"}
    with raises(ConfigError, "module:strange_code.model", "allow_code=True"):
        fedcore.resume(run)


def test_the_flag_allows_it_and_so_does_typing_the_name(run: Path, tmp_path: Path) -> None:
    small = ("--rounds", 1, "--clients", 2, "--local-epochs", 1, "--workers", 0, "--quiet")
    typed = cli("train", "--model", "module:fedcore.models.mlp", *small, "--out", "mine")
    assert typed.exit_code == 0, typed.output
    assert RunDirectory(tmp_path / "mine").how_to_resume.endswith("mine --allow-code")
    assert cli("evaluate", "mine").exit_code == 2
    assert cli("evaluate", "mine", "--allow-code").exit_code == 0
    assert cli("resume", "mine", "--allow-code", "--quiet").exit_code == 0


def test_a_sweep_from_a_stranger_is_asked_about_too(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    config = RunDirectory(run).read_config().model_copy(update={"model": "module:strange_code.model", "out": None})
    SweepDirectory(folder).add("{}", [("moon", config)])
    result = cli("sweep", folder)
    assert (result.exit_code, "--allow-code" in result.stderr) == (2, True), result.output
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../../precious", "/precious", "..", ".", "a/b", ""])
def test_a_run_of_a_sweep_has_no_path_for_a_name(run: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("x")
    folder = tmp_path / "sweep"
    config = RunDirectory(run).read_config().model_copy(update={"out": None})
    SweepDirectory(folder).add("{}", [("moon", config)])
    plan = json.loads((folder / "sweep.json").read_text())
    plan["runs"] = {name: next(iter(plan["runs"].values()))}
    (folder / "sweep.json").write_text(json.dumps(plan))
    result = cli("sweep", folder)
    assert (result.exit_code, "is no run of a sweep" in result.stderr) == (2, True), result.output
    assert (tmp_path / "precious" / "file").read_text() == "x"


@pytest.mark.parametrize("name", ["checkpoint", "clients", "metrics.jsonl", "clients/000000", "trackers"])
def test_links_are_refused(run: Path, tmp_path: Path, name: str) -> None:
    """Without the check, going on deletes what is in the folders and cuts off the file."""
    target = tmp_path / "precious"
    if name == "metrics.jsonl":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "file").write_text("mine")
    place = run / name
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.symlink_to(target)
    for command in ("resume", "evaluate"):
        result = cli(command, run)
        assert result.exit_code == 2, result.output
        assert "is a link, to " in " ".join(result.stderr.split())
    assert (target if name == "metrics.jsonl" else target / "file").read_text() == "mine"


def test_a_pipe_does_not_hang_a_reader(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    for command in ("resume", "evaluate", "compare", "report"):
        result = cli(command, run)
        assert (result.exit_code, "neither a file nor a folder" in result.stderr) == (2, True), result.output


def test_a_tracker_writes_outside_only_if_it_is_allowed_to(run: Path, tmp_path: Path) -> None:
    change(run, trackers={"tensorboard": {"dir": str(tmp_path / "elsewhere")}})
    result = cli("resume", run)
    assert (result.exit_code, "--allow-outside" in result.stderr) == (2, True), result.output
    assert not (tmp_path / "elsewhere").exists()
    assert RunDirectory(run).how_to_resume.endswith(" --allow-outside")
    change(run, metrics=["module:theirs.Metric"])
    assert RunDirectory(run).how_to_resume.endswith(" --allow-code --allow-outside")
    change(run, model="object:Net")
    assert RunDirectory(run).how_to_resume.endswith(", model=Net, allow_code=True, allow_outside=True)")
    change(run, trackers={"tensorboard": {"dir": str(run / "events")}}, metrics=[], model="mlp")
    assert "--allow" not in RunDirectory(run).how_to_resume


@pytest.mark.parametrize("place", ["tensorboard", "events/theirs", "own/deep"])
def test_trackers_write_through_no_link(run: Path, tmp_path: Path, place: str) -> None:
    """At any depth below the folder that TensorBoard's files go to, the run's own name in it included."""
    pytest.importorskip("tensorboard")
    outside = tmp_path / "precious"
    outside.mkdir()
    folder = {"tensorboard": None, "events/theirs": run / "events", "own/deep": run / "own" / "deep"}[place]
    change(run, trackers={"tensorboard": {"dir": folder and str(folder), "patience": 60.0}})
    (run / place).parent.mkdir(exist_ok=True)
    (run / place).symlink_to(outside)
    result = cli("resume", run)
    assert not list(outside.iterdir())
    assert result.exit_code == 2, result.output
    assert "is a link, to " in " ".join(result.stderr.split()) or "--allow-outside" in result.stderr


def test_a_checkpoint_of_another_model_is_refused(run: Path) -> None:
    change(run, model="module:fedcore.models.mlp", projection=False, plugins={})
    result = cli("evaluate", run, "--allow-code")
    assert (result.exit_code, "model is 'module:fedcore.models.mlp'" in result.stderr) == (2, True)
    for file in (run / "checkpoint").iterdir():  # config.yaml's words are the same, but the code is another
        tensors, meta = read_tensors(file)
        meta["binding"]["settings"] |= {"model": "module:fedcore.models.mlp", "projection": False, "plugins": {}}
        write_tensors(file, tensors, meta)
    result = cli("evaluate", run, "--allow-code")
    assert (result.exit_code, "is not of the model that config.yaml describes" in result.stderr) == (2, True)
