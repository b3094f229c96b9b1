"""Ditto: the hand case, the personal objective, what lambda 0 means, and that w never notices v."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedcore
from fedcore import Loss, Plugin, PluginConflictError, SplitModel, hookimpl
from fedcore.client import evaluate
from fedcore.data import load_dataset
from fedcore_ditto import Ditto
from fedcore_functional import proximal_term
from fedcore_testing import (
    Cohorts,
    PersonalClassifier,
    PersonalModel,
    Quadratic,
    W,
    analytic_federation,
    client_arrays,
    federations,
    linear,
    mean_by_hand,
    model_bytes,
    partition_of,
    personal_state,
    records,
    same_tensors,
    sgd_by_hand,
    softmax_by_hand,
    steps_without_host_sync,
    weights,
)
from tests.sentences import raises

TOY = {**analytic_federation([[2.0, 0.0]]), "rounds": 1, "lr": 0.1}
go = federations(samples=300)


def kept(result, client, plugin="ditto"):
    """Return what a client keeps, as it was committed: v_k with its buffers."""
    return personal_state(result, client, plugin)


# --- the hand case -----------------------------------------------------------------------------------------------


class QuadraticTerm(Plugin):
    """The quadratic risk for w, as a term: Ditto refuses another task loss."""

    scales_task = True

    @hookimpl
    def local_loss(self, step):
        return Loss(Quadratic.task_loss(self, step), task_scale=0.0)


class FromOnes(Ditto):
    """v starts at (1, 1)."""

    @hookimpl
    def begin_local(self, client):
        if not client.state:
            client.state[W] = torch.ones(2)
        super().begin_local(client)


@pytest.fixture
def quadratic_risk(monkeypatch):
    """F(v) = |v - (2, 0)|^2 / 2 for v."""
    centre = torch.tensor([2.0, 0.0])
    risk = lambda task, logits, labels: 0.5 * (logits - centre).pow(2).sum(dim=1).mean()  # noqa: E731
    monkeypatch.setattr("fedcore.data.Task.loss", risk)


@pytest.mark.parametrize(("steps", "expected", "w"), [(1, [1.0, 0.8], 0.2), (2, [1.0, 0.64], 0.38)])
def test_the_hand_case(go, quadratic_risk, steps, expected, w):
    result = go({QuadraticTerm: {}, FromOnes: {}}, **TOY, local_epochs=steps)
    assert kept(result, 0, "fromones")[W].tolist() == pytest.approx(expected, abs=1e-7)
    assert weights(result)[W].tolist() == pytest.approx([w, 0.0], abs=1e-7)


def test_the_next_round_goes_on_from_v_and_pulls_to_the_new_w(go, quadratic_risk):
    """From v = (1, .64) and w_1 = (.38, 0); the target is w as received, not as trained."""
    result = go({QuadraticTerm: {}, FromOnes: {}}, **{**TOY, "rounds": 2}, local_epochs=2)
    v, received = np.array([1.0, 0.64]), np.array([0.38, 0.0])
    for _ in range(2):
        v = v - 0.1 * ((v - [2.0, 0.0]) + 1.0 * (v - received))
    np.testing.assert_allclose(kept(result, 0, "fromones")[W], v, atol=1e-6)


class Late(Plugin):
    """A client starts from (1, 1) instead of the received w, as FedBuff's late clients do."""

    starts = ("*",)

    @hookimpl
    def begin_local(self, client):
        return {W: torch.ones(2)}


@pytest.mark.parametrize("plugins", [(Late, "ditto"), ("ditto", Late)])
def test_v_starts_from_and_is_pulled_to_the_model_that_the_client_starts_from(go, quadratic_risk, plugins):
    result = go(QuadraticTerm, *plugins, **TOY, local_epochs=2)
    np.testing.assert_allclose(kept(result, 0)[W], [1.18, 0.82], atol=1e-6)


