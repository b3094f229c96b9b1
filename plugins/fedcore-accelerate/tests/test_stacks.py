"""Clients that train as one: the weights of clients one by one up to rounding, on any number of workers."""

from __future__ import annotations

import os
import random
import signal
import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fedcore import (
    Interrupted,
    Loss,
    Plugin,
    PluginContractError,
    PluginOptions,
    RejectUpdate,
    SplitModel,
    hookimpl,
    resume,
)
from fedcore.client import LocalSession
from fedcore.data import TensorSamples, load_dataset
from fedcore_accelerate import StackWarning
from fedcore_accelerate import stack as stack_runner
from fedcore_accelerate.rules import Rules
from fedcore_accelerate.stacks import Group
from fedcore_testing import Cohorts
from fedcore_testing.compare import require_close_states, require_same
from tests import support
from tests.sentences import raises, warns

UNEQUAL = {"clients": 12, "participation": 0.75, "rounds": 3, "local_epochs": 1, "workers": 0, "alpha": 0.3}
STACK = 6

ALONE = {
    "fedamp": "tensors of its own",
    "fedpac": "tensors of its own",
    "fedcme": "pauses",
    "fedcp": "buffers",
    "fedgen": "random",
    "fedsam": "gradients",
    "per-fedavg": "gradients",
}
"""Methods whose steps, or some of them, are taken one by one -> the reason."""


@pytest.fixture
def steps(monkeypatch):
    """Count the clients' steps that are taken as one, and those that are taken alone."""
    counts = {"stacked": 0, "alone": 0}
    step, alone = Group.step, stack_runner._alone

    def counted(group, first, x, *joined, **more):
        losses = step(group, first, x, *joined, **more)
        counts["stacked" if len(x) > 1 else "alone"] += len(x)
        return losses

    def counted_alone(place):
        counts["alone"] += 1
        return alone(place)

    monkeypatch.setattr(Group, "step", counted)
    monkeypatch.setattr(stack_runner, "_alone", counted_alone)
    return counts


@pytest.fixture
def both(tmp_path):
    """Run in stacks and one by one; return both results, the first in stacks."""

    def go(*plugins, **options):
        run = partial(support.run, tmp_path, *plugins, **{**UNEQUAL, **options})
        with warnings.catch_warnings():
            warnings.simplefilter("error", StackWarning)
            return run(stack=STACK), run()

    return go


def assert_close(stacked, plain, relative=1e-5):
    one, other = support.weights(stacked), support.weights(plain)
    for name, tensor in other.items():
        assert (one[name] - tensor).norm() <= relative * tensor.norm(), name
    for mine, theirs in zip(support.lines(stacked), support.lines(plain), strict=True):
        assert mine.get("losses", {}) == pytest.approx(theirs.get("losses", {}), rel=1e-3)
    require_close_states(stacked, plain, "in stacks")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plugins", [(), ("fedprox",), ("moon",)], ids="+".join)
def test_clients_as_one_are_clients_one_by_one(both, steps, plugins):
    assert_close(*both(*plugins))
    assert steps["stacked"] > steps["alone"] > 0  # batches at the end of an epoch have unequal sizes


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ALONE))
def test_methods_that_cannot_be_stacked_say_so(tmp_path, name):
    notes = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stacked = support.run(
            tmp_path, name, **{**UNEQUAL, "local_epochs": 2}, stack=STACK, notify=lambda _, d: notes.append(str(d))
        )
    said = [str(each.message) for each in caught if each.category is StackWarning]
    assert len(said) <= 1
    assert ALONE[name] in str([*said, *notes])
    assert_close(stacked, support.run(tmp_path, name, **{**UNEQUAL, "local_epochs": 2}))


@pytest.mark.parametrize("options", [{"optimizer": "adam", "lr": 0.01}, {"clip_norm": 0.5}, {"momentum": 0.0}], ids=str)
def test_optimizers_and_clipping(both, steps, options):
    assert_close(*both(rounds=1, **options))
    assert steps["stacked"]


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_linear_layers_have_the_memory_format_of_the_weights(bias, in_order):
    layer = nn.Linear(5, 3, bias=bias)
    weights = {name: nn.Parameter(torch.randn(4, *parameter.shape)) for name, parameter in layer.named_parameters()}
    x = torch.randn(4, 6, 5)

    def product(own, rows):
        with Rules(own.values(), layer.parameters(), in_order=in_order):
            return functional_call(layer, own, (rows,))

    products = vmap(product)(weights, x)
    gradients = torch.autograd.grad(products.square().sum(), [*weights.values()])
    alone = torch.stack([functional_call(layer, {n: w[k] for n, w in weights.items()}, (x[k],)) for k in range(4)])
    torch.testing.assert_close(products, alone)
    assert products.is_contiguous() is in_order
    torch.testing.assert_close(gradients, torch.autograd.grad(alone.square().sum(), [*weights.values()]))
    assert all(gradient.is_contiguous() for gradient in gradients)


