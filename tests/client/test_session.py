"""What plugins ask of a client's training: parameters next to the model's, and frozen ones; how long it trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedcore import Loss, Plugin, RunConfig, SplitModel, hookimpl, question
from fedcore.base.errors import PluginContractError
from fedcore.client.session import LocalWork, LossTotals
from fedcore.runs.api import resume
from fedcore.runs.training import Interrupted
from fedcore_testing import W, same_tensors
from tests import support
from tests.sentences import raises
from tests.support import client_state, committed, model_bytes, weights


class Extra(Plugin):
    """Trains e on (e - 3)^2 / 2 beside the model."""

    @hookimpl
    def begin_local(self, client):
        client.add_parameters({"e": client.state.get("e", torch.zeros(1))}, lr=1.0, weight_decay=0.0)

    @hookimpl
    def local_loss(self, step):
        return Loss(0.5 * (step.added["e"] - 3).pow(2).sum())

    @hookimpl
    def end_local(self, client):
        client.state["e"] = client.added["e"]


def test_added_parameters_train_and_stay(toy):
    plain = toy()
    result = toy(Extra, local_epochs=2)
    assert same_tensors(weights(result), weights(plain))
    assert client_state(result, 0)["extra"]["e"].tolist() == [3.0]
    assert committed(result).ledger == committed(plain).ledger


def test_added_parameters_follow_the_rounds_lr_by_default(toy):
    class Follow(Extra):
        @hookimpl
        def begin_local(self, client):
            client.add_parameters({"e": torch.zeros(1)})

    assert client_state(toy(Follow, local_epochs=1), 0)["follow"]["e"].tolist() == [1.5]


class TwoRates(Plugin):
    @hookimpl
    def begin_local(self, client):
        client.add_parameters({"fast": torch.zeros(1)}, lr=1.0)
        client.add_parameters({"usual": torch.zeros(1)})

    @hookimpl
    def local_loss(self, step):
        return Loss(-(step.added["fast"] + step.added["usual"]).sum())

    @hookimpl
    def end_local(self, client):
        client.state["moved"] = [client.added["fast"].item(), client.added["usual"].item()]


def test_each_call_of_add_parameters_has_its_own_rate(toy):
    assert client_state(toy(TwoRates, local_epochs=1), 0)["tworates"]["moved"] == [1.0, 0.5]


class TwoStages(Plugin):
    """Trains the base in the first epoch and everything afterwards."""

    @hookimpl
    def task_loss(self, step):
        x = step.x.flatten(1)
        found, wanted = (step.features, x[:, :1]) if step.epoch == 0 else (step.logits, x)
        return 0.5 * (found - wanted).pow(2).sum(dim=1).mean()


def test_a_parameter_whose_first_gradient_comes_late(tmp_path):
    options = {"dataset": "module:tests.toy.middle", "model": "module:fedcore_testing.base_and_head", "clients": 1}
    result = weights(support.run(tmp_path, TwoStages, **{**support.TOY, **options, "momentum": 0.5}))
    assert result[W].item() == 2.0  # 1, then - 0.5 * (0.5 * -2 - 1)
    assert result["classifier.h"].item() == 1.0


class Surroundings(Plugin):
    """Notes how the working model is handed over; client 1 freezes a part of it."""

    def note(self, client, where):
        trainable = all(parameter.requires_grad for parameter in client.model.parameters())
        return [where, client.model.training, trainable]

    @hookimpl
    def begin_round(self, server):
        answers = server.ask("all", self.training)
        server.state["notes"] = [bool(answer.tensors["training"]) for answer in answers]

    @question
    def training(self, client):
        return {"training": torch.tensor(client.model.training)}

    @hookimpl
    def begin_local(self, client):
        client.state["notes"] = [*client.state.get("notes", []), self.note(client, "begin_local")]
        if client.id == 1:
            client.freeze(["classifier.*"])


def test_the_working_model_is_handed_over_in_the_same_condition_to_every_client(go):
    result = go(Surroundings, rounds=2)
    notes = [note for client in range(4) for note in client_state(result, client)["surroundings"]["notes"]]
    assert {tuple(note[1:]) for note in notes} == {(notes[0][1], True)}
    assert len(set(committed(result).plugins["surroundings"]["notes"])) == 1


class Remembering(nn.Module):
    """Subtracts a moving mean, which no file of weights holds, grows a cache and drops another. Its mask is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 8)
        self.register_buffer("mean", torch.zeros(8), persistent=False)
        self.register_buffer("rebound", torch.zeros(8), persistent=False)
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.register_buffer("dropped", torch.zeros(1), persistent=False)
        self.register_buffer("mask", torch.ones(1, 1).expand(2, 8), persistent=False)

    def forward(self, x):
        features = self.layer(x.flatten(1)) * self.mask[0]
        self.cache = torch.zeros(len(x))
        self.dropped = None
        if self.training:
            self.mean.lerp_(features.detach().mean(0), 0.1)
            self.rebound = self.rebound.lerp(features.detach().mean(0), 0.1)
        return features - self.mean - self.rebound


def remembering(num_classes, input_shape):
    return SplitModel(Remembering(), 8, num_classes)


