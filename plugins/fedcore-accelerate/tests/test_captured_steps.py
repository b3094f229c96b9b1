"""What is captured, how long it is kept and when not: the policy of captured steps, on a recorder for the CPU."""

import example_steps
import pytest
from example_steps import (
    ADAMW,
    RUN,
    Adds,
    Alternates,
    Ascends,
    ByEpoch,
    ByRound,
    CountsInPython,
    Freezes,
    InPlace,
    Noisy,
    OnRows,
    Rebinds,
    Starts,
    Waits,
)
from on_cpu import CpuRecorder, assert_same, captured_on_cpu
from torch import nn

from fedcore import SplitModel
from fedcore_accelerate.captured_steps import CaptureWarning


@pytest.fixture
def both(go, monkeypatch):
    """Run with captured steps and with plain ones; returns both results and the recorder."""

    def run(*plugins, **options):
        plain = go(*plugins, **{**RUN, **options})
        recorder = CpuRecorder()
        with captured_on_cpu(monkeypatch, recorder):
            captured = go(*plugins, **{**RUN, **options})
        return captured, plain, recorder

    return run


def test_a_graph_does_not_repeat_the_noise_of_private_steps(both):
    pytest.importorskip("fedcore_dp")
    captured, plain, recorder = both(("dp-sgd", {"seed_noise": True}))
    assert recorder.recorded == 0
    assert_same(captured, plain)


def test_a_model_kept_from_the_epoch_before_is_captured(both):
    captured, plain, recorder = both(("fdcl", {"previous": "epoch", "mu": 1.0}))
    assert recorder.launched > recorder.recorded > 0
    assert_same(captured, plain)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plugins", [(), ("fedprox",)], ids="+".join)
def test_steps_that_depend_on_nothing_are_captured_once_for_all_clients(both, plugins):
    _, _, recorder = both(*plugins, rounds=6)
    assert recorder.recorded <= 1 + 4  # full batches, and the last one of each client's size


def test_steps_that_depend_on_the_client_are_captured_for_each(both):
    _, _, recorder = both("moon", batch_size=16)
    assert recorder.recorded >= 2 * 2  # clients per round, rounds


@pytest.mark.parametrize("model", ["with_dropout", "with_batch_norm"])
def test_dropout_and_batch_norm_are_captured(both, model):
    captured, plain, recorder = both(model=f"module:{example_steps.__name__}.{model}", batch_size=16)
    assert recorder.recorded
    assert_same(captured, plain)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options",
    [
        {"local_steps": 30},
        {"clip_norm": 1.0},
        {"lr_decay": 0.5},
        {"momentum": 0.0},
        {"precision": "bf16"},
        {"client_test_fraction": 0.2},
        ADAMW,
    ],
)
def test_options_are_captured(both, options):
    captured, plain, recorder = both("moon", "fedprox", **options)
    assert recorder.recorded
    assert_same(captured, plain)


SCHEDULES = [{}, {"lr_decay": 0.99}, {"lr_schedule": "cosine"}, {"lr_schedule": "step", "lr_step_rounds": 3}]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=["constant", "decay", "cosine", "step"])
@pytest.mark.parametrize("plugins", [(), ("fedprox",)], ids="+".join)
def test_graphs_of_earlier_learning_rates_are_not_kept(go, monkeypatch, plugins, schedule):
    """On CUDA each holds memory of its own."""
    recorder, kept = CpuRecorder(), []

    def notify(event, details):
        if event == "round":
            kept.append(len(recorder.kept))

    options = {**RUN, "rounds": 8, "local_epochs": 2, "participation": 1.0, "clients": 2, "partition": "iid"}
    with captured_on_cpu(monkeypatch, recorder):
        go(*plugins, notify=notify, **{**options, **schedule})
    assert recorder.recorded >= (8 if len(schedule) == 1 else 2)
    assert set(kept) == {2}, "for full batches, and for the last one of an epoch"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cls", [Ascends, OnRows])
@pytest.mark.parametrize("others", [(), ("fedprox",), ("ditto",)], ids="+".join)
def test_a_step_of_two_passes_is_one_graph(both, cls, others):
    captured, plain, recorder = both(
        cls, *others, model=f"module:{example_steps.__name__}.with_batch_norm", local_epochs=2
    )
    assert recorder.launched > recorder.recorded > 0
    assert_same(captured, plain)


@pytest.mark.parametrize("cls", [Starts, Alternates])
def test_starts_and_epochs_are_captured(both, cls):
    captured, plain, recorder = both(cls, "fedprox")
    assert recorder.launched > recorder.recorded > 0
    assert_same(captured, plain)


def test_two_passes_with_dropout_are_not_captured(both):
    captured, plain, recorder = both(Ascends, model=f"module:{example_steps.__name__}.with_dropout", local_epochs=2)
    assert recorder.recorded == 0
    assert_same(captured, plain)


def test_a_hook_that_waits_for_the_device_is_not_captured_and_said_so(both):
    with pytest.warns(CaptureWarning, match="waits.*local_loss"):
        captured, plain, recorder = both(Waits)
    assert recorder.launched == 0
    assert_same(captured, plain)


@pytest.mark.parametrize("cls", [Rebinds, CountsInPython, Noisy])
def test_what_a_replay_would_not_do_again_is_not_captured(both, cls):
    captured, plain, recorder = both(cls)
    assert recorder.recorded == 0
    assert_same(captured, plain)


@pytest.mark.parametrize("cls", [InPlace, ByEpoch, ByRound, Adds, Freezes])
def test_what_depends_on_client_round_or_epoch_is_captured_for_it(both, cls):
    captured, plain, recorder = both(cls, batch_size=16)
    assert recorder.launched > recorder.recorded > 0
    assert_same(captured, plain)


class Anneals(nn.Linear):
    """Its temperature falls with each call, as in a search for an architecture."""

    def __init__(self):
        super().__init__(64, 16)
        self.temperature = 8.0

    def forward(self, x):
        self.temperature *= 0.9 if self.training else 1.0
        return super().forward(x.flatten(1)).div(self.temperature).softmax(1)


def that_anneals(num_classes, input_shape):
    return SplitModel(Anneals(), 16, num_classes)


class FollowsItsFirstBatch(nn.Linear):
    """What it keeps is made by a client's first step, as masks are that depend on a length."""

    mean = None

    def __init__(self):
        super().__init__(64, 16)

    def forward(self, x):
        features = super().forward(x.flatten(1))
        if self.mean is None and self.training:
            self.mean = features.detach().mean(0)
        return features if self.mean is None else features - self.mean


def that_follows_its_first_batch(num_classes, input_shape):
    return SplitModel(FollowsItsFirstBatch(), 16, num_classes)


def test_a_network_that_changes_at_each_call_is_not_captured(both):
    captured, plain, recorder = both(model=that_anneals)
    assert recorder.recorded == 0
    assert_same(captured, plain)


def test_what_a_network_keeps_of_a_client_is_captured_for_it(both):
    captured, plain, recorder = both(model=that_follows_its_first_batch)
    assert recorder.launched > recorder.recorded > 0
    assert_same(captured, plain)


@pytest.mark.parametrize("plugins", [(), ("fedper", "fedprox")], ids="+".join)
def test_unseen_clients_adapt_by_plain_steps_between_captured_ones(both, plugins):
    options = {"clients": 5, "unseen_clients": 0.4, "adapt_epochs": 2, "client_test_fraction": 0.25}
    captured, plain, recorder = both(*plugins, **options)
    assert recorder.launched > recorder.recorded > 0
    assert plain.metrics["unseen_adapted"]["clients"] == 2
    assert_same(captured, plain)