class Words(nn.Module):
    """Pixels are words, and dark ones padding."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(17, 8, padding_idx=0)
        self.hidden = nn.Linear(8, 16)

    def forward(self, x):
        return self.hidden(self.table((16 * x).long().clamp(0, 16).flatten(1)).mean(1)).relu()


def with_padding(num_classes, input_shape):
    return SplitModel(Words(), 16, num_classes)


class TakesAFurtherPass(Plugin):
    @hookimpl
    def local_loss(self, step):
        return Loss(step.model(step.x)[1].square().mean(), weight=0.1)


class AsksInAPass(Plugin):
    @hookimpl
    def local_loss(self, step):
        logits = step.model.classifier(step.features)  # lie in columns, in a stack
        return Loss(logits.reshape(-1).square().mean(), weight=0.1)


class HasATable(Plugin):
    @hookimpl
    def begin_local(self, client):
        client.add_parameters({"table": torch.zeros(client.num_classes, 16)}, lr=0.5)

    @hookimpl
    def local_loss(self, step):
        return Loss((step.features - F.embedding(step.y, step.added["table"], padding_idx=0)).square().mean())


def without_padding(num_classes, input_shape):
    return SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU()), 16, num_classes)


@pytest.mark.parametrize(
    ("model", "plugins"),
    [(with_padding, ()), (with_padding, (TakesAFurtherPass,)), (without_padding, (HasATable,))],
    ids=["plain", "further-pass", "own-table"],
)
def test_the_row_of_padding_has_no_gradient_at_any_client(both, steps, model, plugins):
    """Torch's rule for embeddings under vmap knows the first client's alone."""
    assert_close(*both(*plugins, rounds=1, model=model))
    assert steps["stacked"]


def test_a_hook_that_needs_a_products_rows_in_order_stays_in_the_stack(both, steps):
    assert_close(*both(AsksInAPass, rounds=1))
    assert steps["stacked"]


def with_norms_of_batches(num_classes, input_shape):
    norm = nn.BatchNorm2d(8, track_running_stats=False)
    return SplitModel(
        nn.Sequential(nn.Conv2d(1, 8, 3), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()), 8, num_classes
    )


class Centred(nn.Linear):
    def __init__(self):
        super().__init__(64, 16)

    def forward(self, x):
        features = super().forward(x.flatten(1))
        return features - features.mean(0)


def centred_features(num_classes, input_shape):
    return SplitModel(Centred(), 16, num_classes)


@pytest.mark.parametrize("model", [with_norms_of_batches, centred_features])
def test_frozen_models_see_the_samples_of_one_client(both, steps, model):
    """BatchNorm without statistics of its own takes those of the batch."""
    assert_close(*both("fedntd", rounds=2, local_epochs=2, model=model), relative=1e-4)
    assert steps["stacked"]


class MovesToTheMean(Plugin):
    @hookimpl
    def broadcast(self, server):
        return dict(server.state)

    @hookimpl
    def local_loss(self, step):
        mean = step.client.received.get("mean")
        return None if mean is None else Loss((step.features.square().mean(0) - mean).square().sum())

    @hookimpl
    def end_local(self, client):
        return {"mean": client.forward()[0].square().mean(0)}

    @hookimpl
    def accumulate(self, server, update):
        server.state.add("mean", update.payload["mean"])


def test_a_pass_at_the_end_has_the_batches_of_one_client(both):
    sizes = {"clients": 2, "participation": 1.0, "batch_size": 500}
    assert_close(*both(MovesToTheMean, rounds=2, model=centred_features, **sizes))


class MovesToTheMiddle:
    """An augmentation that takes statistics of a batch."""

    @staticmethod
    def draw(n, generator):
        return torch.rand((n, 1), generator=generator)

    @staticmethod
    def apply(x, drawn, mean, std):
        return x - drawn.view(-1, 1, 1, 1) * x.mean(0)


def centred(data_dir):
    return replace(load_dataset("digits"), augmentation=f"module:{__name__}.MovesToTheMiddle")


def test_an_augmentation_sees_the_samples_of_one_client(both, steps):
    assert_close(*both(rounds=1, dataset=centred, augment=True))
    assert steps["stacked"]


class WithTemperature(nn.Linear):
    def __init__(self):
        super().__init__(64, 16)
        self.temperature = nn.Parameter(torch.tensor(1.3))

    def forward(self, x):
        return super().forward(x.flatten(1)).relu() * self.temperature


def with_a_scalar(num_classes, input_shape):
    return SplitModel(WithTemperature(), 16, num_classes)


def test_a_parameter_without_dimensions_is_clipped(both, steps):
    assert_close(*both(rounds=1, clip_norm=0.1, model=with_a_scalar))
    assert steps["stacked"]


class HoldsItself(nn.Linear):
    def __init__(self):
        super().__init__(64, 16)
        self.bent = lambda x: nn.Linear.forward(self, x).tanh()

    def forward(self, x):
        return self.bent(x.flatten(1))


def with_a_function_of_itself(num_classes, input_shape):
    return SplitModel(HoldsItself(), 16, num_classes)


def test_a_function_of_the_model_computes_with_each_copy(both, steps):
    assert_close(*both("fedala", rounds=2, model=with_a_function_of_itself))
    assert steps["stacked"]


class AsksForItsScale(WithTemperature):
    """A number or a parameter, as its user likes."""

    def forward(self, x):
        scale = self.temperature.exp() if isinstance(self.temperature, nn.Parameter) else self.temperature
        return nn.Linear.forward(self, x.flatten(1)).relu() * scale


def that_asks_for_its_scale(num_classes, input_shape):
    return SplitModel(AsksForItsScale(), 16, num_classes)


@pytest.mark.parametrize("plugins", [("moon",), ("scaffold",)], ids="+".join)
def test_weights_in_a_stack_are_parameters(both, steps, plugins):
    assert_close(*both(*plugins, rounds=2, model=that_asks_for_its_scale))
    assert steps["stacked"]


class Windows(nn.Linear):
    def __init__(self):
        super().__init__(64, 16)

    def forward(self, x):
        hidden = super().forward(x.flatten(1))
        return hidden.as_strided((len(x), 8, 9), (16, 1, 1)).amax(2).relu()


def with_windows(num_classes, input_shape):
    return SplitModel(Windows(), 8, num_classes)


class Scaled(nn.Linear):
    def __init__(self, flat):
        super().__init__(64, 16)
        self.flat = flat

    def forward(self, x):
        hidden = super().forward(x.flatten(1))
        self.flat(hidden).mul_(2.0)  # of the layer's output, or of a copy of it
        return hidden.tanh()


def scaled(flat):
    return lambda num_classes, input_shape: SplitModel(Scaled(flat), 16, num_classes)


FLAT = {
    "reshape": lambda x: x.reshape(-1),
    "torch.reshape": lambda x: torch.reshape(input=x, shape=(-1,)),
    "flatten": lambda x: x.flatten(),
    "module": nn.Flatten(0),
    "ravel": torch.ravel,
    "contiguous": lambda x: x.contiguous(),
    "view": lambda x: x.view(-1),
    "view_as": lambda x: x.view_as(torch.empty(x.numel())),
    "of a part": lambda x: x[:, :8].reshape(-1, 2, 4),
    "of columns": lambda x: x.t().contiguous(),
    "if in order": lambda x: x if x.is_contiguous() else x.clone(),
}


@pytest.mark.parametrize("model", [with_windows, *map(scaled, FLAT.values())], ids=["with_windows", *FLAT])
def test_outputs_of_linear_layers_lie_in_memory_as_they_do_alone(both, steps, model):
    assert_close(*both(rounds=1, model=model))
    assert steps["stacked"]


class InDouble(nn.Module):
    def forward(self, x):
        return x.flatten(1).double()


def in_double(num_classes, input_shape):
    return SplitModel(nn.Sequential(InDouble(), nn.Linear(64, 16), nn.ReLU()), 16, num_classes).double()


@pytest.mark.filterwarnings("ignore::fedcore_accelerate.StackWarning")
def test_clients_whose_parameters_have_had_other_numbers_of_steps_take_none_together(tmp_path, steps):
    """After three epochs one client trains its body for the second time, another for the first time."""
    options = {"optimizer": "adam", "lr": 0.01, "local_epochs": 5, "rounds": 2, "partition": "iid", "model": in_double}
    fedrep = "fedrep", {"representation_epochs": 2}
    run = partial(support.run, tmp_path, fedrep, **{**UNEQUAL, **options, "system": {"stragglers": 0.7}})
    assert_close(run(stack=STACK), run(), relative=1e-9)
    assert steps["stacked"]


@pytest.mark.parametrize("method", ["moon", "fedntd"])
def test_samples_that_an_epoch_leaves_out_come_in_another(both, method):
    """Frozen models have no outputs for them from the first epoch."""
    assert_close(*both(method, rounds=2, local_epochs=3, drop_last=True))


class LooksAtSmallBatches(Plugin):
    """Reads the frozen model in some steps alone."""

    reads = ("global",)

    @hookimpl
    def local_loss(self, step):
        if len(step.y) == 64:
            return None
        return Loss((step.features - 2 * step.frozen("global").features).square().mean(), weight=0.1)


def test_a_frozen_model_that_the_first_epoch_does_not_show_all_samples(both):
    """The next epoch read outputs of its other samples that nobody had computed."""
    assert_close(*both(LooksAtSmallBatches, local_epochs=2, rounds=1))


class HasAWeightOfItsOwn(Plugin):
    @hookimpl
    def begin_local(self, client):
        client.scratch["weight"] = (1 + client.id) / 30

    @hookimpl
    def local_loss(self, step):
        return Loss(step.features.square().mean(), weight=step.client.scratch["weight"])


def test_clients_own_numbers_are_as_exact_as_the_weights(both, steps):
    assert_close(*both(HasAWeightOfItsOwn, model=in_double), relative=1e-12)
    assert steps["stacked"]


def test_labels_of_several_numbers_are_stacked(both, monkeypatch):
    monkeypatch.setattr(stack_runner.Stacks, "_train", None)  # clients whose whole work is one take no steps there
    assert_close(*both(dataset="digit-properties", partition="iid", rounds=1))


@pytest.mark.slow
def test_the_number_of_workers_changes_no_bit(tmp_path):
    one, two, none = (
        support.run(tmp_path, "fedprox", **{**UNEQUAL, "rounds": 2, "workers": workers}, stack=4)
        for workers in (1, 2, 0)
    )
    require_same(one, two, "with two workers")
    require_same(one, none, "in one process")


def test_convolutions_in_a_stack_keep_their_memory_format(tmp_path):
    """Two clients stacked on a worker, one alone on the other: each worker then evaluates own models."""
    none, two = (
        support.run(
            tmp_path,
            "fedper",
            **{**UNEQUAL, "clients": 6, "participation": 0.5, "rounds": 1, "workers": workers},
            model="simple-cnn",
            client_test_fraction=0.5,
            stack=2,
        )
        for workers in (0, 2)
    )
    require_same(none, two, "with two workers")


class EndsAWorker(Plugin):
    @hookimpl
    def begin_local(self, client):
        if client.round == 2 and client.id == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_at_a_stack_costs_the_whole_stack(tmp_path):
    """Alone its clients would give other bits."""
    found = support.run(
        tmp_path, EndsAWorker, workers=1, stack=4, rounds=3, clients=8, participation=1.0, local_epochs=1
    )
    failures = [record["failures"] for record in support.lines(found)]
    kinds = [{each["kind"] for each in failed} for failed in failures]
    assert (kinds, len(failures[2])) == ([set(), set(), {"worker_lost"}], 4)
    assert 3 in {each["client"] for each in failures[2]}


def test_a_resumed_run_has_the_same_bits(tmp_path):
    def stop(event, details):
        if event == "round" and details["round"] == 0:
            raise KeyboardInterrupt

    whole = support.run(tmp_path, "moon", **UNEQUAL, stack=STACK)
    with pytest.raises(Interrupted):
        support.run(tmp_path, "moon", **UNEQUAL, stack=STACK, notify=stop, out=tmp_path / "stopped")
    require_same(whole, resume(tmp_path / "stopped"), "resumed")


def test_clients_of_one_sample(both, steps):
    with warns(RuntimeWarning, 40, 60, "lowered to 1"):
        assert_close(*both(samples=60, clients=40, rounds=1, local_epochs=2, batch_size=2))
    assert steps["stacked"] > steps["alone"]


class BranchesOnATensor(Plugin):
    @hookimpl
    def local_loss(self, step):
        return Loss(step.features.square().mean()) if step.logits.sum() > 0 else None


class ReadsTheId(Plugin):
    @hookimpl
    def local_loss(self, step):
        return Loss(step.features.square().mean(), weight=0.1 * step.client.id)


class WarmsUp(Plugin):
    @hookimpl
    def local_loss(self, step):
        return Loss(step.features.square().mean(), weight=0.1 if step.client.steps < 3 else 0.0)


class Draws(Plugin):
    @hookimpl
    def local_loss(self, step):
        return Loss((step.features * torch.rand(step.features.shape)).mean())


class DrawsOutsideOfTorch(Plugin):
    @hookimpl
    def local_loss(self, step):
        return Loss(step.features.square().mean(), weight=random.random() + np.random.rand())  # noqa: S311


class Writes(Plugin):
    @hookimpl
    def local_loss(self, step):
        step.client.scratch["seen"] = step.y


class HasNotesOfOtherLengths(Plugin):
    @hookimpl
    def begin_local(self, client):
        client.scratch["own"] = torch.ones(client.n)

    @hookimpl
    def local_loss(self, step):
        return Loss(step.features.mean() * step.client.scratch["own"].sum())


class FreezesSomewhere(Plugin):
    @hookimpl
    def begin_local(self, client):
        if client.id % 3 == 0:
            client.freeze(["classifier.*"])


class HasNoWeightForSome(Plugin):
    @hookimpl
    def begin_local(self, client):
        client.scratch["weight"] = 0.1 * (client.id % 3)

    @hookimpl
    def local_loss(self, step):
        return Loss(step.features.square().mean(), weight=step.client.scratch["weight"])


class FillsWithItsOwnValue(Plugin):
    @hookimpl
    def local_loss(self, step):
        first = step.client.class_counts[0] / step.client.class_counts.sum()
        weights = torch.ones(10).index_fill(0, torch.arange(3), first)
        return Loss((weights * step.logits).square().mean())


class ChunksItsLoss(Plugin):
    @hookimpl
    def local_loss(self, step):
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=2)
        weight = step.model.classifier.weight
        return Loss(F.linear_cross_entropy(step.features, weight, step.y, options=options))


SINCE_213 = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="new in torch 2.13")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("plugin", "reason"),
    [
        pytest.param(ChunksItsLoss, "uses linear_cross_entropy", marks=SINCE_213),
        (FillsWithItsOwnValue, "uses index_fill"),
        (BranchesOnATensor, "data-dependent control flow"),
        (ReadsTheId, "'readstheid' reads client.id"),
        (WarmsUp, "'warmsup' reads client.steps"),
        (Draws, "random"),
        (DrawsOutsideOfTorch, "draws random numbers from a global generator"),
        (Writes, r"writes client.scratch\['seen'\]"),
        (HasNotesOfOtherLengths, "different values"),
        (HasNoWeightForSome, r"different values: 0\.0, 0\.[12]"),
        (FreezesSomewhere, "not all clients train 'classifier.bias'"),
    ],
)
def test_a_hook_that_cannot_be_stacked_is_named_once(tmp_path, steps, plugin, reason):
    with pytest.warns(StackWarning, match=reason) as caught:
        stacked = support.run(tmp_path, plugin, **{**UNEQUAL, "rounds": 2}, stack=STACK)
    assert len([each for each in caught if each.category is StackWarning]) == 1
    plain = support.run(tmp_path, plugin, **{**UNEQUAL, "rounds": 2})
    assert_close(stacked, plain)
    if not steps["stacked"]:
        assert support.model_bytes(stacked) == support.model_bytes(plain)


def with_dropout(num_classes, input_shape):
    base = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.5))
    return SplitModel(base, 16, num_classes)


@pytest.mark.filterwarnings("ignore::fedcore_accelerate.StackWarning")
def test_clients_whose_batches_have_sizes_of_their_own_draw_from_their_own_streams(tmp_path):
    """No two of them take a step together, so that vmap refuses nothing."""
    run = partial(support.run, tmp_path, **{**UNEQUAL, "rounds": 1, "model": f"module:{__name__}.with_dropout"})
    assert support.model_bytes(run(stack=2, batch_size=2000)) == support.model_bytes(run(batch_size=2000))


class Checkpoints(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.first, self.last, self.use_reentrant = nn.Linear(64, 32), nn.Linear(32, 16), use_reentrant

    def forward(self, x):
        z = self.first(x.flatten(1))
        return checkpoint(lambda z: (z.relu() @ self.last.weight.T).relu(), z, use_reentrant=self.use_reentrant)


def with_reentrant_checkpoints(num_classes, input_shape):
    return SplitModel(Checkpoints(True), 16, num_classes)


def with_checkpoints(num_classes, input_shape):
    return SplitModel(Checkpoints(False), 16, num_classes)


@pytest.mark.parametrize("model", [with_reentrant_checkpoints, with_checkpoints])
def test_a_backward_pass_that_repeats_the_forward_pass_has_the_clients_weights(tmp_path, model):
    """No two clients take a step together, so that vmap refuses nothing."""
    run = partial(support.run, tmp_path, **{**UNEQUAL, "rounds": 1, "local_epochs": 3, "model": model, "clients": 2})
    assert_close(run(stack=6, batch_size=2000, participation=1.0), run(batch_size=2000, participation=1.0))


def with_batch_norm(num_classes, input_shape):
    return SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16)), 16, num_classes)


class Follows(nn.Linear):
    def __init__(self):
        super().__init__(64, 16)
        self.register_buffer("mean", torch.zeros(16), persistent=False)

    def forward(self, x):
        features = super().forward(x.flatten(1))
        if self.training:
            self.mean.mul_(0.5).add_(0.5 * features.detach().mean(0))
        return features - self.mean


class CountsItsCalls(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += self.training
        return x * (1 + 0.05 * self.calls)


def with_a_count(num_classes, input_shape):
    return SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), CountsItsCalls()), 16, num_classes)


class CountsInside(nn.Module):
    """It counts in place: in a tensor, and in a list of one."""

    def __init__(self):
        super().__init__()
        self.tensor, self.list = torch.zeros(()), [0]

    def forward(self, x):
        if self.training:
            self.tensor += 1
            self.list[0] += 1
        return x * (1 + 0.05 * self.list[0] + 0.05 * self.tensor)


def with_counts_inside(num_classes, input_shape):
    return SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), CountsInside()), 16, num_classes)


class FollowsInAnAttribute(nn.Linear):
    """Its edit is for one client, so that ``vmap`` refuses it after others have been made."""

    def __init__(self):
        super().__init__(64, 16)
        self.mean, self.calls = torch.zeros(16), torch.zeros(())

    def forward(self, x):
        features = super().forward(x.flatten(1))
        if self.training:
            self.calls += 1
            self.mean.mul_(0.5).add_(0.5 * features.detach().mean(0))
        return features - self.mean * self.calls.clamp(max=3)


def with_a_mean_in_an_attribute(num_classes, input_shape):
    return SplitModel(FollowsInAnAttribute(), 16, num_classes)


def halves_a_gradient(num_classes, input_shape):
    model = without_padding(num_classes, input_shape)
    model.encoder.base[1].weight.register_hook(lambda gradient: gradient / 2)
    return model


class NormalisesInPlace(nn.Linear):
    """A frozen model would get the inputs as the trained one left them."""

    def __init__(self):
        super().__init__(64, 16)

    def forward(self, x):
        return super().forward(x.flatten(1).sub_(0.3)).tanh()


def that_normalises_in_place(num_classes, input_shape):
    return SplitModel(NormalisesInPlace(), 16, num_classes)


class HalvesGradients(nn.Linear):
    def __init__(self):
        super().__init__(64, 16)

    def forward(self, x):
        features = super().forward(x.flatten(1))
        if features.requires_grad:
            features.register_hook(lambda gradient: gradient / 2)
        return features


def halves_gradients(num_classes, input_shape):
    return SplitModel(HalvesGradients(), 16, num_classes)


class Selects(nn.Linear):
    def __init__(self):
        super().__init__(64, 16)

    def forward(self, x):
        features = super().forward(x.flatten(1)).tanh()
        return torch.select_scatter(features, features[:, 1], 1, 0)


def with_a_selection(num_classes, input_shape):
    return SplitModel(Selects(), 16, num_classes)


class LooksAtItsGraph(nn.Linear):
    def __init__(self):
        super().__init__(64, 16)

    def forward(self, x):
        features = super().forward(x.flatten(1)).tanh()
        return features if features.grad_fn is None else 2 * features


def with_a_look_at_its_graph(num_classes, input_shape):
    return SplitModel(LooksAtItsGraph(), 16, num_classes)


class HoldsAParameter(nn.Linear):
    """Hidden in a list, which no module registers, as a decoder holds the weight that it shares with an encoder."""

    def __init__(self):
        super().__init__(64, 16)
        self.shared = [self.weight]

    def forward(self, x):
        return super().forward(x.flatten(1)).tanh() @ self.shared[0].detach()


def with_a_parameter_in_a_list(num_classes, input_shape):
    return SplitModel(HoldsAParameter(), 64, num_classes)


def with_unsaved_buffer(num_classes, input_shape):
    return SplitModel(Follows(), 16, num_classes)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("with_dropout", "a hook or the model draws random numbers"),
        ("with_batch_norm", "buffers"),
        ("with_unsaved_buffer", "buffers"),
        ("with_a_count", "changes its attribute CountsItsCalls.calls"),
        ("with_counts_inside", "changes its attribute CountsInside.tensor"),
        ("with_a_mean_in_an_attribute", "broadcast"),
        ("halves_a_gradient", "hook on the gradient of 'encoder.base.1.weight'"),
        ("halves_gradients", "register a hook"),
        ("that_normalises_in_place", "edits its inputs in place"),
        ("with_a_selection", "uses select_scatter"),
        ("with_a_look_at_its_graph", "uses grad_fn"),
        ("with_a_parameter_in_a_list", "holds a parameter elsewhere"),
        ("with_checkpoints", "backward pass repeats"),
    ],
)
def test_a_model_that_cannot_be_stacked_trains_plainly(tmp_path, model, reason):
    run = partial(support.run, tmp_path, **{**UNEQUAL, "rounds": 1, "model": f"module:{__name__}.{model}"})
    with pytest.warns((StackWarning, RuntimeWarning), match=reason):  # while it trains, or a note at the start
        stacked = run(stack=STACK)
    assert support.model_bytes(stacked) == support.model_bytes(run())


class ReadsEverything(Plugin):
    """Reads whatever a loss can read of its client, in nested values, numbers and parameters as keys."""

    reads = ("global", "previous")

    @hookimpl
    def begin_local(self, client):
        own = {p: torch.full_like(p, 0.01 * client.id) for p in client.parameters.values()}
        client.scratch.update(nested=[{"own": own}, (torch.tensor(1.0),)], weight=0.1 * (1 + client.id), known=True)
        client.add_parameters({"scale": torch.ones(client.num_classes)}, lr=0.5)

    @hookimpl
    def local_loss(self, step):
        client = step.client
        nested, (one,) = client.scratch["nested"]
        pull = sum(((p - nested["own"][p]) ** 2).sum() for p in step.parameters)
        start = sum(((p - q) ** 2).sum() for p, q in zip(client.parameters.values(), client.start.values()))
        scaled = F.cross_entropy(step.logits * step.added["scale"], step.y)
        held = step.logits * (client.class_counts > 0)
        losses = [Loss(pull * one, weight=client.scratch["weight"], name="pull"), Loss(scaled, name="scaled")]
        losses.append(Loss(start + held.mean(), name="start"))
        losses.append(Loss((step.global_model.classifier(step.features) - step.logits).square().mean(), name="near"))
        if step.previous_model is not None:
            outputs = step.previous_model(step.x)
            losses.append(Loss((outputs.features - step.frozen("previous").features).square().sum(), name="same"))
            losses.append(Loss(outputs.logits.square().mean(), name="before"))
        return losses

    @hookimpl
    def observe(self, step):
        scratch = step.client.scratch
        scratch["weight"] = scratch["weight"] * 0.5  # the next step reads it anew

    @hookimpl
    def end_local(self, client):
        client.state["scale"] = client.added["scale"]
        return {"scale": client.added["scale"]}


def test_all_that_a_loss_reads_of_its_client(both, steps):
    assert_close(*both(ReadsEverything, rounds=2, local_epochs=2, lr=0.005))
    assert steps["stacked"]


class HasANoteWhereAClassIsMissing(Plugin):
    """Half of the clients have the note. The first one of a stack has it or not."""

    @hookimpl
    def begin_local(self, client):
        if client.id % 2 and client.round:
            client.scratch["missing"] = (client.class_counts == 0).float()
            client.state["seen"] = 1.0

    @hookimpl
    def local_loss(self, step):
        missing = step.client.scratch.get("missing")
        weight = 1.0 if "seen" in step.client.state else 0.5
        value = step.features.square().mean() if missing is None else (step.logits.softmax(1) * missing).sum(1).mean()
        return Loss(value, weight=weight)


def test_clients_with_and_without_a_note_are_not_mixed(both, steps):
    assert_close(*both(HasANoteWhereAClassIsMissing, rounds=2, lr=0.01))
    assert steps["stacked"]


class ReadsWhatDiffers(Plugin):
    """No hook sees a client alone, but the loss reads its numbers of samples by class."""

    @hookimpl
    def local_loss(self, step):
        held = step.client.class_counts / step.client.class_counts.sum()
        start = zip(step.client.parameters.values(), step.client.start.values())
        return Loss((step.logits * held).square().mean() + sum((p - q).square().sum() for p, q in start))


@pytest.fixture
def sessions(monkeypatch):
    """Count the clients' sessions."""
    made = []
    init = LocalSession.__init__
    monkeypatch.setattr(
        LocalSession, "__init__", lambda self, **given: (made.append(given["client"]), init(self, **given))[1]
    )
    return made


