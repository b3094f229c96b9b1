"""A worker that does not answer is given up, Ctrl-C is answered whatever workers do, no stopped one stays behind."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedcore
from fedcore import RunConfig
from fedcore.base.errors import ConfigError
from fedcore.data import Dataset, ResidentSamples, load_dataset
from fedcore_testing import federate, records
from tests.reliability import kills
from tests.reliability.processes import alive, descendants, shared_mappings, start, wait_for
from tests.sentences import raises

pytestmark = pytest.mark.usefixtures("interruptible")

LONG = {"rounds": 5_000, "eval_every": 1_000}


class Remote(ResidentSamples):
    """Samples of a source that can stop answering: a file ``stalled`` in its folder makes the next read wait."""

    def __init__(self, images: Tensor, labels: Tensor, mean: Any, std: Any, folder: str) -> None:
        super().__init__(images, labels, mean, std)
        self.folder = folder

    def gather(self, indices: Tensor) -> Tensor:
        if (stalled := Path(self.folder, "stalled")).exists():
            stalled.unlink()
            Path(self.folder, "pipe").read_bytes()  # no process writes to it
        return super().gather(indices)

    def to(self, device: torch.device, memory_format: torch.memory_format) -> Remote:
        moved = super().to(device, memory_format)
        return Remote(moved.images, moved.labels, moved.mean, moved.std, self.folder)


def remote_digits(data_dir: Path | None) -> Dataset:
    """Digits, whose training samples are read from ``data_dir``."""
    digits = load_dataset("digits")
    train = digits.train
    assert isinstance(train, ResidentSamples)
    assert data_dir is not None
    return replace(digits, train=Remote(train.images, train.labels, train.mean, train.std, str(data_dir)))


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Any]:
    begun = []

    def go(**options: Any) -> tuple[Any, list[int]]:
        config = kills.configure(tmp_path, "moon", **{"workers": 1, **LONG, **options})
        out = tmp_path / "run"
        begun.append(start("train", "--config", config, "--out", out, "--quiet", log=tmp_path / "log"))
        wait_for(lambda: kills.rounds_done(out) >= 2)
        return begun[0], descendants(begun[0].pid)

    yield go
    for one in begun:
        below = descendants(one.pid)
        one.kill()
        one.wait()
        for pid in filter(alive, below):
            os.kill(pid, signal.SIGKILL)


def test_a_data_source_that_never_answers_costs_its_client_the_round_only(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    def stall(event: str, details: Mapping[str, Any]) -> None:
        if event == "round" and details["round"] == 0:
            (tmp_path / "stalled").touch()

    options = {"dataset": remote_digits, "data_dir": tmp_path, "workers": 1, "client_timeout": 5}
    result = federate(tmp_path, notify=stall, rounds=3, **options)
    failures = [record["failures"] for record in records(result)]
    assert [len(found) for found in failures] == [0, 1, 0]
    (failure,) = failures[1]
    assert failure["kind"] == "worker_lost"
    assert "no answer within 5 s (--client-timeout)" in failure["message"]


def test_the_limit_needs_processes(tmp_path: Path) -> None:
    """A client in the run's own process cannot be given up: the option is refused, when a run is resumed, too."""
    with raises(ConfigError, "--workers", "1"):
        federate(tmp_path, workers=0, client_timeout=5)
    out = federate(tmp_path, rounds=1).directory
    config = (out / "config.yaml").read_bytes()
    with raises(ConfigError, "--workers", "1"):
        fedcore.resume(out, changes={"rounds": 2, "client_timeout": 5})
    assert (out / "config.yaml").read_bytes() == config
    assert len((out / "sessions.jsonl").read_bytes().splitlines()) == 1
    assert fedcore.resume(out, changes={"rounds": 2}).summary["rounds"] == 2


def test_the_limit_changes_no_bits(tmp_path: Path) -> None:
    plain, limited = (
        fedcore.run(RunConfig(**kills.OPTIONS | {"rounds": 2, "workers": 1}, client_timeout=limit, out=tmp_path / name))
        for name, limit in (("plain", None), ("limited", 300))
    )
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(tensor, limited.model.state_dict()[name])


@pytest.mark.slow
def test_a_stopped_worker_is_replaced(process: Any, tmp_path: Path) -> None:
    """One that is stopped while it starts has longer, and costs no client: the others do the work meanwhile."""
    run, below = process(client_timeout=3, workers=2)
    workers = [pid for pid in below if not descendants(pid)]  # the template has children
    wait_for(lambda: all(map(shared_mappings, workers)))  # they have the data, and are ready some milliseconds later
    begun = kills.rounds_done(tmp_path / "run")
    wait_for(lambda: kills.rounds_done(tmp_path / "run") >= begun + 10)
    os.kill(workers[0], signal.SIGSTOP)
    done = kills.rounds_done(tmp_path / "run")
    wait_for(lambda: kills.rounds_done(tmp_path / "run") > done + 5)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines()[: done + 5]]
    assert [failure["kind"] for line in lines for failure in line["failures"]] == ["worker_lost"]
    assert not alive(workers[0])
    assert run.poll() is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_of_a_job_ends_no_worker_before_the_run(
    process: Any, tmp_path: Path, number: signal.Signals
) -> None:
    """SLURM sends it so, in any order."""
    run, workers = process()
    for pid in workers:
        os.kill(pid, number)
    done = kills.rounds_done(tmp_path / "run")
    wait_for(lambda: kills.rounds_done(tmp_path / "run") > done + 3)
    assert all(map(alive, workers))
    run.send_signal(number)
    assert run.wait(timeout=15) == 130
    assert not any(map(alive, workers))
    assert not any(record["failures"] for record in records(tmp_path / "run"))


def test_ctrl_c_is_answered_while_workers_are_stopped(process: Any) -> None:
    run, workers = process()
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(0.5)
    run.send_signal(signal.SIGINT)
    assert run.wait(timeout=15) == 130
    assert not any(map(alive, workers))


def test_no_stopped_worker_stays_behind(process: Any) -> None:
    """The kernel ends them when their parent is gone."""
    run, workers = process()
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(0.5)
    run.kill()
    run.wait()
    wait_for(lambda: not any(map(alive, workers)), kills.ENDS_WITHIN)
    assert not any(map(alive, workers))
