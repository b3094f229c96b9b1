"""Runners take the steps of trainings that come together, with the results of one by one."""

from __future__ import annotations

import pytest
import torch
from on_cpu import CpuRecorder, captured_on_cpu

from fedcore import Loss, Plugin, RunConfig, hookimpl
from fedcore.client import OneByOne, drain, runner_of, take_step
from fedcore.data import Dataset, load_dataset
from fedcore.tools import registry
from fedcore_accelerate import Series, Stacks, offer_graphs, offer_lanes, offer_stack
from fedcore_accelerate.graphs import captures
from fedcore_testing import NotApplicable, federate, records, the_same_as_one_by_one
from fedcore_zoo import SequenceSamples
from tests.sentences import raises
from tests.support import brief

UNSEEDED = ("dp", "dp-sgd", "local-dp")
"""Methods that no run repeats: their noise is secret."""
TAKEN = {"local_epochs": 4, "batch_size": 8}
LANES = {**TAKEN, "lanes": 2}
TOGETHER = {"clients": 8, "rounds": 2, "workers": 0, "partition": "iid", "model": "mlp"}


def test_they_are_found_by_their_names() -> None:
    assert {"graphs", "lanes", "series", "stack"} <= {*registry.available("runner")}


@pytest.mark.parametrize("options", [{}, {"lanes": 4}, {"stack": 3, "client_models": ["mlp", "simple-cnn"]}])
def test_on_a_cpu_without_a_stack_clients_train_in_series(options: dict[str, object]) -> None:
    config, dataset = RunConfig.create({"device": "cpu", **options}), load_dataset("digits")
    assert offer_graphs(config, dataset) is None
    assert offer_lanes(config, dataset) is None
    assert offer_stack(config, dataset) is None
    assert isinstance(runner_of(config, dataset), Series)


def test_a_stack_takes_as_many_trainings_as_it_is_asked_for() -> None:
    runner = runner_of(RunConfig(stack=5), load_dataset("digits"))
    assert isinstance(runner, Stacks)
    assert runner.together == 5


@pytest.mark.sampled(17)
@pytest.mark.parametrize(("offer", "options"), [(offer_graphs, TAKEN), (offer_lanes, LANES)], ids=["graphs", "lanes"])
@pytest.mark.parametrize("name", sorted({*registry.available("plugin")} - {*UNSEEDED, "fedavg"}))
def test_every_method_trains_as_one_by_one(monkeypatch, name, offer, options) -> None:
    """The kit asks the same of stacks, with the other checks."""
    recorder = CpuRecorder()
    with captured_on_cpu(monkeypatch, recorder):
        the_same_as_one_by_one(offer, brief(name), **options)
    assert recorder.launched > recorder.recorded > 0


def test_a_runner_that_errs_is_found() -> None:
    class Skips(OneByOne):
        """Leaves the last batch of each epoch out."""

        def run(self, tasks, begin):
            trainings = [begin(task, self._working) for task in tasks]
            return [drain(training, lambda batch: None if batch.last else take_step(batch)) for training in trainings]

    with raises(AssertionError):
        the_same_as_one_by_one(lambda config, dataset: Skips(), "fedprox", **TAKEN)


class Draws(Plugin):
    @hookimpl
    def local_loss(self, step):
        with step.random("noise"):
            return Loss(torch.rand(()) * step.features.square().mean())


def test_a_runner_that_does_not_apply_says_so() -> None:
    with raises(NotApplicable):
        the_same_as_one_by_one(offer_lanes, "fedprox", **LANES)
    with raises(NotApplicable):
        the_same_as_one_by_one(offer_stack, Draws, rounding=True, **TAKEN, stack=3)


def test_lanes_take_models_of_their_own(monkeypatch) -> None:
    with captured_on_cpu(monkeypatch, CpuRecorder()):
        the_same_as_one_by_one(offer_lanes, "fedproto", **LANES, client_models=["mlp", "simple-cnn"], projection=True)


def test_steps_are_recorded_only_where_all_batches_of_a_size_have_one_shape() -> None:
    cuda, words = torch.device("cuda"), Dataset("words", *[SequenceSamples.of([[1], [2, 3]], [0, 1])] * 2, 2, (4,))
    assert captures(RunConfig(), cuda, load_dataset("digits"))
    assert captures(RunConfig(), cuda, load_dataset("breast-cancer"))
    assert not captures(RunConfig(), cuda, words)
    assert not captures(RunConfig(), torch.device("cpu"), load_dataset("digits"))
    assert not captures(RunConfig(capture=False), cuda, load_dataset("digits"))
    assert not captures(RunConfig(stack=2), cuda, load_dataset("digits"))


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