EQUAL = {"clients": 12, "participation": 1.0, "rounds": 2, "local_epochs": 2, "workers": 0, "partition": "iid"}


class ReadsAndSendsAll(Plugin):
    """``begin_local`` sees the same at all clients. The loss and ``end_local`` read what differs between them."""

    reads = ("global", "previous")

    @hookimpl
    def begin_local(self, client):
        client.scratch["start"] = [tensor + client.round for tensor in client.start.values()]
        client.add_parameters({"scale": torch.ones(client.num_classes)}, lr=0.05)
        client.freeze(["classifier.bias"])
        client.freeze(["encoder.*.bias"], epochs=slice(1, None))

    @hookimpl
    def local_loss(self, step):
        pull = sum((p - q).square().mean() for p, q in zip(step.parameters, step.reference))
        near = (step.global_model.classifier(step.features) - step.logits).square().mean()
        losses = [Loss(pull + near, weight=0.1), Loss(F.cross_entropy(step.logits * step.added["scale"], step.y))]
        if step.previous_model is not None:
            own = step.previous_model(step.x).features
            losses.append(Loss((own - step.features).square().mean() + (own - step.frozen("previous").features).sum()))
        return losses

    @hookimpl
    def end_local(self, client):
        features, logits, labels = client.forward()
        held = client.class_counts / client.n
        moved = torch.stack([(p - q).norm() for p, q in zip(client.parameters.values(), client.start.values())])
        own = {"scale": client.added["scale"].detach(), "moved": moved, "right": (logits.argmax(1) == labels).sum()}
        return own | {"mean": features.mean(0), "held": held * client.scratch["start"][0].mean()}

    @hookimpl
    def accumulate(self, server, update):
        for name, tensor in update.payload.items():
            server.state.add(name, tensor)


