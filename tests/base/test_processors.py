"""One answer to how many processors there are: affinity and environment, not all that the machine has."""

from __future__ import annotations

import os

import pytest

from fedcore.base.processors import cores


def test_the_number_is_that_of_the_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHON_CPU_COUNT", raising=False)
    assert cores() == len(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "cpu_count", lambda: 1000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 8})
    assert cores() == 3


@pytest.mark.parametrize(("given", "found"), [("1", 1), ("12", 12), ("default", 3), ("0", 3), ("", 3), ("²", 3)])
def test_the_environment_may_say_another(monkeypatch: pytest.MonkeyPatch, given: str, found: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 8})
    monkeypatch.setenv("PYTHON_CPU_COUNT", given)
    assert cores() == found
