"""FedGen: the equations against NumPy, the generator of a whole run against torch's layers, and the first round."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedcore import Plugin, PluginConflictError, SplitModel, generator, hookimpl
from fedcore_fedgen import (
    FedGen,
    FedGenOptions,
    consensus_loss,
    consistency_loss,
    diversity_loss,
    equations,
    first_generator,
    generate,
    label_weights,
)
from fedcore_testing import RejectsRound1, client_arrays, federations, model_bytes, plugin_state, records
from tests.sentences import raises

SKEWED = {"partition": "classes", "classes_per_client": 4}
SEEN: dict = {}
go = federations()
rng = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _fresh():
    SEEN.clear()


class Models(Plugin):
    """Notes the clients' classifiers at the end of their training."""

    @hookimpl
    def end_local(self, client):
        SEEN[client.round, client.id] = client.network().classifier


def softmax(x):
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


# --- the equations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [False, True])
def test_features_are_generated_as_in_numpy(train):
    made = first_generator(3, 5, 4, 6, torch.Generator().manual_seed(0))
    made = {name: tensor.double() for name, tensor in made.items()}
    made["norm.mean"] += 0.3
    made["norm.variance"] *= 2.0
    g = {name: tensor.numpy().copy() for name, tensor in made.items()}
    noise, labels = rng.standard_normal((7, 3)), rng.integers(0, 6, 7)
    h = np.concatenate([noise, np.eye(6)[labels]], 1) @ g["hidden.weight"].T + g["hidden.bias"]
    mean, variance = (h.mean(0), h.var(0)) if train else (g["norm.mean"], g["norm.variance"])
    h = np.maximum((h - mean) / np.sqrt(variance + 1e-5) * g["norm.weight"] + g["norm.bias"], 0)
    found = generate(made, torch.tensor(noise), torch.tensor(labels), train=train)
    np.testing.assert_allclose(found, h @ g["out.weight"].T + g["out.bias"], rtol=1e-12)
    assert bool((made["norm.mean"].numpy() != g["norm.mean"]).all()) == train


def test_the_losses_are_those_of_numpy():
    logits, y = rng.standard_normal((3, 6, 4)), np.array([0, 1, 1, 3, 0, 3])
    counts = np.array([[5, 0, 0, 1], [5, 2, 0, 0], [0, 2, 0, 3]])
    shares = counts / np.maximum(counts.sum(0), 1)
    expected = np.mean(
        [sum(shares[k, y[b]] * -np.log(softmax(logits[k])[b, y[b]]) for k in range(3)) for b in range(6)]
    )
    weights = label_weights(torch.tensor(counts)).double()
    np.testing.assert_allclose(weights, shares, rtol=1e-6)
    found = consensus_loss(torch.tensor(logits), torch.tensor(y), torch.tensor(shares))
    assert found.item() == pytest.approx(expected, rel=1e-12)

    noise, z = rng.standard_normal((5, 3)), rng.standard_normal((5, 4))
    pairs = [((noise[i] - noise[j]) ** 2).mean() * abs(z[i] - z[j]).mean() for i in range(5) for j in range(5)]
    assert diversity_loss(torch.tensor(noise), torch.tensor(z)).item() == pytest.approx(np.exp(-np.mean(pairs)))
    assert diversity_loss(torch.tensor(noise), torch.zeros(5, 4)) == 1

    own, made, known = rng.standard_normal((5, 4)), rng.standard_normal((5, 4)), np.array([1, 1, 0, 1, 0], bool)
    p, q = softmax(made), softmax(own)
    expected = np.mean(known * (p * np.log(p / q)).sum(1))
    own, made = (torch.tensor(x).requires_grad_() for x in (own, made))
    found = consistency_loss(own, made, torch.tensor(known))
    assert found.item() == pytest.approx(expected, rel=1e-12)
    found.backward()
    assert made.grad is None
    np.testing.assert_allclose(own.grad, known[:, None] * (q - p) / 5, atol=1e-12)


def test_both_terms_of_a_step_by_hand():
    """The classifier is the identity: the generated features are the logits."""
    plugin = FedGen(FedGenOptions(alpha=4.0, beta=3.0, decay=0.5, batch_size=2, noise=3))
    sent = first_generator(3, 5, 4, 4, torch.Generator().manual_seed(0))
    received = {**sent, "known": torch.tensor([False, True, True, False])}
    client = SimpleNamespace(received=received, scratch={})
    plugin.begin_local(client)
    assert client.scratch["classes"].tolist() == [1, 2]
    logits, y = torch.randn(3, 4, requires_grad=True), torch.tensor([1, 3, 2])
    step = SimpleNamespace(
        client=client, y=y, logits=logits, round=2, model=SimpleNamespace(classifier=lambda z: z),
        random=lambda purpose: nullcontext(),
    )  # fmt: skip
    torch.manual_seed(5)
    generated, consistency = plugin.local_loss(step)
    torch.manual_seed(5)
    labels = torch.cat([torch.tensor([1, 2])[torch.randint(2, (2,))], y])
    made = generate(sent, torch.randn(5, 3), labels)
    assert (generated.weight, consistency.weight) == (1.0, 0.75)
    torch.testing.assert_close(generated.value, F.cross_entropy(made[:2], labels[:2]))
    divergence = F.kl_div(logits.log_softmax(1), made[2:].softmax(1), reduction="none").sum(1)
    torch.testing.assert_close(consistency.value, (divergence[0] + divergence[2]) / 3)


