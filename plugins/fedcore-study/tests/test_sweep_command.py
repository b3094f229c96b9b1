"""Sweeps of real runs, each in a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fedcore
import fedcore_study
from fedcore import ConfigError, RunConfig, RunDirectoryError
from fedcore.tools import RunDirectory
from fedcore_study.runs.overview import is_locked
from fedcore_study.sweeps.directory import SweepDirectory
from fedcore_study.sweeps.run import run_sweep
from fedcore_study.sweeps.spec import SweepSpec, override
from tests.sentences import raises, refused

TINY = ("--clients", 2, "--rounds", 1, "--local-epochs", 1, "--batch-size", 256, "--workers", 0)
LONG = {"clients": 2, "rounds": 60, "local_epochs": 1, "batch_size": 256, "workers": 0}


def test_a_failed_run_is_reported_and_the_finished_one_is_not_run_again(cli, tmp_path: Path) -> None:
    result = cli("sweep", *TINY, "--grid", "lr=1e30,0.05", "--out", "s", "--json")
    assert result.exit_code == 3
    runs = json.loads(result.stdout)["runs"]
    assert [run["status"] for run in runs] == ["failed", "finished"]
    assert "loss 'task' became nan" in runs[0]["message"]
    assert f"failed: {runs[0]['name']}: " in result.stderr
    assert "1 of 2 runs are finished, 1 failed. Try these again with: fedcore sweep " in result.stderr

    summary = tmp_path / "s" / "runs" / runs[1]["name"] / "summary.json"
    before = summary.stat().st_mtime_ns
    added = cli("sweep", "s", "--grid", "lr=0.05", "--grid", "plugin=fedavg,fedprox", "--quiet")
    assert added.exit_code == 0
    assert "2 of 2 runs are finished" in added.stdout
    assert added.stderr == ""  # both train the same model
    assert summary.stat().st_mtime_ns == before

    compared = cli("compare", "s", "--format", "json")
    assert f"note: runs that failed: {runs[0]['name']}. The first: round 1: " in compared.stderr
    assert "have not begun" not in compared.stderr
    table = json.loads(compared.stdout)
    (block,) = table["blocks"]
    assert [row["label"] for row in block["rows"]] == ["fedavg", "fedprox"]
    assert block["rows"][1]["difference"]["n"] == 1
    headed = cli("sweep", "s", "--grid", "lr=0.05", "--grid", "plugin=fedavg,moon,fedbn", "--quiet")
    assert "note: the methods do not train the same model. moon: " in headed.stderr
    assert "run all of them with --projection" in headed.stderr
    no_norm = "fedbn: this model has no BatchNorm layer, so every layer is averaged, as in FedAvg"
    assert f": {no_norm}" in headed.stderr
    assert f"note: {no_norm}" in cli("compare", "s").stderr


def test_a_sweep_is_extended_by_methods_seeds_and_rounds_without_repeating(cli, tmp_path: Path) -> None:
    assert cli("sweep", *TINY, "--grid", "plugin=fedavg", "--out", "s", "--quiet").exit_code == 0
    added = ("--grid", "plugin=fedavg,fedprox", "--set", "fedprox.mu=0.1")
    assert cli("sweep", "s", *added, "--quiet").exit_code == 0
    first = {name: path.stat().st_mtime_ns for name, path in summaries(tmp_path).items()}
    assert len(first) == 2
    more = cli("sweep", "s", "--seeds", 2)
    assert "note: 2 of 4 runs are finished already" in more.stderr
    assert {name: summaries(tmp_path)[name].stat().st_mtime_ns for name in first} == first

    assert cli("sweep", "s", "--grid", "plugin=fedavg", "--seeds", 1, "--quiet").exit_code == 0  # asks for one run
    assert cli("sweep", "s", "--grid", "plugin=fedavg", "--set", "fedprox.mu=0.1").exit_code == 2
    foreseen = cli("sweep", "s", "--rounds", 2, "--dry-run")
    assert sorted(foreseen.stdout.split()) == sorted(summaries(tmp_path))
    longer = cli("sweep", "s", "--rounds", 2, "--metric", "ece")
    assert longer.exit_code == 0, longer.stderr
    assert "note: 4 finished runs go on to more rounds" in longer.stderr
    assert {json.loads(path.read_text())["rounds"] for path in summaries(tmp_path).values()} == {2}
    (folder,) = (path.parent for name, path in summaries(tmp_path).items() if name.startswith("fedavg_seed=0"))
    assert RunDirectory.open(folder).read_config().metrics == ["ece"]
    again = cli("sweep", "s", "--json")
    assert {run["seconds"] for run in json.loads(again.stdout)["runs"]} == {0.0}
    options = {"clients": 2, "rounds": 2, "local_epochs": 1, "batch_size": 256, "workers": 0}
    straight = fedcore.run(RunConfig(**options, seed=1, plugins={"fedprox": {"mu": 0.1}}, out=tmp_path / "straight"))
    (folder,) = (path.parent for name, path in summaries(tmp_path).items() if name.startswith("fedprox_seed=1"))
    assert (straight.directory / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def summaries(folder: Path) -> dict[str, Path]:
    return {path.parent.name: path for path in (folder / "s" / "runs").glob("*/summary.json")}


@pytest.mark.slow
def test_a_sweep_that_is_killed_goes_on_to_the_same_bits(cli, tmp_path: Path) -> None:
    """Its run stops with a checkpoint when the sweep's process dies."""
    spec = SweepSpec(base=LONG)
    (tmp_path / "s.yaml").write_text(spec.as_yaml())
    command = [sys.executable, "-m", "fedcore", "sweep", "s.yaml", "--out", "s", "--parallel", "2"]
    directory = SweepDirectory(tmp_path / "s")
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    wait_for(lambda: list((tmp_path / "s").glob("runs/*/checkpoint/*")))
    process.send_signal(signal.SIGKILL)
    process.wait()
    (name,) = directory.plan()
    wait_for(lambda: not is_locked(directory.run_directory(name)))
    assert directory.standing(name) == "stopped"

    result = cli("sweep", "s", "--quiet")
    assert result.exit_code == 0, result.stderr
    straight = fedcore.run(RunConfig(**LONG, out=tmp_path / "straight"))
    for file in ("model.safetensors", "partition.json"):
        assert (straight.directory / file).read_bytes() == (directory.run_directory(name) / file).read_bytes()