@pytest.mark.parametrize(
    "plugins", [(), ("fedprox",), ("fedproc",), ("moon", "fedprox"), (ReadsWhatDiffers,), (ReadsAndSendsAll,)], ids=str
)
def test_a_stack_whose_clients_begin_alike_has_one_session(tmp_path, sessions, plugins):
    stacked = support.run(tmp_path, *plugins, **EQUAL, stack=STACK)
    assert len(sessions) == EQUAL["rounds"] * EQUAL["clients"] / STACK
    assert_close(stacked, support.run(tmp_path, *plugins, **EQUAL))


def test_clients_with_and_without_a_previous_model_in_one_stack(both, sessions):
    """Their batches are unequal, and each sample's frozen outputs are computed once in two epochs."""
    assert_close(*both(ReadsAndSendsAll, local_epochs=2, lr=0.02))
    assert len(sessions) == UNEQUAL["rounds"] * (2 + 9)  # of two stacks a round, and of nine clients one by one


def test_two_stages_of_fedproc(both):
    assert_close(*both(("fedproc", {"two_stage": True}), rounds=4, partition="iid"))


class StartsFromTheRound(Plugin):
    starts = ("classifier.bias",)

    @hookimpl
    def begin_local(self, client):
        return {"classifier.bias": torch.full((client.num_classes,), 0.1 * client.round)}


