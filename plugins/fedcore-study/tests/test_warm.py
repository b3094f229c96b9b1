"""The process that forks those of runs: what a run finds in its process, and how an end is told."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

import fedcore
from fedcore import RunConfig
from fedcore_study.sweeps import warm
from fedcore_study.sweeps.child import Task
from fedcore_study.sweeps.processes import Job, run_jobs
from fedcore_testing import model_bytes
from fedcore_workers import Template
from tests.sentences import raises

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a fork is safe on Linux only")

TINY = {"clients": 2, "rounds": 2, "local_epochs": 1, "batch_size": 256, "workers": 0}
LONG = {**TINY, "rounds": 5000}


@pytest.fixture(scope="module")
def forks():
    """A template of these tests alone, as a sweep's process has it."""
    own = Template("fedcore.runs.api", warm.CHILD, outlived=True)
    yield own
    own.close()


@pytest.fixture(scope="module")
def start(forks):
    return warm.Starter(forks)


def job(folder, name, **values):
    config = RunConfig(**{**TINY, **values}).model_dump(mode="json")
    return Job(name, [Task(str(folder / name), config, 0).as_text()], folder / f"{name}.log")


def test_runs_one_after_another_have_the_bits_of_runs_alone_and_a_crash_ends_one_of_them(start, tmp_path):
    jobs = [job(tmp_path, "fedavg"), job(tmp_path, "bad", lr=1e30), job(tmp_path, "moon", plugins=["moon"])]
    crashing = job(tmp_path, "crash", rounds=5000)
    heard = []

    def listen(name, event, details):
        heard.append((name, event, details))
        if (name, event) == ("crash", "round"):
            os.kill(pids[-1], signal.SIGKILL)

    pids = []

    def counted(*arguments):
        process = start(*arguments)
        pids.append(process.pid)
        return process

    outcomes, interrupted = run_jobs([*jobs[:2], crashing, jobs[2]], 1, listen, counted)
    assert not interrupted
    assert [outcome.status for outcome in outcomes] == ["finished", "failed", "failed", "finished"]
    assert "became nan" in outcomes[1].message
    assert "SIGKILL" in outcomes[2].message
    assert len(set(pids)) == 4
    assert "error: " in (tmp_path / "bad.log").read_text()
    rounds = [details for name, event, details in heard if (name, event) == ("moon", "round")]
    assert [found["round"] for found in rounds] == [1, 2]
    for name, plugins in (("fedavg", []), ("moon", ["moon"])):
        alone = fedcore.run(RunConfig(**TINY, plugins=plugins, out=tmp_path / f"{name}-alone"))
        assert model_bytes(alone.directory) == model_bytes(tmp_path / name)
    assert rounds[-1]["figure"] == f"{100 * alone.metrics['global']['accuracy']:.2f} %"


def test_a_run_stops_with_a_checkpoint_when_the_sweep_is_gone_and_goes_on_to_more_rounds(start, tmp_path):
    log = (tmp_path / "log").open("ab")
    process = start(job(tmp_path, "run", rounds=5000).arguments, log.fileno())
    for line in process.stdout:
        if json.loads(line)["event"] == "round":
            break
    process.stdin.close()  # as the death of the sweep's process does
    assert process.wait() == 130
    trained = len((tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines())
    assert 1 <= trained < 5000
    with raises(fedcore.RunDirectoryError):
        fedcore.load_run(tmp_path / "run")

    (tmp_path / "run").rename(tmp_path / "aside")
    for rounds in (1, 3):
        (outcome,), _ = run_jobs([job(tmp_path, "run", rounds=rounds)], 1, lambda *event: None, start)
        assert outcome.status == "finished", outcome.message
    straight = fedcore.run(RunConfig(**{**TINY, "rounds": 3}, out=tmp_path / "straight"))
    assert model_bytes(straight.directory) == model_bytes(tmp_path / "run")


@pytest.mark.slow
def test_when_the_template_is_killed_another_one_takes_its_place(forks, start, tmp_path):
    before = forks._process
    before.kill()
    before.wait()
    (outcome,), _ = run_jobs([job(tmp_path, "run", rounds=1)], 1, lambda *event: None, start)
    assert outcome.status == "finished", outcome.message
    assert forks._process.poll() is None


@pytest.mark.slow  # the process imports torch
def test_without_a_template_each_process_starts_anew(tmp_path):
    (outcome,), _ = run_jobs([job(tmp_path, "run", rounds=1)], 1, lambda *event: None, warm.Starter(None))
    assert outcome.status == "finished", outcome.message
