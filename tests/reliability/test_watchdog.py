"""A worker that does not answer is given up, Ctrl-C is answered whatever workers do, no stopped one stays behind."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fedcore
from fedcore import Plugin, RunConfig, hookimpl
from fedcore.base.errors import ConfigError
from fedcore.testing import federate, records
from tests.reliability import kills
from tests.reliability.processes import alive, descendants, spools, start, wait_for

LONG = {"rounds": 5_000, "eval_every": 1_000}


class Waits(Plugin):
    """Client 1's data never come in round 1."""

    @hookimpl
    def begin_local(self, client: Any) -> None:
        while client.round == 1 and client.id == 1:
            time.sleep(3600)


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Let runs be interrupted even where the tests are a shell's background job, which ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Any]:
    begun = []

    def go(**options: Any) -> tuple[Any, list[int]]:
        config = kills.configure(tmp_path, "moon", workers=2, **{**LONG, **options})
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


def test_a_client_that_waits_for_ever_costs_its_round_only(tmp_path: Path) -> None:
    result = federate(tmp_path, Waits, rounds=3, workers=1, client_timeout=5)
    failures = [record["failures"] for record in records(result)]
    assert [len(found) for found in failures] == [0, 1, 0]
    (failure,) = failures[1]
    assert (failure["client"], failure["kind"]) == (1, "worker_lost")
    assert "no answer within 5 s (--client-timeout)" in failure["message"]


def test_the_limit_needs_processes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--workers 1 or more"):
        federate(tmp_path, workers=0, client_timeout=5)


def test_the_limit_changes_no_bits(tmp_path: Path) -> None:
    plain, limited = (
        fedcore.run(RunConfig(**kills.OPTIONS | {"rounds": 2, "workers": 1}, client_timeout=limit, out=tmp_path / name))
        for name, limit in (("plain", None), ("limited", 300))
    )
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(tensor, limited.model.state_dict()[name])


@pytest.mark.slow
def test_a_stopped_worker_is_replaced(process: Any, tmp_path: Path) -> None:
    run, workers = process(client_timeout=3)
    os.kill(workers[0], signal.SIGSTOP)
    done = kills.rounds_done(tmp_path / "run")
    wait_for(lambda: kills.rounds_done(tmp_path / "run") > done + 5)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines()[: done + 5]]
    assert [failure["kind"] for line in lines for failure in line["failures"]] in (["worker_lost"], [])
    assert not alive(workers[0])
    assert run.poll() is None


def test_ctrl_c_is_answered_while_workers_are_stopped(process: Any) -> None:
    run, workers = process()
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(0.5)
    run.send_signal(signal.SIGINT)
    assert run.wait(timeout=15) == 130
    assert not any(map(alive, workers))


def test_no_stopped_worker_stays_behind(process: Any) -> None:
    """The kernel wakes them when their parent is gone, and they delete the shared memory."""
    run, workers = process()
    assert spools(run.pid)
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(0.5)
    run.kill()
    run.wait()
    wait_for(lambda: not any(map(alive, workers)), kills.ENDS_WITHIN)
    wait_for(lambda: not spools(run.pid), kills.ENDS_WITHIN)