class BranchesAtTheEnd(Plugin):
    @hookimpl
    def end_local(self, client):
        features, *_ = client.forward()
        client.state["seen"] = client.state.get("seen", 0) + 1
        return {"mean": features.mean(0) if features.sum() > 0 else features.amax(0)}


class EditsAtTheEnd(Plugin):
    @hookimpl
    def end_local(self, client):
        with torch.no_grad():
            client.model.classifier.bias.mul_(0.5)
        client.state["bias"] = client.model.classifier.bias


class DrawsAtTheBeginning(Plugin):
    @hookimpl
    def begin_local(self, client):
        torch.rand(3)


class CountsAtTheBeginning(Plugin):
    @hookimpl
    def begin_local(self, client):
        client.scratch["held"] = client.class_counts

    @hookimpl
    def local_loss(self, step):
        return Loss((step.logits * step.client.scratch["held"]).square().mean(), weight=1e-3)


@pytest.mark.parametrize(
    ("plugin", "in_a_stack"),
    [
        (StartsFromTheRound, 1),
        (BranchesAtTheEnd, 1 + STACK),
        (EditsAtTheEnd, 1 + STACK),
        (DrawsAtTheBeginning, 1 + STACK),
        (CountsAtTheBeginning, 1 + STACK),
    ],
)
def test_hooks_that_have_to_see_clients_alone_do(tmp_path, sessions, steps, plugin, in_a_stack):
    """They begin and end alone; the steps between are taken at once."""
    stacked = support.run(tmp_path, plugin, **EQUAL, stack=STACK)
    assert len(sessions) == EQUAL["rounds"] * EQUAL["clients"] / STACK * in_a_stack
    assert steps["alone"] == 0
    assert_close(stacked, support.run(tmp_path, plugin, **EQUAL))


