"""``runs rm`` and ``runs clean`` over run folders in every state: they delete nothing that is not theirs to delete."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import fedcore
from fedcore.tools import app
from fedcore_study.sweeps.child import main as child
from fedcore_study.sweeps.directory import SweepDirectory
from fedcore_study.sweeps.run import plan_sweep
from fedcore_study.sweeps.spec import SweepSpec

SMALL = {"samples": 200, "clients": 4, "local_epochs": 1, "workers": 0, "progress": False}
FOREIGN = (
    *("notes.txt", "config.yaml.bak", ".hidden", "report.html", "000001-0-train.safetensors", ".notes.txt.12.tmp"),
    *("checkpoint/best.pt", "checkpoint/000001.safetensors", "clients/readme", "clients/000000/old.safetensors"),
    *("src/train.py", "checkpoint/more/000001-0-train.safetensors", "trackers/plot.png", "model-best.safetensors/x"),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run with states of clients and every file that a run can have."""
    pytest.importorskip("tensorboard")
    pytest.importorskip("fedcore_accelerate")
    out, more = tmp_path_factory.mktemp("made") / "run", {"client_test_fraction": 0.2, "keep": "best", "stack": 3}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedcore.data.partition.MAX_IN_JSON", 0)
        fedcore.run(rounds=2, out=out, plugins="moon", trackers={"tensorboard": {}}, **more, **SMALL)
    (out / "labels.json").write_text('{"name": null, "tags": [], "note": null}')
    (out / ".metrics.jsonl.12.tmp").write_text("")
    return out


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """Return a copy of the run."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def stopped(run: Path) -> Path:
    """Make a run one that was stopped."""
    for name in ("summary.json", "model.safetensors"):
        (run / name).unlink()
    return run


def command(*words: object) -> Any:
    return CliRunner().invoke(app, ["runs", *map(str, words)])


def contents(folder: Path) -> dict[str, bytes | None]:
    """Return all paths below a folder; of files and links with their content."""
    found: dict[str, bytes | None] = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        found[name] = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return found


def test_every_file_of_a_run_is_known(run: Path) -> None:
    assert list(run.glob("partition-*.safetensors"))
    assert list(run.glob("tensorboard/*"))
    assert list(run.glob("clients/together/*.bundle"))
    assert list(run.glob("clients/0*/*.safetensors"))  # of the client that is in no stack
    assert command("rm", run, "--yes").exit_code == 0
    assert not run.exists()


def test_files_of_weights_and_biases_go_with_their_links(run: Path) -> None:
    files = run / "wandb" / "offline-run-20260101_100000-abc" / "files"
    files.mkdir(parents=True)
    (files / "config.yaml").write_text("")
    (run / "wandb" / "latest-run").symlink_to(files.parent)
    (files.parent / "link").symlink_to("/")
    assert command("rm", run, "--yes").exit_code == 0
    assert not run.exists()


@pytest.mark.parametrize("damage", [b"", b"\0" * 500, b"{half\n", b'{"round": true}\n', b'{"round": -3}\n', None])
def test_a_run_with_checkpoints_and_no_records_is_broken_and_stays(run: Path, damage: bytes | None) -> None:
    (stopped(run) / "metrics.jsonl").unlink()
    if damage is not None:
        (run / "metrics.jsonl").write_bytes(damage)
    before = contents(run)
    (listed,) = json.loads(command("list", run, "--json").stdout)
    assert (listed["state"], "metrics.jsonl" in listed["problem"]) == ("broken", True)
    cleaned, removed = command("clean", run, "--yes"), command("rm", run, "--yes")
    assert (cleaned.exit_code, removed.exit_code) == (0, 2)
    assert "is left as it is" in cleaned.stderr
    assert "but no records of rounds" in removed.stderr
    assert contents(run) == before


def test_records_that_cannot_be_read_are_not_taken_for_none(run: Path) -> None:
    """Without checkpoints: they were deleted, or --checkpoint-every is large."""
    shutil.rmtree(stopped(run) / "checkpoint")
    shutil.rmtree(run / "clients")
    (run / "metrics.jsonl").write_bytes(b"\1" * 500)
    assert "holds no round that can be read" in command("clean", run, "--yes").stderr
    assert (run / "partition.json").exists()


def test_states_without_a_round_stay_until_the_run_is_named(run: Path) -> None:
    """So a run is left that was killed in its first round."""
    shutil.rmtree(stopped(run) / "checkpoint")
    (run / "metrics.jsonl").unlink()
    assert "but states in checkpoint/ or clients/" in command("clean", run, "--yes").stderr
    assert list(run.glob("clients/*/*"))
    assert command("rm", run, "--yes").exit_code == 0
    assert not run.exists()


def test_checkpoints_of_a_finished_run_stay_if_they_can_bring_something_back(run: Path) -> None:
    model, before = run / "model.safetensors", contents(run / "checkpoint")
    whole = model.read_bytes()
    model.write_bytes(whole[:-9])
    assert "model.safetensors is missing or damaged" in command("clean", run, "--yes").stderr
    model.write_bytes(whole)
    (run / "metrics.jsonl").write_text("")
    assert "metrics.jsonl records 0 rounds of 2" in command("clean", run, "--yes").stderr
    assert contents(run / "checkpoint") == before


@pytest.mark.parametrize("name", FOREIGN)
def test_what_fedcore_did_not_write_stays_and_is_named(run: Path, name: str) -> None:
    (run / "model-best.safetensors").unlink()
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_text("mine")
    top = {"src/train.py": "src", "checkpoint/more/000001-0-train.safetensors": "checkpoint/more"}
    removed, named = command("rm", run, "--yes"), top.get(name, name.removesuffix("/x"))
    assert removed.exit_code == 2
    assert f"holds what fedcore did not write there: {named}; move it away" in " ".join(removed.stderr.split())
    cleaned, inside = command("clean", run, "--yes"), name.startswith(("checkpoint", "clients"))
    assert ("is left as it is" in cleaned.stderr) == inside
    assert (run / "checkpoint").exists() == inside
    assert (run / name).read_text() == "mine"


def test_a_project_with_copied_files_and_a_run_in_a_run_stay(run: Path, made: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    for name in ("config.yaml", "partition.json"):
        shutil.copy(made / name, project)
    shutil.copytree(made, run / "again")
    before = contents(tmp_path)
    assert "did not write there: src" in command("clean", project, "--yes").stderr
    for folder in (project, run):
        assert command("rm", folder, "--yes").exit_code == 2
    assert contents(tmp_path) == before


class TestMeanwhile:
    """Between the question and the answer another process does something."""

    @pytest.fixture
    def answer(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """Run a command; before the answer ``yes`` something happens."""

        def run_command(meanwhile: Any, *words: object) -> Any:
            monkeypatch.setattr("typer.confirm", lambda *_, **__: [meanwhile(), True][1])
            return command(*words)

        return run_command

    def test_a_finished_run_that_goes_on_keeps_its_states(self, run: Path, answer: Any) -> None:
        def train_on() -> None:
            fedcore.resume(run, changes={"rounds": 3}, progress=False)

        cleaned = answer(train_on, "clean", run)
        assert (cleaned.exit_code, "run stays: it is not as it was shown" in cleaned.stderr) == (0, True)
        assert list(run.glob("checkpoint/*"))
        assert answer(lambda: None, "clean", run).stdout.startswith("deleted ")
        assert not (run / "checkpoint").exists()

    @pytest.mark.parametrize("how", ["clean", "rm"])
    def test_a_run_that_is_finished_meanwhile_stays(self, run: Path, answer: Any, how: str) -> None:
        stopped(run)
        for path in (run / "checkpoint", run / "clients", run / "metrics.jsonl"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        done = answer(lambda: fedcore.resume(run, progress=False), how, run)
        assert (done.exit_code, "run stays: " in done.stderr, "nothing was deleted" in done.stderr) == (0, True, True)
        assert fedcore.load_run(run).summary["rounds"] == 2

    def test_the_others_go(self, run: Path, tmp_path: Path, answer: Any) -> None:
        other = Path(shutil.copytree(run, tmp_path / "other"))

        def tag() -> None:
            assert command("tag", run, "--add", "keep").exit_code == 0

        done = answer(tag, "rm", run, other)
        assert "run stays: it is not as it was shown" in done.stderr
        assert "of 1 run" in done.stdout
        assert (run.exists(), other.exists()) == (True, False)


def test_a_sweep_begins_no_run_over_files_of_another(run: Path, tmp_path: Path, capfd: Any) -> None:
    """Without its config.yaml a run is not known as one; what a process left that was killed before that goes."""
    config = json.loads(json.dumps(fedcore.load_run(run).config.model_dump(mode="json")))
    (run / "config.yaml").unlink()
    before = contents(run)
    task = {"out": str(run), "config": config, "workers": 0, "allow_code": False, "allow_outside": False}
    assert child([json.dumps(task), "alone"]) == 2
    assert "did not write there" in capfd.readouterr().err
    assert contents(run) == before
    for path in run.iterdir():
        if not path.name.startswith("partition"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert child([json.dumps(task), "alone"]) == 0
    assert (run / "summary.json").exists()


def test_a_cleaned_sweep_gets_no_more_rounds_and_says_what_works(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    spec = SweepSpec(
        base={"rounds": 1, **{name: SMALL[name] for name in ("samples", "clients", "local_epochs", "workers")}}
    )
    ((label, config),) = plan_sweep(spec)
    directory = SweepDirectory(Path("s"))
    (name,) = directory.add(spec.as_yaml(), [(label, config)])
    fedcore.run(config, out=directory.run_directory(name), progress=False)
    assert command("clean", "s", "--yes").exit_code == 0
    plan = (directory.path / "sweep.json").read_bytes()
    refused = CliRunner().invoke(app, ["sweep", "s", "--rounds", "2", "--quiet"])
    said = " ".join(refused.stderr.split())
    assert "1 finished runs are to get more rounds, but their checkpoints were deleted" in said
    assert (refused.exit_code, (directory.path / "sweep.json").read_bytes()) == (2, plan)
    assert command("rm", *shlex.split(said.partition("fedcore runs rm ")[2]), "--yes").exit_code == 0
    assert directory.standing(name) == "waiting"
    again = CliRunner().invoke(app, ["sweep", "s", "--rounds", "2", "--dry-run"])
    assert (again.exit_code, again.stdout) == (0, f"{name}\n")


def _mutate(draw: Any, run: Path, made: Path) -> set[str]:
    """Damage a run's folder; return the paths that are not fedcore's."""
    foreign = set()
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["delete", "cut", "flip", "foreign", "link", "run", "stop", "folder"]))
        files = sorted(
            str(path.relative_to(run)) for path in run.rglob("*") if path.is_file() and not path.is_symlink()
        )
        files = [name for name in files if name not in foreign and not name.startswith("inner/")]
        if (run / "inner").exists():  # without its own config.yaml the folder is one of runs, of which this is one
            files.remove("config.yaml")
        name = draw(st.sampled_from([*files, "metrics.jsonl", "summary.json"]))
        path, content = run / name, b""
        if kind in ("delete", "cut", "flip") and path.is_file():
            content = path.read_bytes()
            path.unlink()
        if kind in ("cut", "flip"):
            at = draw(st.integers(0, len(content)))
            content = content[:at] + (b"" if kind == "cut" else bytes([draw(st.integers(0, 255))]) + content[at + 1 :])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        elif kind == "stop":
            (run / "summary.json").unlink(missing_ok=True)
        elif kind == "folder":
            folder = run / draw(st.sampled_from(["checkpoint", "clients", "trackers"]))
            shutil.rmtree(folder, ignore_errors=True)
        elif kind == "run" and not (run / "inner").exists() and (run / "config.yaml").exists():
            shutil.copytree(made, run / "inner")
            foreign |= {f"inner/{name}" for name in contents(made)}
        elif kind in ("foreign", "link"):
            name = draw(st.sampled_from(FOREIGN[:-1]))
            path = run / name
            if not os.path.lexists(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("mine") if kind == "foreign" else path.symlink_to(made)
                foreign.add(name)
    return foreign


def _has_records(run: Path) -> bool:
    try:
        lines = (run / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return False
    for line in lines:
        try:
            if type(json.loads(line)["round"]) is int:
                return True
        except (ValueError, KeyError, TypeError):
            pass
    return False


def _check(data: st.DataObject, made: Path) -> None:
    """Damage a copy of a run, and let both commands delete; what is not theirs is still there."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        shutil.copytree(made, run)
        foreign = _mutate(data.draw, run, made)
        before, elsewhere = contents(run), contents(made)
        foreign &= set(before)
        lost = any(run.glob("checkpoint/[0-9]*-*.safetensors")) and not _has_records(run)
        recorded = _has_records(run)
        for words in (("clean", run, "--yes"), ("rm", run, "--yes")):
            result = command(*words)
            assert result.exit_code in (0, 2), result.output
            assert isinstance(result.exception, SystemExit | None), result.output
            after = contents(run) if run.exists() else {}
            kept = before if lost else {name: before[name] for name in foreign}
            if words[0] == "clean" and recorded:
                kept |= {name: it for name, it in before.items() if not name.startswith(("checkpoint", "clients"))}
            assert {name: after.get(name) for name in kept} == kept, (words, result.output)
            assert set(after) <= set(before)
        if before == elsewhere:
            assert not run.exists()
        assert contents(made) == elsewhere


FEW = settings(max_examples=12, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))


@FEW
@given(data=st.data())
def test_a_few_damaged_folders(made: Path, data: st.DataObject) -> None:
    _check(data, made)


@pytest.mark.slow
@settings(FEW, max_examples=600, derandomize=False)
@given(data=st.data())
def test_many_damaged_folders(made: Path, data: st.DataObject) -> None:
    _check(data, made)
