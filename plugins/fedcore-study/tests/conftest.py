"""Sweeps' processes start by a fork: one that imports torch anew takes seconds of processor time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from fedcore_study.sweep import processes


@pytest.fixture(scope="session", autouse=True)
def _forked_jobs(_forked_workers: None) -> Iterator[None]:
    """Fork each run's process; test_sweep_command.py kills a sweep whose runs are processes of their own."""
    from fedcore_testing.forked import fork_server

    server, started = fork_server(), processes.start_process
    if server is None:  # not on Linux
        yield
        return

    def start(command: list[str], log: int, environment: Mapping[str, str], keep: Sequence[int]) -> Any:
        if "-m" not in command:  # a job of tests/test_sweep.py
            return started(command, log, environment, keep)
        module = command.index("-m") + 1
        stdin, ours = os.pipe()
        read, stdout = os.pipe()
        process = server.fork(
            f"{command[module]}:main",
            [command[module + 1 :]],
            environment=environment,
            descriptors={0: stdin, 1: stdout, 2: log, **{number: number for number in keep}},
            session=True,
        )
        os.close(stdin)
        os.close(stdout)
        process.stdin, process.stdout = os.fdopen(ours, "wb"), os.fdopen(read, "rb")  # type: ignore[attr-defined]
        return process

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "start_process", start)
        yield