@pytest.mark.parametrize("options", [{"local_steps": 5}, {"drop_last": True}, {"batch_size": 7}], ids=str)
def test_unequal_work_in_a_stack(both, sessions, options):
    assert_close(*both(**{"rounds": 1, "local_epochs": 2, "batch_size": 16, **options}))
    assert len(sessions) == 2 + 1  # of two stacks, and of the series of clients one by one


class FailsWhereAClassIsMissing(Plugin):
    @hookimpl
    def local_loss(self, step):
        return Loss(torch.where(step.client.class_counts[0] == 0, float("inf"), 0.0) * step.logits.square().mean())


def test_a_client_whose_loss_is_not_finite_fails_alone(both, steps):
    stacked, plain = both(FailsWhereAClassIsMissing, rounds=1, participation=1.0, min_clients=1)
    assert_close(stacked, plain)
    one, other = (
        [(each["client"], each["message"]) for each in support.lines(run)[0]["failures"]] for run in (stacked, plain)
    )
    assert one == other
    assert 0 < len(one) < UNEQUAL["clients"]
    assert steps["stacked"]


CALLS = []


class AddsTogether(Plugin):
    """Adds up the clients' class counts; client 5's are refused if the option of the test says so."""

    refused: int | None = None

    @hookimpl
    def end_local(self, client):
        return {"counts": client.class_counts.double() / 3}

    @hookimpl
    def accumulate(self, server, updates):
        CALLS.append(len(updates))
        if any(update.client == self.refused for update in updates):
            raise RejectUpdate("its counts are refused")
        for update in updates:
            server.state.add("sum", update.payload.pop("counts"))


