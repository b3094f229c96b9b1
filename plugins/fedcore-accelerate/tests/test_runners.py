"""Runners take the steps of trainings that come together, with the results of one by one."""

from __future__ import annotations

import pytest
import torch

from fedcore import Loss, Plugin, RunConfig, hookimpl
from fedcore.base.registry import available
from fedcore.client.runner import OneByOne, runner_of
from fedcore.data import load_dataset
from fedcore_accelerate import Stacks, offer_graphs, offer_lanes
from fedcore_testing import federate, records, weights

TOGETHER = {"clients": 8, "rounds": 2, "workers": 0, "partition": "iid", "model": "mlp"}


def test_they_are_found_by_their_names() -> None:
    assert {"graphs", "lanes", "stack"} <= {*available("runner")}


@pytest.mark.parametrize("options", [{}, {"lanes": 4}, {"stack": 3, "client_models": ["mlp", "simple-cnn"]}])
def test_none_applies_on_a_cpu_without_a_stack(options: dict[str, object]) -> None:
    config, dataset = RunConfig.create({"device": "cpu", **options}), load_dataset("digits")
    assert offer_graphs(config, dataset) is None
    assert offer_lanes(config, dataset) is None
    assert isinstance(runner_of(config, dataset), OneByOne)


def test_a_stack_takes_as_many_trainings_as_it_is_asked_for() -> None:
    runner = runner_of(RunConfig(stack=5), load_dataset("digits"))
    assert isinstance(runner, Stacks)
    assert runner.together == 5


@pytest.mark.parametrize("plugins", [(), ("fedprox",), ("scaffold",)], ids="+".join)
def test_a_stack_trains_as_one_by_one(tmp_path, plugins) -> None:
    plain, stacked = federate(tmp_path, *plugins, **TOGETHER), federate(tmp_path, *plugins, **TOGETHER, stack=4)
    for name, tensor in weights(plain).items():
        assert torch.allclose(weights(stacked)[name], tensor, rtol=1e-4, atol=1e-6), name


class FailsOnTwo(Plugin):
    """Clients 2 and 5 cannot begin: those behind them take their places in the stack."""

    @hookimpl
    def begin_local(self, client):
        if client.id in (2, 5):
            raise ValueError("cannot begin")

    @hookimpl
    def local_loss(self, step):
        return Loss(step.features.square().mean())


def test_clients_that_fail_at_the_start_fail_alone(tmp_path) -> None:
    result = federate(tmp_path, FailsOnTwo, **{**TOGETHER, "stack": 8, "participation": 1.0})
    for line in records(result):
        assert [(failure["client"], failure["kind"]) for failure in line["failures"]] == [(2, "raised"), (5, "raised")]
        assert line["accepted"] == 6