# --- a run computed independently --------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", [0.0, 0.5, 2.0])
def test_a_run_is_algorithm_1_in_numpy(go, strength):
    """Full batches, momentum, weight decay, clients that come and go."""
    cohorts = [[0, 1], [1, 2], [0, 2]]
    options = {"model": linear, "batch_size": 5000, "lr": 0.1, "weight_decay": 1e-2}
    plugins = {"ditto": {"lambda": strength}, Cohorts: {"rounds": cohorts}}
    result = go(plugins, **options, rounds=3, local_epochs=3)
    start = go({}, **{**options, "lr": 1e-30, "weight_decay": 0.0}, rounds=1)
    clients = client_arrays(result)

    def train(first, k, pull, target):
        def gradient(local, x, y):
            return {n: g + pull * (local[n] - target[n]) for n, g in softmax_by_hand(local, x, y)[1].items()}

        return sgd_by_hand(gradient, first, *clients[k], 3, lr=0.1)

    w = {name: tensor.double().numpy() for name, tensor in weights(start).items()}
    v: dict[int, dict] = {}
    for cohort in cohorts:
        trained = [train(w, k, 0.0, w) for k in cohort]
        for k in cohort:
            v[k] = train(v.get(k, w), k, strength, w)
        w = mean_by_hand(trained, [len(clients[k][0]) for k in cohort])
    for name, value in w.items():
        np.testing.assert_allclose(weights(result)[name], value, atol=1e-5)
    for k in range(3):
        for name, value in v[k].items():
            np.testing.assert_allclose(kept(result, k)[name], value, atol=1e-5)
    assert max(np.abs(v[k]["classifier.weight"] - w["classifier.weight"]).max() for k in range(3)) > 1e-2


# --- identities --------------------------------------------------------------------------------------------------


def with_buffers(num_classes, input_shape):
    base = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU())
    return SplitModel(base, 16, num_classes)


def with_dropout(num_classes, input_shape):
    return SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.5)), 16, num_classes)


class Noisy(nn.Module):
    """Draws random numbers without being a dropout."""

    def forward(self, x):
        return x + 0.1 * torch.randn_like(x) if self.training else x


def with_noise(num_classes, input_shape):
    return SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), Noisy()), 16, num_classes)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("model", "strength"),
    [("mlp", 0.0), ("mlp", 1.0), *((model, 1.0) for model in (with_buffers, with_dropout, with_noise))],
)
def test_w_is_fedavgs_to_the_bit_whatever_lambda_is(go, model, strength):
    options = {"model": model, "participation": 0.7, "clip_norm": 1.0}
    fedavg, ditto = go({}, **options), go({"ditto": {"lambda": strength}}, **options)
    assert model_bytes(ditto) == model_bytes(fedavg)
    assert ditto.metrics["global"] == fedavg.metrics["global"]
    assert [line["bytes"] for line in records(ditto)] == [line["bytes"] for line in records(fedavg)]
    assert [line["losses"]["task"] for line in records(ditto)] == [line["losses"]["task"] for line in records(fedavg)]
    assert Ditto.neutral == {}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", ["mlp", "simple-cnn", with_buffers])
def test_lambda_0_is_local_training_to_the_bit(go, model):
    """v_k = SOLO with an optimizer per round, BatchNorm's statistics and all."""
    options = {"model": model, "lr_decay": 0.9, "clients": 2, "batch_size": 256}
    ditto, solo = go({"ditto": {"lambda": 0.0}}, **options), go({PersonalModel: {}}, **options)
    for client in range(2):
        assert same_tensors(kept(ditto, client), kept(solo, client, "fedcore"))
    assert set(records(ditto)[0]["losses"]) == {"task", "ditto.personal"}


def test_a_large_lambda_is_w(go):
    """The distance to w_t falls as lambda grows (lr * lambda stays below 2 (1 + rho))."""
    start, found = weights(go({}, clients=1, rounds=1, lr=1e-30)), []
    for strength in (0.0, 10.0, 100.0):
        own = kept(go({"ditto": {"lambda": strength}}, clients=1, rounds=1, local_epochs=2, batch_size=128, lr=0.01), 0)
        found.append(float(sum((own[name] - w).square().sum() for name, w in start.items())))
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.01 * found[0]