@pytest.mark.slow
def test_ctrl_c_leaves_checkpoints(tmp_path: Path) -> None:
    def listen(name, event, details):
        if event == "round":
            raise KeyboardInterrupt  # as the handler of SIGINT does

    result = run_sweep(SweepSpec(base=LONG, seeds=2), tmp_path / "s", parallel=1, listen=listen)
    directory = SweepDirectory(tmp_path / "s")
    assert result.interrupted
    assert [outcome.status for outcome in result.outcomes] == ["stopped", "waiting"]
    assert [directory.standing(name) for name in directory.plan()] == ["stopped", "waiting"]
    assert is_free(directory)


def test_ctrl_c_ends_the_command_with_130(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedcore_study.sweeps import run
    from fedcore_study.sweeps.processes import Outcome

    monkeypatch.setattr(run, "run_jobs", lambda jobs, *_, **__: ([Outcome(job.name, "stopped") for job in jobs], True))
    result = cli("sweep", *TINY, "--seeds", 2, "--out", "s")
    assert result.exit_code == 130
    assert "stopped: 0 of 2 runs are finished. Go on with: fedcore sweep " in result.stderr
    assert "--allow" not in result.stderr
    code = "plugin=module:fedcore_testing.stub_plugins.EqualWeights"
    place = ("--tracker", "tensorboard", "--set", f"tensorboard.dir={tmp_path / 'elsewhere'}")
    result = cli("sweep", *TINY, "--grid", code, *place, "--out", "own")
    assert f"Go on with: fedcore sweep {tmp_path / 'own'} --allow-code --allow-outside\n" in result.stderr


def test_a_folder_that_is_extended_writes_outside_only_if_it_is_allowed_to(cli, tmp_path: Path) -> None:
    place = f"tensorboard.dir={tmp_path / 'elsewhere'}"
    assert cli("sweep", *TINY, "--tracker", "tensorboard", "--set", place, "--seeds", 1, "--out", "s").exit_code == 0
    result = cli("sweep", "s", "--seeds", 2, "--dry-run")
    assert (result.exit_code, "--allow-outside" in result.stderr) == (2, True), result.output
    with raises(ConfigError, place, "allow_outside=True"):
        fedcore_study.sweep(out=tmp_path / "s", seeds=2)
    for permission in (("--allow-outside",), ("--set", place)):
        assert cli("sweep", "s", "--seeds", 2, "--dry-run", *permission).exit_code == 0


def test_dry_run_lists_and_starts_nothing(cli, tmp_path: Path) -> None:
    result = cli("sweep", "--grid", "plugin=fedavg,moon+uscc", "--grid", "moon.mu=1,5", "--dry-run")
    assert result.stdout.splitlines() == ["fedavg seed=0", "moon+uscc moon.mu=1 seed=0", "moon+uscc moon.mu=5 seed=0"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), ("--grid", "--seeds")),
        (("none.yaml",), ("none.yaml",)),
        (("bad.yaml",), ("'grids'", "'grid'", "bad.yaml")),
        ((".",), ("sweep.json",)),
        ((".", "--seeds", 2), ("sweep.json",)),
        (("--grid", "plugin=fedavg,mooon"), ("'mooon'", "'moon'")),
        (("--grid", "plugin=fedavg,fedper+uscc"), ("'uscc'", "'fedper'")),
        (("--grid", "plugin=fedavg,scaffold", "--optimizer", "adam"), ("run scaffold seed=0", "'scaffold'")),
        (("--grid", "alpha=0"), ("--alpha", 0)),
        (("--alpha", 1, "--grid", "alpha=1,2"), ("alpha", "grid")),
        (("--set", "moon.mu=1"), ("moon.mu", "'moon'")),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(cli, tmp_path: Path, arguments, named) -> None:
    (tmp_path / "bad.yaml").write_text("grids: {plugin: [moon]}\n")
    result = cli("sweep", *arguments)
    assert result.stdout == ""
    refused(result, *named)
    assert not (tmp_path / "sweeps").exists()