def test_buffers_that_are_not_saved_start_anew_for_every_client(go):
    options = {"model": f"module:{__name__}.remembering", "rounds": 2, "local_epochs": 1}
    assert model_bytes(go(**options, workers=0)) == model_bytes(go(**options, workers=2))


class Assigning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        features = self.layer(x.flatten(1))
        if self.training:
            self.mean = self.mean.lerp(features.detach().mean(0), 0.1)
        return features - self.mean


def assigning(num_classes, input_shape):
    return SplitModel(Assigning(), 8, num_classes)


def test_a_model_that_assigns_a_buffer_is_refused(go):
    with raises(PluginContractError):
        go(model=f"module:{__name__}.assigning")


class FreezeEven(Plugin):
    """Freezes the classifier in even rounds."""

    @hookimpl
    def begin_local(self, client):
        if client.round % 2 == 0:
            client.freeze(["classifier.*"])


def test_freeze_lasts_one_round_and_is_exact(go):
    start = support.run(go.args[0], FreezeEven, rounds=1, weight_decay=0.1)
    initial = committed(start).model
    two = weights(go(FreezeEven, rounds=2, weight_decay=0.1))
    reference = go((FreezeAlways, {}), rounds=2, weight_decay=0.1)
    assert torch.equal(initial["classifier.weight"], weights(reference)["classifier.weight"])
    assert not torch.equal(initial["encoder.base.fc1.weight"], two["encoder.base.fc1.weight"])
    assert not torch.equal(initial["classifier.weight"], two["classifier.weight"])


class FreezeAlways(Plugin):
    @hookimpl
    def begin_local(self, client):
        client.freeze(["classifier.*"])


class FreezeOdd(Plugin):
    stop = False

    @hookimpl
    def begin_round(self, server):
        if FreezeOdd.stop and server.round == 1:
            raise KeyboardInterrupt

    @hookimpl
    def begin_local(self, client):
        if client.round % 2 == 1:
            client.freeze(["classifier.*"])


def test_clipping_takes_no_notice_of_gradients_of_another_round(tmp_path, go):
    options = {"rounds": 2, "clip_norm": 0.01}
    plain = model_bytes(go(FreezeOdd, **options))
    FreezeOdd.stop = True
    try:
        with pytest.raises(Interrupted):
            go(FreezeOdd, out=tmp_path / "stopped", **options)
    finally:
        FreezeOdd.stop = False
    assert model_bytes(resume(tmp_path / "stopped", allow_code=True)) == plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_losses_are_summed_in_float32_at_least(dtype):
    totals = LossTotals({})
    for _ in range(600):  # in bfloat16 256 + 1 is 256
        totals.add("one", torch.ones((), dtype=dtype))
    assert totals.means() == {"one": 1.0}
    assert totals.sums["one"].dtype == torch.promote_types(dtype, torch.float32)


# --- the length of a client's training, counted by hand ---------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "asked", "samples", "smallest_batch", "expected"),
    [
        ({"local_epochs": 3}, {}, 10, 1, (3, None, True)),
        ({"local_epochs": 3}, {"epochs": 1}, 10, 1, (1, None, True)),
        ({"local_steps": 6}, {}, 10, 1, (2, 6, True)),  # batches of 4, 4, 2: three steps per epoch
        ({"local_steps": 7}, {}, 10, 1, (3, 7, True)),
        ({"local_steps": 2}, {}, 10, 1, (1, 2, False)),  # 8 of 10 samples
        ({"local_steps": 6}, {"steps": 2}, 10, 1, (1, 2, False)),
        ({"local_steps": 4}, {}, 9, 2, (2, 4, True)),  # batches of 4, 4; the one of 1 is skipped
        ({"local_steps": 4}, {}, 1, 2, (0, 4, True)),  # no batch is large enough
    ],
)
def test_epochs_and_steps(options, asked, samples, smallest_batch, expected):
    work = LocalWork.of(RunConfig(batch_size=4, **options), samples, smallest_batch, asked)
    assert (work.epochs, work.most_steps, work.sees_all_samples) == expected


@pytest.mark.parametrize(
    ("options", "samples", "smallest_batch", "expected"),
    [
        ({"local_epochs": 3}, 10, 1, (3, None, 4)),  # of 4, 4, 2 the last is left out
        ({"local_steps": 6}, 10, 1, (3, 6, 4)),  # two steps per epoch
        ({"local_steps": 6}, 8, 1, (3, 6, 4)),
        ({"local_steps": 6}, 3, 1, (6, 6, 3)),  # the only batch is trained
        ({"local_steps": 6}, 1, 2, (0, 6, 2)),  # but not where the model needs two samples
    ],
)
def test_the_last_batch_is_left_out(options, samples, smallest_batch, expected):
    config = RunConfig(batch_size=4, drop_last=True, **options)
    work = LocalWork.of(config, samples, smallest_batch, {})
    assert (work.epochs, work.most_steps, work.smallest_batch) == expected


@pytest.mark.parametrize(("samples", "all_of_them", "full_ones"), [(1, 1, 1), (4, 1, 1), (7, 2, 1), (10, 3, 2)])
def test_batches_of_an_epoch(samples, all_of_them, full_ones):
    assert RunConfig(batch_size=4).batches(samples) == all_of_them
    assert RunConfig(batch_size=4, drop_last=True).batches(samples) == full_ones