def test_the_terms_are_logged_apart(go):
    result = go({"ditto": {"lambda": 0.5}})
    for line in records(result):
        assert set(line["losses"]) == {"task", "ditto.personal", "ditto.proximal"}
        assert line["losses"]["ditto.proximal"] > 0
    assert records(result)[1]["losses"]["ditto.personal"] < records(result)[1]["losses"]["task"]


@pytest.mark.slow
def test_every_option_changes_v(go):
    found = [kept(go({"ditto": change}, rounds=1), 0) for change in ({}, {"lambda": 0.0}, {"lambda": 0.3})]
    assert not same_tensors(found[0], found[1])
    assert not same_tensors(found[0], found[2])


# --- state -------------------------------------------------------------------------------------------------------


class Remembers(Ditto):
    """Ditto that notes what a client received, and where its v_k started."""

    @hookimpl
    def begin_local(self, client):
        super().begin_local(client)
        received = {name: w.detach().clone() for name, w in client.model.state_dict().items()}
        STARTS[client.round, client.id] = (
            received,
            {
                **{name: v.detach().clone() for name, v in client.added.items()},
                **{name: buffer.clone() for name, buffer in client.scratch["buffers"].items()},
            },
        )


STARTS: dict[tuple[int, int], tuple[dict, dict]] = {}


def test_v_starts_as_the_model_received_first_and_then_goes_on_over_rounds_of_absence(go):
    STARTS.clear()
    cohorts = [[0, 1], [1], [0, 2]]
    plugins = {Remembers: {}, Cohorts: {"rounds": cohorts}}
    found = [go(plugins, rounds=rounds, model=with_buffers) for rounds in (1, 3)]
    for key in ((0, 0), (0, 1), (2, 2)):  # first participations: in round 2, too
        received, start = STARTS[key]
        assert same_tensors(start, received)
    received, start = STARTS[2, 0]
    assert same_tensors(start, kept(found[0], 0, "remembers")), "as round 0 left it, and round 1 did not touch it"
    assert not same_tensors(start, received)
    assert "encoder.base.2.num_batches_tracked" in start


def test_convolutions_go_on_in_the_layout_of_the_model(go, monkeypatch):
    """State comes back contiguous; trained as it is, channels_last models would get other last bits after a pause."""
    formats = []
    original = Ditto.begin_local

    def noting(self, client):
        original(self, client)
        formats.extend(v.stride() == client.model.get_parameter(name).stride() for name, v in client.added.items())

    monkeypatch.setattr("fedcore_ditto.Ditto.begin_local", hookimpl(noting))
    go({"ditto": {}}, model="simple-cnn", clients=1, batch_size=512)
    assert formats
    assert all(formats)


def test_v_has_statistics_of_its_own(go):
    result = go({"ditto": {}}, model=with_buffers)
    name = "encoder.base.2.running_mean"
    statistics = [kept(result, client)[name] for client in range(3)]
    assert not any(torch.equal(own, weights(result)[name]) for own in statistics)
    assert not torch.equal(statistics[0], statistics[1])
    counts = [kept(result, client)["encoder.base.2.num_batches_tracked"] for client in range(3)]
    assert max(counts) == weights(result)["encoder.base.2.num_batches_tracked"]


# --- evaluation --------------------------------------------------------------------------------------------------


