"""What a run held is freed when it ends, not when the collector comes by: a notebook starts many runs in a process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedcore.client.runtime import ClientRuntime
from fedcore.client.session import LocalSession
from fedcore.data import Dataset
from tests.support import run

HEAVY = (Dataset, ClientRuntime, LocalSession)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """No collections; what torch keeps of the caller when the first optimizer of a process is made is made before."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def heavy() -> dict[int, Any]:
    return {id(found): found for found in gc.get_objects() if isinstance(found, HEAVY)}


@pytest.mark.parametrize(
    "plugins",
    [(), ("fedcme", "moon"), ("ditto",), ("uscc",)],
    ids=["plain", "paused", "own-models", "asked"],
)
def test_a_run_leaves_nothing_to_the_collector(no_collector: None, tmp_path: Path, plugins: tuple[str, ...]) -> None:
    before = heavy()
    result = run(tmp_path, *plugins)
    assert result.metrics
    assert [type(found).__name__ for key, found in heavy().items() if key not in before] == []
