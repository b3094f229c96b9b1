"""No process survives the one that started it, however that one ended."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
from typer.testing import CliRunner

from fedcore.cli.app import app
from tests.reliability import kills
from tests.reliability.processes import alive, descendants, start, wait_for

LONG = {"rounds": 5_000, "eval_every": 1_000}


def end(process, number):
    """End a process; returns those it had started and the seconds until the last of them was gone."""
    below = descendants(process.pid)
    assert below
    os.kill(process.pid, number)
    process.wait()
    return below, wait_for(lambda: not any(map(alive, below)), seconds=30)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_workers_end_with_the_run(tmp_path, number):
    """Killed in mid-training; the kernel ends the workers, and frees the memory that they shared."""
    config = kills.configure(tmp_path, "moon", workers=2, **LONG)
    out = tmp_path / "run"
    process = start("train", "--config", config, "--out", out, "--quiet", log=tmp_path / "log")
    wait_for(lambda: kills.rounds_done(out) >= 2)
    below, seconds = end(process, number)
    assert len(below) == 3, "the template and two workers"
    assert seconds < kills.ENDS_WITHIN


@pytest.mark.slow
@pytest.mark.parametrize("moment", [0.0, 0.2, 0.5, 1.0, 1.5, 2.0, 3.0])
def test_workers_end_with_a_run_that_is_killed_while_they_start(tmp_path, moment):
    config = kills.configure(tmp_path, "moon", workers=2, **LONG)
    process = start("train", "--config", config, "--out", tmp_path / "run", "--quiet", log=tmp_path / "log")
    wait_for(lambda: descendants(process.pid))
    time.sleep(moment)
    _, seconds = end(process, signal.SIGKILL)
    assert seconds < kills.ENDS_WITHIN


@pytest.mark.slow
def test_trackers_end_with_the_run(tmp_path):
    pytest.importorskip("tensorboard")
    config = kills.configure(tmp_path, "moon", workers=1, trackers={"tensorboard": {}}, **LONG)
    out = tmp_path / "run"
    process = start("train", "--config", config, "--out", out, "--quiet", log=tmp_path / "log")
    wait_for(lambda: kills.rounds_done(out) >= 2)
    below, _ = end(process, signal.SIGKILL)
    assert len(below) == 3, "the template, a worker and the tracker"


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [1, 2])
def test_runs_end_with_their_sweep(tmp_path, parallel):
    """The template from which the sweep forks its runs; and of each run the process, its template and two workers."""
    file = tmp_path / "sweep.yaml"
    file.write_text(
        json.dumps({"base": {**kills.OPTIONS, **LONG, "workers": 2}, "grid": {"plugin": ["moon", "scaffold"]}})
    )
    out = tmp_path / "sweep"
    process = start("sweep", file, "--out", out, "--parallel", parallel, "--quiet", log=tmp_path / "log")
    wait_for(lambda: len([f for f in out.glob("runs/*/metrics.jsonl") if f.stat().st_size]) >= parallel)
    below, _ = end(process, signal.SIGKILL)
    assert len(below) == 1 + 4 * parallel
    for run in out.glob("runs/*/config.yaml"):
        assert 0 <= kills.rounds_done(run.parent) - kills.committed_rounds(run.parent) <= 1, "stopped with a checkpoint"


def test_one_process_at_a_time_goes_on_with_a_run(tmp_path):
    config = kills.configure(tmp_path, "fedavgm", workers=0, **LONG)
    out = tmp_path / "run"
    process = start("train", "--config", config, "--out", out, "--quiet", log=tmp_path / "log")
    try:
        wait_for(lambda: kills.rounds_done(out) >= 1)
        second = CliRunner().invoke(app, ["resume", str(out), "--quiet"])
        assert second.exit_code == 2
        assert "another process is training in" in " ".join(second.stderr.split())
    finally:
        process.kill()
        process.wait()