def test_clients_are_evaluated_with_v_and_untrained_ones_with_the_global_model(go):
    """Client 0 was in the last round, client 1 before, client 2 never."""
    result = go(
        {"ditto": {}, Cohorts: {"rounds": [[0, 1], [0, 1], [0]]}},
        rounds=3,
        client_test_fraction=0.3,
        model=with_buffers,
    )
    data = load_dataset("digits", None)
    parts = partition_of(result).test
    found = {"personal": [0, 0], "global_local": [0, 0]}
    on_test = []
    for client, part in enumerate(parts):
        for protocol, own in (("global_local", False), ("personal", client < 2)):
            model = result.model
            model.load_state_dict({**weights(result), **(kept(result, client) if own else {})})
            counts = evaluate(model, data.train, 10, torch.device("cpu"), indices=part)
            found[protocol][0] += int(counts.correct.sum())
            found[protocol][1] += int(counts.total.sum())
        on_test.append(evaluate(model, data.test, 10, torch.device("cpu")).rates()["accuracy"])
    metrics = result.metrics
    for protocol, (hits, total) in found.items():
        assert metrics[protocol]["accuracy"] == pytest.approx(hits / total, abs=1e-12)
    assert metrics["personal"]["accuracy"] != metrics["global_local"]["accuracy"]
    assert metrics["personal_global"]["accuracy"] == pytest.approx(np.mean(on_test), abs=1e-12)
    assert metrics["personal_global"]["std"] == pytest.approx(np.std(on_test), abs=1e-12)
    assert metrics["personal"]["untrained"] == metrics["personal_global"]["untrained"] == 1
    assert metrics["global"]["accuracy"] > 0


# --- beside other plugins ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "looks"), [("mlp", {"client"}), (with_dropout, {"client", "batch"})])
def test_a_step_does_not_wait_for_the_device(go, model, looks):
    with steps_without_host_sync() as looked:
        go({"ditto": {}}, model=model)
    assert max(looked, key=len) == looks


def test_notes_are_updated_in_place(go):
    """A captured step finds v_k's statistics where they were."""
    ADDRESSES.clear()
    go({Addresses: {}}, rounds=1, clients=1, model=with_buffers)
    assert len(ADDRESSES) > 2
    assert len(set(ADDRESSES)) == 1


class Addresses(Ditto):
    @hookimpl
    def observe(self, step):
        scratch = step.client.scratch
        ADDRESSES.append((id(scratch["buffers"]), *(t.data_ptr() for t in scratch["buffers"].values())))


ADDRESSES: list[tuple[int, ...]] = []


class Proximal(Plugin):
    @hookimpl
    def local_loss(self, step):
        return fedcore.Loss(proximal_term(step.parameters, step.reference), weight=0.5)


class Doubled(Plugin):
    @hookimpl
    def task_loss(self, step):
        return 2 * F.cross_entropy(step.logits, step.y)


def test_what_other_plugins_do_to_w_leaves_v_alone_in_a_round(go):
    both, alone = go({"ditto": {}, Proximal: {}}, rounds=1), go({"ditto": {}}, rounds=1)
    assert model_bytes(both) != model_bytes(alone)
    assert model_bytes(both) == model_bytes(go({Proximal: {}}, rounds=1))
    assert same_tensors(kept(both, 0), kept(alone, 0))


def test_another_task_loss_is_refused(go):
    """v_k would be trained on plain cross-entropy."""
    with raises(PluginConflictError, "'ditto'", "'doubled'"):
        go({"ditto": {}, Doubled: {}}, rounds=1)


def test_beside_a_classifier_that_stays_on_the_client(go):
    result = go({"ditto": {}, PersonalClassifier: {}}, client_test_fraction=0.2)
    assert set(kept(result, 0)) == set(weights(result))
    assert result.metrics["global"] is None
    assert result.metrics["personal"]["accuracy"] > 0.1


class FreezesClassifier(Plugin):
    @hookimpl
    def begin_local(self, client):
        client.freeze(["classifier.*"])


def test_v_trains_also_what_another_plugin_freezes_in_w(go):
    result = go({"ditto": {}, FreezesClassifier: {}}, rounds=1)
    start = go({}, rounds=1, lr=1e-30)
    assert torch.equal(weights(result)["classifier.weight"], weights(start)["classifier.weight"])
    assert not torch.equal(kept(result, 0)["classifier.weight"], weights(start)["classifier.weight"])


class OtherPersonal(Plugin):
    @hookimpl
    def personal_model(self, client):
        return client.model


def test_another_personal_model_is_refused(go):
    with raises(PluginConflictError, "'ditto'", "'otherpersonal'"):
        go({"ditto": {}, OtherPersonal: {}})


def test_runs_in_bf16(go):
    assert records(go({"ditto": {}}, precision="bf16", rounds=1))[0]["losses"]["ditto.personal"] > 0
