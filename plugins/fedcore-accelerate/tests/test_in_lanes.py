"""Clients side by side in one process: the bits of one after the other, on a recorder for the CPU."""

import warnings

import example_steps
import pytest
import torch
from on_cpu import CpuRecorder, assert_same, captured_on_cpu, side_by_side, storages
from torch import nn

from fedcore import Loss, Plugin, PluginContractError, SplitModel, hookimpl
from fedcore.client import runner_of
from fedcore.data import load_dataset
from fedcore_accelerate import Graphs, Lanes, Series
from fedcore_accelerate.captured_steps import CaptureWarning
from fedcore_testing import small_config
from tests import support
from tests.sentences import raises

RUN = {**example_steps.RUN, "clients": 8}


@pytest.fixture
def both(tmp_path, monkeypatch):
    """Run in lanes and one client after the other; returns both results and the recorder."""
    return lambda *plugins, **options: side_by_side(tmp_path, monkeypatch, *plugins, **{**RUN, **options})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plugins", [(), ("fedprox",)], ids="+".join)
def test_steps_of_several_clients_are_one_launch(both, plugins):
    _, _, recorder = both(*plugins, partition="iid", participation=1.0, rounds=4)
    assert recorder.branched > recorder.launched / 2


@pytest.mark.parametrize("method", ["moon", "scaffold"])
def test_steps_that_read_their_client_are_no_branches(both, method):
    _, _, recorder = both(method, partition="iid")
    assert recorder.launched
    assert not recorder.branched


@pytest.mark.parametrize("model", ["with_dropout", "with_batch_norm"])
def test_branches_draw_their_own_random_numbers(both, model):
    lanes, plain, recorder = both(model=f"module:{example_steps.__name__}.{model}", batch_size=16, rounds=3)
    assert_same(lanes, plain)
    assert recorder.branched


def halves_a_gradient(num_classes, input_shape):
    model = SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU()), 16, num_classes)
    model.encoder.base[1].weight.register_hook(lambda gradient: gradient / 2)
    return model


def test_a_model_with_a_hook_on_a_gradient_trains_in_one_lane(both):
    """The copies for other lanes lack it."""
    lanes, plain, recorder = both(model=halves_a_gradient, rounds=1)
    assert_same(lanes, plain)
    assert not recorder.branched


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options",
    [{"local_steps": 30}, {"lr_decay": 0.5}, {"momentum": 0.0}, {"client_test_fraction": 0.2}, example_steps.ADAMW],
)
def test_options(both, options):
    lanes, plain, recorder = both("fedprox", **options)
    assert_same(lanes, plain)
    assert recorder.branched


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["Waits", "Rebinds", "Noisy", "ByEpoch", "ByRound", "Adds", "Freezes", "Starts"])
def test_hooks_that_keep_or_read_something(both, name):
    cls = getattr(example_steps, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        lanes, plain, _ = both(cls)
    assert_same(lanes, plain)


class FailsOnOne(Plugin):
    @hookimpl
    def local_loss(self, step):
        if step.client.id == 3 and step.epoch == 1:
            raise ValueError("client 3 cannot go on")
        return Loss(step.features.square().mean())


def test_a_client_that_fails_in_a_step_fails_alone(both):
    lanes, plain, _ = both(FailsOnOne, participation=1.0)
    assert_same(lanes, plain)
    failures = support.lines(lanes)[0]["failures"]
    assert [(failure["client"], failure["kind"]) for failure in failures] == [(3, "raised")]


def test_a_broken_contract_ends_the_run(both):
    class Breaks(Plugin):
        @hookimpl
        def local_loss(self, step):
            return Loss(step.features)  # no scalar

    with raises(PluginContractError):
        both(Breaks)


def test_a_window_and_more_lanes_than_clients(both):
    lanes, plain, _ = both("fedprox", lanes=12, max_waiting=1)
    assert_same(lanes, plain)


def test_clients_of_one_model_train_side_by_side_next_to_clients_of_another(both):
    models = {"client_models": ["mlp", "simple-cnn"], "model": "auto", "projection": True}
    lanes, plain, recorder = both("solo", partition="iid", participation=1.0, lanes=4, **models)
    assert_same(lanes, plain)
    assert recorder.branched


def test_lanes_are_for_steps_that_are_captured(tmp_path, monkeypatch):
    dataset, alone = load_dataset("digits"), small_config(tmp_path, clients=3)
    config = small_config(tmp_path, lanes=4, clients=3)
    assert type(runner_of(config, dataset)) is Series  # no graphs on a CPU
    with captured_on_cpu(monkeypatch, CpuRecorder()):
        runner = runner_of(config, dataset)
        assert isinstance(runner, Lanes)
        assert runner.lanes == 3  # no more than there are clients
        assert type(runner_of(alone, dataset)) is Graphs


def test_branches_that_share_memory_are_found():
    shared, one, other = torch.zeros(2), torch.zeros(2), nn.Parameter(torch.zeros(2))

    def reads():
        one.add_(shared)

    def writes():
        shared.add_(other.detach())

    with raises(AssertionError):
        CpuRecorder().record_branches([reads, writes], [None, None])
    CpuRecorder().record_branches([reads, lambda: other.detach().add_(shared)], [None, None])
    assert storages([one, shared]) != storages([one])
