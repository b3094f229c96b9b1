"""sweep --submit: runs as jobs of submitit's executor on this machine."""

from __future__ import annotations

import json
import pickle
import signal
import sys

import pytest

from fedcore import ConfigError
from fedcore_study.sweeps import cluster, processes
from fedcore_testing import model_bytes
from tests.sentences import raises

pytest.importorskip("submitit", reason="submitit is not installed: make setup installs it")

TINY = ("--clients", 2, "--rounds", 1, "--local-epochs", 1, "--batch-size", 256, "--workers", 0)


@pytest.mark.slow  # each job imports torch in a process of its own
def test_submitted_runs_have_the_same_bits_and_a_failed_one_says_why(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "POLL", 0.2)
    grid = ("--grid", "lr=1e30,0.05", "--json", "--quiet")
    found = cli("sweep", *TINY, *grid, "--submit", "local", "--submit-set", "timeout_min=5", "--out", "jobs")
    assert found.exit_code == 3, found.stderr
    failed, finished = json.loads(found.stdout)["runs"]
    assert (failed["status"], finished["status"]) == ("failed", "finished")
    assert "loss 'task' became nan" in failed["message"]
    assert f"again with: fedcore sweep {tmp_path / 'jobs'} --submit=local --submit-set=timeout_min=5\n" in found.stderr
    again = cli("sweep", *TINY, "--grid", "lr=0.05", "--json", "--quiet", "--out", "here")
    (here,) = json.loads(again.stdout)["runs"]
    one, other = (tmp_path / folder / "runs" / here["name"] for folder in ("jobs", "here"))
    assert model_bytes(one) == model_bytes(other)


def test_an_interrupt_cancels_what_is_submitted(tmp_path, monkeypatch):
    def interrupted(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(cluster.time, "sleep", interrupted)
    jobs = [processes.Job(name, ["{}"], tmp_path / "log") for name in ("one", "two")]
    outcomes, stopped = cluster.submit_jobs(
        jobs, "local", tmp_path / "jobs", parallel=1, parameters={"timeout_min": 1}, listen=lambda *event: None
    )
    assert stopped
    assert [outcome.status for outcome in outcomes] == ["stopped", "waiting"]


def python(code):
    """Return a job whose process runs a line of Python, as it arrives on the node."""
    run = cluster.RunOnNode([])
    run.command = [sys.executable, "-c", code]
    return pickle.loads(pickle.dumps(run))  # noqa: S301 - our own bytes


def test_a_run_has_the_environment_of_its_job(monkeypatch):
    run = python("import os, sys; sys.exit(os.environ.get('CUDA_VISIBLE_DEVICES') != '3')")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # as SLURM sets it on the node
    run()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    with raises(RuntimeError, "1"):
        run()


def test_a_job_at_its_time_limit_goes_back_into_the_queue(monkeypatch):
    waited = []
    monkeypatch.setattr(cluster.time, "sleep", waited.append)
    run = python("import os, signal; os.kill(os.getpid(), signal.SIGUSR2)")
    with raises(RuntimeError, signal.SIGUSR2):
        run()  # submitit's handler of this signal ends the wait
    with raises(RuntimeError, "130"):
        python("raise SystemExit(130)")()  # stopped with a checkpoint, at SIGTERM
    assert waited == [cluster.ENDS_WITHIN] * 2
    assert run.checkpoint().function is run


@pytest.mark.slow
def test_events_of_a_job_are_passed_on_and_its_failure_names_the_end_of_the_traceback(tmp_path, monkeypatch):
    heard = []
    code = """print('{"event": "round", "round": 3}'); raise SystemExit(7)"""
    monkeypatch.setattr(cluster, "POLL", 0.1)
    monkeypatch.setattr(cluster.process, "python_command", lambda *arguments: [sys.executable, "-c", code])
    outcomes, _ = cluster.submit_jobs(
        [processes.Job("one", ["{}"], tmp_path / "log")],
        "local",
        tmp_path / "jobs",
        parallel=1,
        parameters={"timeout_min": 1},
        listen=lambda *event: heard.append(event),
    )
    assert heard[1] == ("one", "round", {"event": "round", "round": 3})
    assert [event for _, event, _ in heard] == ["start", "round", "failed"]
    assert outcomes[0].message.startswith("RuntimeError: the run ended with exit code 7; see ")


def test_a_job_that_slurm_refuses_is_a_failed_run(tmp_path, monkeypatch):
    import submitit

    def refused(executor, function):
        raise submitit.core.utils.FailedJobError("sbatch: error: invalid partition specified: gpuu")

    monkeypatch.setattr(submitit.AutoExecutor, "submit", refused)
    monkeypatch.setattr(cluster, "POLL", 0.0)
    heard = []
    jobs = [processes.Job(name, ["{}"], tmp_path / "log") for name in ("one", "two")]
    outcomes, stopped = cluster.submit_jobs(
        jobs, "local", tmp_path / "jobs", parallel=1, parameters={}, listen=lambda *event: heard.append(event[:2])
    )
    assert not stopped
    assert [outcome.status for outcome in outcomes] == ["failed", "failed"]
    assert outcomes[0].message == "it could not be submitted: sbatch: error: invalid partition specified: gpuu"
    assert heard == [("one", "start"), ("one", "failed"), ("two", "start"), ("two", "failed")]


def test_unknown_parameters_and_a_missing_cluster_are_named(tmp_path):
    for name, parameters in (("local", {"partitions": 1}), ("slurm", {})):
        with pytest.raises(ConfigError, match=f"--submit {name}: "):
            cluster.submit_jobs([], name, tmp_path, parallel=1, parameters=parameters, listen=lambda *event: None)


def test_without_submitit_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: None)
    with raises(ConfigError):
        cluster.submit_jobs([], "local", tmp_path, parallel=1, parameters={}, listen=lambda *event: None)


def test_the_flags_are_checked(cli):
    assert "write slurm or local" in cli("sweep", "--submit", "pbs", "--grid", "lr=0.1").stderr
    assert "--submit-set is for --submit" in cli("sweep", "--submit-set", "a=1", "--grid", "lr=0.1").stderr
    assert "write NAME=VALUE" in cli("sweep", "--submit", "local", "--submit-set", "a", "--grid", "lr=0.1").stderr