def test_dry_run_refuses_what_no_run_can_combine(cli) -> None:
    """With the message of train, though it depends on the model's names."""
    result = cli("sweep", "--grid", "plugin=fedavg,fedper+uscc", "--dry-run")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == cli("train", "--plugin", "fedper", "--plugin", "uscc").stderr


def is_free(directory: SweepDirectory) -> bool:
    try:
        with directory.lock():
            return True
    except RunDirectoryError:
        return False


def wait_for(condition) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_a_sweep_on_a_preset(cli) -> None:
    """An axis, a flag and the sweep's own file override it."""
    result = cli("sweep", "--preset", "digits-quick", "--grid", "plugin=fedavg,moon", "--grid", "alpha=1", "--dry-run")
    assert result.stdout.splitlines() == ["fedavg alpha=1.0 seed=0", "moon alpha=1.0 seed=0"]
    written = override(SweepSpec(base={"rounds": 4}), {"lr": 0.5}, ["alpha=1"], None, [], preset="digits-quick")
    ((_, config),) = written.cells()
    assert (config.rounds, config.lr, config.alpha, config.local_epochs) == (4, 0.5, 1.0, 2)
    assert "Did you mean 'digits-quick'?" in cli("sweep", "--preset", "digits-quik", "--grid", "lr=1").stderr
