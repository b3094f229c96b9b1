"""What is captured, how long it is kept and when not: the policy of captured steps, on a recorder for the CPU."""

import warnings

import pytest
import torch
from torch import nn

from fedcore import Loss, Plugin, hookimpl
from fedcore.models import SplitModel
from fedcore_accelerate.captured_steps import CaptureWarning
from tests import support
from tests.recorder import CpuRecorder, captured_on_cpu

RUN = {
    "dataset": "module:fedcore_testing.problems.few_digits",
    "rounds": 2,
    "local_epochs": 4,
    "participation": 0.5,
    "batch_size": 8,
}
ADAMW = {"optimizer": "adamw", "lr": 0.001}
METHODS = [
    (),
    ("fedprox",),
    ("moon",),
    ("moon", "uscc"),
    ("fedproc",),
    ("fedeccr",),
    ("fdcl",),
    ("fedcme",),
    ("fedcd",),
    ("fedcp",),
    ("ccvr",),
    ("ditto",),
    ("fedrs",),
    ("fedper",),
    ("solo",),
    ("fednova",),
    ("scaffold",),
    ("feddyn",),
    ("feddc",),
    ("fedprox", "moon"),
    ("fedcme", "fedprox"),
    ("fedsam",),
    ("per-fedavg",),
    ("fedrep",),
    ("fedbabu",),
    ("fedala",),
    ("fedetf",),
    ("fednh",),
    ("fpl",),
    ("fedtgp",),
    ("fedpac",),
]
# Each of these has its terms in a combination above, or leaves FedAvg's step as it is.
SLOW = [("fedprox",), ("moon",), ("fedcme",), ("ccvr",), ("fedper",), ("solo",), ("fednova",)]
SLOW += [
    ("fedrs",),
    ("ditto",),
    ("feddyn",),
    ("feddc",),
    ("fedcp",),
    ("moon", "uscc"),
    ("fedsam",),
    ("per-fedavg",),
    ("fedrep",),
    ("fedbabu",),
    ("fedala",),
    ("fedetf",),
    ("fednh",),
    ("fedtgp",),
    ("fedpac",),
]


def with_dropout(num_classes, input_shape):
    base = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.5))
    return SplitModel(base, 32, num_classes)


def with_batch_norm(num_classes, input_shape):
    base = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 32))
    return SplitModel(base, 32, num_classes)


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


def assert_same(one, other):
    assert support.model_bytes(one) == support.model_bytes(other)
    assert support.lines(one) == support.lines(other)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "plugins",
    [pytest.param(plugins, marks=[pytest.mark.slow] if plugins in SLOW else []) for plugins in METHODS],
    ids="+".join,
)
def test_captured_steps_train_as_plain_ones_do(both, plugins):
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        captured, plain, recorder = both(*map(support.brief, plugins))
    assert recorder.launched > 3 * recorder.recorded > 0
    assert_same(captured, plain)


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
    captured, plain, recorder = both(model=f"module:{__name__}.{model}", batch_size=16)
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


class Waits(Plugin):
    @hookimpl
    def local_loss(self, step):
        return Loss(step.features.square().mean() * (1.0 if step.logits.sum().item() > 0 else 2.0))


class Rebinds(Plugin):
    @hookimpl
    def observe(self, step):
        scratch = step.client.scratch
        scratch["seen"] = scratch.get("seen", torch.zeros(())) + len(step.x)

    @hookimpl
    def end_local(self, client):
        return {"seen": client.scratch["seen"]}

    @hookimpl
    def accumulate(self, server, update):
        assert float(update.payload["seen"]) == update.samples * RUN["local_epochs"]


class CountsInPython(Rebinds):
    @hookimpl
    def observe(self, step):
        notes = step.client.scratch
        notes["count"] = notes.get("count", 0) + len(step.x)

    @hookimpl
    def end_local(self, client):
        return {"seen": torch.tensor(float(client.scratch["count"]))}


class InPlace(Rebinds):
    @hookimpl
    def begin_local(self, client):
        client.scratch["seen"] = torch.zeros((), device=next(client.model.parameters()).device)

    @hookimpl
    def observe(self, step):
        step.client.scratch["seen"].add_(len(step.x))


class Noisy(Plugin):
    @hookimpl
    def local_loss(self, step):
        with step.random("noise"):
            return Loss((step.features * torch.randn_like(step.features)).mean())


class ByEpoch(Plugin):
    @hookimpl
    def local_loss(self, step):
        return Loss(step.features.square().mean(), weight=0.1 * step.epoch)


class ByRound(Plugin):
    @hookimpl
    def local_loss(self, step):
        return Loss(step.features.square().mean(), weight=step.progress)


class Adds(Plugin):
    @hookimpl
    def begin_local(self, client):
        client.add_parameters({"shift": torch.zeros(client.model.feature_dim)})

    @hookimpl
    def local_loss(self, step):
        return Loss((step.features - step.added["shift"]).square().mean())


class Freezes(Plugin):
    @hookimpl
    def begin_local(self, client):
        if client.id % 2:
            client.freeze(["classifier.*"])


class Ascends(Plugin):
    @hookimpl
    def gradients(self, step, gradients):
        norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt() + 1e-12
        return step.gradients_at({n: step.model.get_parameter(n) + 0.05 / norm * g for n, g in gradients.items()})


class Starts(Plugin):
    starts = ("classifier.*",)
    reads = ("global",)

    @hookimpl
    def begin_local(self, client):
        return {"classifier.weight": client.model.classifier.weight * (0.5 + 0.1 * client.id)}

    @hookimpl
    def local_loss(self, step):
        return Loss((step.logits - step.frozen("global").logits).square().mean())


class Alternates(Plugin):
    @hookimpl
    def begin_local(self, client):
        client.freeze(["classifier.*"], epochs=slice(1, None, 2))
        client.freeze(["encoder.*"], epochs=slice(0, None, 2))


class OnRows(Plugin):
    @hookimpl
    def gradients(self, step, gradients):
        return step.gradients_at({n: step.model.get_parameter(n) - 0.01 * g for n, g in gradients.items()}, slice(0, 4))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cls", [Ascends, OnRows])
@pytest.mark.parametrize("others", [(), ("fedprox",), ("ditto",)], ids="+".join)
def test_a_step_of_two_passes_is_one_graph(both, cls, others):
    captured, plain, recorder = both(cls, *others, model=f"module:{__name__}.with_batch_norm", local_epochs=2)
    assert recorder.launched > recorder.recorded > 0
    assert_same(captured, plain)


@pytest.mark.parametrize("cls", [Starts, Alternates])
def test_starts_and_epochs_are_captured(both, cls):
    captured, plain, recorder = both(cls, "fedprox")
    assert recorder.launched > recorder.recorded > 0
    assert_same(captured, plain)


def test_two_passes_with_dropout_are_not_captured(both):
    captured, plain, recorder = both(Ascends, model=f"module:{__name__}.with_dropout", local_epochs=2)
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


@pytest.mark.parametrize("plugins", [(), ("fedper", "fedprox")], ids="+".join)
def test_unseen_clients_adapt_by_plain_steps_between_captured_ones(both, plugins):
    options = {"clients": 5, "unseen_clients": 0.4, "adapt_epochs": 2, "client_test_fraction": 0.25}
    captured, plain, recorder = both(*plugins, **options)
    assert recorder.launched > recorder.recorded > 0
    assert plain.metrics["unseen_adapted"]["clients"] == 2
    assert_same(captured, plain)
