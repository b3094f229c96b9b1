"""Sweeps' processes start by a fork from the process that forks workers: a process of their own takes seconds."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from fedcore_study.sweeps import warm


@pytest.fixture(scope="session", autouse=True)
def forked_jobs(_forked_workers: None) -> Iterator[None]:
    """Fork each run's process; test_warm.py and test_sweep_command.py start those of a sweep itself."""
    from fedcore_testing.forked import fork_server

    server = fork_server()
    if server is None:  # not on Linux
        yield
        return

    class Forking(warm.Starter):
        def _start(self) -> None:
            """Start nothing."""

        def __call__(self, arguments: Sequence[str], log: int) -> Any:
            stdin, ours = os.pipe()
            read, stdout = os.pipe()
            process: Any = server.fork(
                f"{warm.CHILD}:main",
                [list(arguments)],
                environment=self._environment,
                descriptors={0: stdin, 1: stdout, 2: log},
            )
            os.close(stdin)
            os.close(stdout)
            process.stdin, process.stdout = os.fdopen(ours, "wb"), os.fdopen(read, "rb")
            return process

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm, "Starter", Forking)
        yield
