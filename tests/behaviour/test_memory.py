"""What a run held is freed when it ends, not when the collector comes by: a notebook starts many runs in a process."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fedcore import ClientContext, Plugin, Step, hookimpl
from fedcore.base.errors import PluginContractError
from fedcore.client.runtime import ClientRuntime
from fedcore.client.session import LocalSession
from fedcore.data import Dataset
from tests.exchanges import PausesOnce
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


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "plugins",
    [(), ("fedcme", "moon"), ("ditto",), ("uscc",)],
    ids=["plain", "paused", "own-models", "asked"],
)
def test_a_run_leaves_nothing_to_the_collector(no_collector: None, tmp_path: Path, plugins: tuple[str, ...]) -> None:
    before = heavy()
    result = run(tmp_path, *plugins, local_epochs=2)
    assert result.metrics
    assert [type(found).__name__ for key, found in heavy().items() if key not in before] == []


class FailsInAStep(Plugin):
    @hookimpl
    def local_loss(self, step: Step) -> None:
        if step.client.id % 2:
            raise ArithmeticError


class FailsAtTheEnd(Plugin):
    @hookimpl
    def end_local(self, client: ClientContext) -> None:
        if client.id % 2:
            raise ArithmeticError


class FailsInTheBeginning(Plugin):
    @hookimpl
    def begin_local(self, client: ClientContext) -> None:
        client.scratch["noted"] = True
        if client.id % 2:
            raise ArithmeticError


class SendsNan(PausesOnce):
    """Half of the clients send something unusable when they pause; they wait for an exchange that does not come."""

    @hookimpl
    def end_local(self, client: ClientContext) -> None:
        assert not client.id % 2

    @hookimpl
    def observe(self, step: Step) -> None:
        if step.client.id % 2:
            step.model.classifier.bias.fill_(torch.nan)


class FailsAfterThePause(PausesOnce):
    @hookimpl
    def observe(self, step: Step) -> None:
        if step.epoch == 1 and step.client.id % 2:
            raise ArithmeticError


FAILING = [FailsInTheBeginning, FailsInAStep, FailsAtTheEnd, FailsAfterThePause]


@pytest.mark.parametrize(
    "failing",
    [pytest.param(failing, marks=() if failing is FailsAfterThePause else pytest.mark.slow) for failing in FAILING],
)
def test_clients_that_fail_leave_no_session(no_collector: None, tmp_path: Path, failing: type[Plugin]) -> None:
    """Each would hold the client's samples, and the models that its plugins read."""
    before, alive = heavy(), []

    def notify(event: str, details: Mapping[str, Any]) -> None:
        if event == "round":
            assert len(details["failures"]) == 3
            found = [kept for key, kept in heavy().items() if key not in before]
            alive.append(sum(isinstance(kept, LocalSession) for kept in found))

    run(tmp_path, "moon", failing, clients=6, rounds=2, local_epochs=2, min_clients=1, notify=notify)
    assert alive == [0, 0]


def test_clients_that_wait_in_vain_are_forgotten_with_the_next_round(no_collector: None, tmp_path: Path) -> None:
    before, alive = heavy(), []

    def sessions() -> int:
        return sum(isinstance(kept, LocalSession) for key, kept in heavy().items() if key not in before)

    def notify(event: str, details: Mapping[str, Any]) -> None:
        if event == "round":
            alive.append(sessions())

    run(tmp_path, "moon", SendsNan, clients=6, rounds=3, local_epochs=2, min_clients=1, notify=notify)
    assert alive == [3, 3, 3]
    assert sessions() == 0


class BreaksTheContract(PausesOnce):
    @hookimpl
    def mid_local_epoch(self) -> dict[int, Any]:
        return {77: {}}


def test_a_run_that_ends_while_clients_pause_leaves_nothing(no_collector: None, tmp_path: Path) -> None:
    before = heavy()
    with pytest.raises(PluginContractError, match="77"):  # without a reference to the error
        run(tmp_path, BreaksTheContract, local_epochs=2)
    assert [type(found).__name__ for key, found in heavy().items() if key not in before] == []