class RefusesOne(AddsTogether):
    refused = 5


@pytest.mark.parametrize(("plugin", "calls"), [(AddsTogether, [6, 6]), (RefusesOne, [6, 6, *[1] * 6])])
def test_updates_of_a_stack_are_added_up_in_one_call(both, plugin, calls):
    """If the call raises, each update is added by itself, so that one that is refused costs no other."""
    CALLS.clear()
    stacked, plain = both(plugin, rounds=1, participation=1.0)
    assert sorted(CALLS[: len(calls)]) == sorted(calls)
    assert CALLS[len(calls) :] == [1] * 12
    assert_close(stacked, plain)
    one, other = (support.lines(run)[0] for run in (stacked, plain))
    assert (one["failures"], one["bytes"]) == (other["failures"], other["bytes"])
    assert [each["client"] for each in one["failures"]] == ([5] if plugin.refused else [])


class RefusesLater(Plugin):
    """Takes its own entries, which are none, after another plugin has taken its entries."""

    @hookimpl
    def accumulate(self, updates):
        if any(update.client == 5 for update in updates):
            raise RejectUpdate("it is client 5")


@pytest.mark.parametrize("plugins", [(AddsTogether, RefusesLater), (RefusesLater, AddsTogether)])
def test_one_plugin_refuses_a_client_of_which_another_has_taken_the_payload(both, plugins):
    stacked, plain = both(*plugins, rounds=1, participation=1.0)
    assert_close(stacked, plain)
    one, other = (support.lines(run)[0] for run in (stacked, plain))
    assert (one["failures"], one["bytes"]) == (other["failures"], other["bytes"])
    assert [each["client"] for each in one["failures"]] == [5]


class AddsModels(Plugin):
    @hookimpl
    def accumulate(self, server, updates):
        for update in updates:
            for name, tensor in update.model.items():
                server.state.add(name, tensor, weight=update.samples)


class TakesBoth(Plugin):
    @hookimpl
    def accumulate(self, server, update, updates):
        assert update in updates
        server.state["samples"] = server.state.get("samples", 0) + sum(each.samples for each in updates)


@pytest.mark.parametrize("plugin", [AddsModels, TakesBoth])
def test_hooks_that_need_single_updates_get_them(both, plugin):
    stacked, plain = both(plugin, rounds=1, participation=1.0)
    assert_close(stacked, plain)
    assert not support.lines(stacked)[0]["failures"]


class Remembers(Plugin):
    @hookimpl
    def observe(self, step):
        step.client.state["seen"] = True


def test_the_losses_of_steps_alone_and_in_stacks_are_added_up(both, steps):
    """The only client of a round that has trained before takes its first step alone: only it has a note by then."""
    cohorts = (Cohorts, {"rounds": [[0, 1, 2], [0, 3, 4]]})
    assert_close(*both(Remembers, cohorts, rounds=2, partition="iid", samples=1200, batch_size=50))
    assert (steps["alone"], steps["stacked"]) == (1, 11)


def test_who_joins_a_larger_stack_starts_from_the_first_personal_weights(both):
    """The models of a larger stack are copied from one that has been trained by then."""
    cohorts = (Cohorts, {"rounds": [[0, 1], [2, 3, 4, 5]]})
    assert_close(*both("fedper", cohorts, rounds=2, participation=1.0, partition="iid", eval_every=2))


def test_an_epoch_without_shared_parameters_stays_in_the_stack(both, steps):
    assert_close(*both("fedrep", "fedprox", local_epochs=2, rounds=1))
    assert steps["stacked"]


class AddsUpGradients(Plugin):
    """The second batches of unequal clients are steps alone, whose gradients the next step in a stack still found."""

    @hookimpl
    def begin_local(self, client):
        client.scratch["squares"] = torch.zeros(())
        client.add_parameters({"scale": torch.ones(())})

    @hookimpl
    def local_loss(self, step):
        return Loss((step.added["scale"] * step.features).square().mean())

    @hookimpl
    def observe(self, step):
        for parameter in (*step.parameters, *step.added.values()):
            step.client.scratch["squares"] += parameter.grad.square().sum()

    @hookimpl
    def end_local(self, client):
        client.state["squares"] = client.scratch["squares"]