# --- whole runs -------------------------------------------------------------------------------------------------


def small(num_classes, input_shape):
    return SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 6)), 6, num_classes)


def test_the_generator_is_trained_as_with_torchs_layers(go):
    """Two rounds: its Adam goes on, its rate decays, and it sees the classes of the cohort alone."""
    options = {"steps": 7, "batch_size": 8, "noise": 3, "hidden": 5, "lr": 0.01, "eta": 2.0, "decay": 0.9}
    result = go({"fedgen": options}, Models, **SKEWED, model=small)
    counts = torch.tensor(np.stack([y.sum(0) for _, y in client_arrays(result)])).long()
    shares = label_weights(counts)
    classes = (counts.sum(0) > 0).nonzero().squeeze(1)
    net = nn.Sequential(nn.Linear(13, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 6))
    adam = torch.optim.Adam(net.parameters(), weight_decay=1e-2)
    for t in range(2):
        draws = generator(0, "fedgen", round=t)
        if t == 0:
            start = first_generator(3, 5, 6, 10, draws)
            with torch.no_grad():
                for parameter, name in zip(net.parameters(), equations.TRAINED, strict=True):
                    parameter.copy_(start[name])
        adam.param_groups[0]["lr"] = 0.01 * 0.9**t
        for _ in range(7):
            y = classes[torch.randint(len(classes), (8,), generator=draws)]
            noise = torch.randn(8, 3, generator=draws)
            z = net(torch.cat([noise, F.one_hot(y, 10)], 1))
            each = [F.cross_entropy(SEEN[t, k](z), y, reduction="none") for k in range(3)]
            loss = sum(shares[k][y] * each[k] for k in range(3)).mean() + 2.0 * diversity_loss(noise, z)
            adam.zero_grad()
            loss.backward()
            adam.step()
    state = plugin_state(result, "fedgen")
    for parameter, name in zip(net.parameters(), equations.TRAINED, strict=True):
        torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(state["norm.mean"], net[1].running_mean, rtol=1e-4, atol=1e-5)
    assert state["known"].tolist() == (counts.sum(0) > 0).tolist()
    assert not [name for name in state if "classifier" in name or "counts" in name]


def test_the_first_round_is_fedavg_and_the_second_is_not(go):
    assert model_bytes(go("fedgen", rounds=1)) == model_bytes(go(rounds=1))
    result = go("fedgen")
    assert model_bytes(result) != model_bytes(go())
    first, second = records(result)
    assert list(first["losses"]) == ["task"]
    assert {"fedgen.generated", "fedgen.consistency"} <= set(second["losses"])
    assert set(first["reports"]["fedgen"]) == {"consensus", "diversity"}


def test_a_round_without_an_update_does_not_report_the_losses_of_the_round_before(go):
    result = go({"fedgen": {"steps": 2}, RejectsRound1: {}}, rounds=3, min_clients=0)
    assert ["fedgen" in record.get("reports", {}) for record in records(result)] == [True, False, True]


def test_one_weight_alone_leaves_the_other_term_out(go):
    for option, term in (("alpha", "generated"), ("beta", "consistency")):
        losses = records(go({"fedgen": {option: 0.0}}))[1]["losses"]
        assert f"fedgen.{term}" not in losses
        assert len(losses) == 2


def test_neutral_options_send_nothing(go):
    result = go({"fedgen": {"alpha": 0.0, "beta": 0.0}}, **SKEWED)
    assert "fedgen" not in result.summary["bytes"]["per_round"]["by_plugin"]
    assert plugin_state(result, "fedgen") == {}


def test_classes_that_no_cohort_held_are_unknown(go):
    result = go("fedgen", partition="classes", classes_per_client=2, participation=0.34)
    assert 0 < plugin_state(result, "fedgen")["known"].sum() < 10


def test_counts_that_do_not_add_up_leave_the_client_out(go):
    class Liar(FedGen):
        @hookimpl
        def end_local(self, client):
            return {"counts": client.class_counts + (client.id == 1)}

    (first, *_) = records(go(Liar))
    assert first["accepted"] == 2
    assert "add up to" in str(first["failures"])


@pytest.mark.slow
def test_every_option_changes_the_trajectory(go):
    changes = [{}, {"alpha": 1.0}, {"beta": 3.0}, {"decay": 0.5}, {"eta": 0.0}, {"steps": 3}, {"batch_size": 8}]
    changes += [{"lr": 0.1}, {"weight_decay": 1.0}, {"hidden": 9}, {"noise": 5}]
    assert len({model_bytes(go({"fedgen": change}, **SKEWED)) for change in changes}) == len(changes)


@pytest.mark.parametrize("other", ["fedper", "fedproto", "solo"])
def test_classifiers_that_stay_on_the_clients_are_refused(go, other):
    with raises(PluginConflictError, "'fedgen'", other):
        go("fedgen", "fedbn", other)  # FedBN keeps nothing of this model


def test_changed_counts_are_refused(go):
    with raises(PluginConflictError, "'local-dp'"):
        go("fedgen", "local-dp")


def test_clients_own_encoders_are_no_hindrance(go):
    assert go("fedgen", "lg-fedavg", client_test_fraction=0.2).metrics["personal"]["accuracy"] > 0.3