def test_observe_finds_its_clients_gradients(both, steps):
    stacked, plain = both(AddsUpGradients, local_epochs=2, rounds=1)
    assert_close(stacked, plain)
    assert not support.lines(stacked)[0]["failures"]
    assert steps["stacked"]
    assert steps["alone"]


class FailsToObserve(Plugin):
    @hookimpl
    def observe(self, step):
        if step.client.id == 1:
            raise ValueError("not this one")


def test_an_exception_of_observe_is_its_clients(both):
    stacked, plain = both(FailsToObserve, rounds=1, participation=1.0)
    assert_close(stacked, plain)
    failures = support.lines(stacked)[0]["failures"]
    assert [(each["client"], each["kind"]) for each in failures] == [(1, "raised")]


class DrawsToObserve(Plugin):
    class Options(PluginOptions):
        own: bool = False
        """Whether it draws from the step's stream."""

    @hookimpl
    def begin_local(self, client):
        client.scratch["drawn"] = torch.zeros(2)

    @hookimpl
    def observe(self, step):
        with step.random("observe") if self.options.own else nullcontext():
            step.client.scratch["drawn"] += torch.tensor([torch.rand(()).item(), random.random()])  # noqa: S311

    @hookimpl
    def end_local(self, client):
        client.state["drawn"] = client.scratch["drawn"]


def test_an_observe_that_draws_from_global_generators_is_refused_in_a_stack(tmp_path, both, steps):
    """The numbers were those of no client's stream, and other ones in another process."""
    with raises(PluginContractError, "'drawstoobserve'", "observe", "step.random('drawstoobserve')", "--stack"):
        support.run(tmp_path, DrawsToObserve, **UNEQUAL, stack=STACK)
    assert_close(*both((DrawsToObserve, {"own": True})))
    assert steps["stacked"]


class Blurred(TensorSamples):
    """Samples that differ from draw to draw, as those of a user's transforms."""

    def gather(self, indices):
        return super().gather(indices) + torch.rand(len(indices), 1, 1, 1)


def blurred(data_dir):
    digits = load_dataset("digits", data_dir)
    return replace(digits, train=Blurred(digits.train.gather(torch.arange(len(digits.train))), digits.train.labels))


def test_samples_that_are_drawn_are_from_the_clients_own_stream(tmp_path):
    run = partial(support.run, tmp_path, **{**UNEQUAL, "rounds": 1, "dataset": f"module:{__name__}.blurred"})
    with warns(StackWarning, "random"):
        stacked = run(stack=STACK)
    assert support.model_bytes(stacked) == support.model_bytes(run())


class RemembersItsBias(Plugin):
    """It has a state from its second training on, which ``end_local`` writes client by client."""

    @hookimpl
    def local_loss(self, step):
        kept = step.client.state.get("bias")
        return None if kept is None else Loss((step.logits.mean(0) - kept).square().sum())

    @hookimpl
    def end_local(self, client):
        client.state["bias"] = client.model.classifier.bias


class AddsOtherParametersLater(Plugin):
    @hookimpl
    def begin_local(self, client):
        client.add_parameters({"scale": torch.ones(1 if client.round else client.num_classes)}, lr=0.05)

    @hookimpl
    def local_loss(self, step):
        return Loss((step.logits * step.added["scale"]).square().mean() + step.added["scale"].square().sum())


class CountsInATensor(Plugin):
    @hookimpl
    def begin_local(self, client):
        client.scratch["steps"] = torch.zeros(())

    @hookimpl
    def local_loss(self, step):
        return Loss(step.logits.square().mean(), weight=0.01 * step.client.scratch["steps"].add_(1))


class CountsInAList(Plugin):
    @hookimpl
    def begin_local(self, client):
        client.scratch["steps"] = []

    @hookimpl
    def local_loss(self, step):
        step.client.scratch["steps"].append(0)
        return Loss(step.logits.square().mean(), weight=0.01 * len(step.client.scratch["steps"]))


class CountsAtTheEnd(CountsInATensor):
    @hookimpl
    def local_loss(self, step):
        return None

    @hookimpl
    def end_local(self, client):
        return {"steps": client.scratch["steps"].add_(1)}

    @hookimpl
    def accumulate(self, server, update):
        server.state.add("steps", update.payload["steps"])


@pytest.mark.filterwarnings("ignore::fedcore_accelerate.StackWarning")
@pytest.mark.parametrize(
    "plugin", [RemembersItsBias, AddsOtherParametersLater, CountsInATensor, CountsInAList, CountsAtTheEnd]
)
def test_what_hooks_keep_of_a_client_is_not_lost_in_a_stack(tmp_path, plugin):
    stacked, plain = (support.run(tmp_path, plugin, **{**EQUAL, "lr": 0.02, "stack": size}) for size in (STACK, 1))
    assert_close(stacked, plain)


def test_the_models_of_a_stack_are_kept_in_one_file(tmp_path):
    """The evaluation reads them by client, as it reads those of clients one by one."""
    options = {**EQUAL, "client_test_fraction": 0.2}
    stacked = support.run(tmp_path, "moon", **options, stack=STACK)
    files = [path.relative_to(stacked.directory / "clients") for path in stacked.directory.glob("clients/*/*")]
    assert {file.parts[0] for file in files} == {"together"}
    assert len(files) == EQUAL["clients"] / STACK
    assert_close(stacked, support.run(tmp_path, "moon", **options))


def test_large_models_are_kept_in_a_file_each(tmp_path, monkeypatch):
    """A file of several stays until nobody needs it."""
    monkeypatch.setattr("fedcore_accelerate.whole.MOST_TOGETHER", 1000)
    stacked = support.run(tmp_path, "moon", **EQUAL, stack=STACK)
    assert len([*stacked.directory.glob("clients/0*")]) == EQUAL["clients"]
