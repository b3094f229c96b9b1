"""The plugins fedeccr and uscc: stage 1's loss, whole runs on digits, identities, options and combinations."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedcore import ConfigError, PluginConflictError
from fedcore.data import load_dataset, load_partition
from fedcore.hooks import create_plugin
from fedcore_functional import PrototypeOptions, sample_features
from fedcore_testing import PrefersClass0, committed, federations, installed, model_bytes, records
from tests.sentences import raises

QUICK = {"epochs": 2, "per_class": 50}
FEW = {"dataset": "module:fedcore_testing.problems.few_digits", "batch_size": 16}
go = federations(samples=300)


# --- stage 1: the loss --------------------------------------------------------------------------------------


def numpy_loss(z, y, prototypes, known, temperature, denominator):
    """Loss_pc: Algorithm 1 line 16 over all known classes, or Eq. 1 (with its minus sign) over the others."""
    total = 0.0
    for sample, label in zip(z, y, strict=True):
        sums = [k for k in known if denominator == "all" or k != label]
        if label in known and sums:
            psi = {
                k: np.exp(sample @ prototypes[k] / np.linalg.norm(sample) / np.linalg.norm(prototypes[k]) / temperature)
                for k in known
            }
            total -= np.log(psi[label] / sum(psi[k] for k in sums))
    return total / len(y)


def step_of(z, y, prototypes, known, *, round=1, rounds=4):
    received = {"prototypes": prototypes, "known": known}
    client = SimpleNamespace(received=received, scratch={}, round=round, rounds=rounds)
    return SimpleNamespace(features=z, y=y, client=client, round=round, rounds=rounds)


def local_loss_of(options, step):
    """The term as a client computes it: what a round makes ready first, then the batch."""
    plugin = create_plugin("fedeccr", options)
    plugin.members[0].begin_local(step.client)
    return plugin.local_loss(step)


def random_step(known=(0, 1, 3), **where):
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(6, 5, generator=draw, dtype=torch.float64, requires_grad=True)
    prototypes = torch.randn(4, 5, generator=draw, dtype=torch.float64)
    mask = torch.tensor([c in known for c in range(4)])
    return step_of(z, torch.tensor([0, 1, 1, 2, 3, 0]), prototypes, mask, **where)


@pytest.mark.parametrize("known", [(0, 1, 2, 3), (0, 1, 3), (1,), ()])
@pytest.mark.parametrize("denominator", ["all", "others"])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_the_loss(known, denominator, temperature):
    step = random_step(known)
    options = {"temperature": temperature, "denominator": denominator, "contrast_weight": 0.1}
    loss = local_loss_of(options, step)
    z, prototypes = step.features.detach().numpy(), step.client.received["prototypes"].numpy()
    expected = numpy_loss(z, step.y.tolist(), prototypes, known, temperature, denominator)
    assert loss.value.item() == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert loss.weight == pytest.approx(0.75 * 0.1)
    assert loss.task_scale == 0.25
    loss.value.backward()
    assert torch.isfinite(step.features.grad).all()


@pytest.mark.parametrize("denominator", ["all", "others"])
def test_a_step_against_the_gradient_turns_a_sample_towards_its_prototype(denominator):
    step = random_step((0, 1, 2, 3))
    loss = local_loss_of({"denominator": denominator}, step)
    (gradient,) = torch.autograd.grad(loss.value, step.features)
    own = step.client.received["prototypes"][step.y]
    before, after = (F.cosine_similarity(z, own) for z in (step.features, step.features - 0.1 * gradient))
    assert (after > before).all()


# --- identities ---------------------------------------------------------------------------------------------

SKEWED = {"clients": 5, "participation": 0.6, "partition": "classes", "classes_per_client": 4, "rounds": 3}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options",
    [
        {"first_round": "contrast", "prototype_weights": "clients"},
        {"first_round": "contrast", "init": "random", "prototype_weights": "samples"},
        {"first_round": "task", "prototype_weights": "clients"},
        {"first_round": "task", "prototype_weights": "samples"},
    ],
    ids=lambda options: "-".join(options.values()),
)
def test_stage_1_at_temperature_1_is_fedproc_bit_by_bit(go, options):
    installed("fedproc")
    stage_1 = go({"fedeccr": {"temperature": 1.0, "correct": False, **options}}, **SKEWED)
    fedproc = go({"fedproc": options}, **SKEWED)
    assert model_bytes(stage_1) == model_bytes(fedproc)
    states = [committed(r).plugins for r in (stage_1, fedproc)]
    assert all(torch.equal(states[0]["fedeccr"][n], states[1]["fedproc"][n]) for n in ("prototypes", "known"))
    assert model_bytes(stage_1) != model_bytes(go({"fedeccr": {"correct": False, **options}}, **SKEWED))


def test_stage_1s_and_fedprocs_common_options_have_the_same_defaults():
    installed("fedproc")
    ours, theirs = (create_plugin(name, {}).options for name in ("fedeccr", "fedproc"))
    assert all(getattr(ours, name) == getattr(theirs, name) for name in PrototypeOptions.model_fields)


@pytest.mark.parametrize("weights", ["clients", "samples"])
def test_a_first_round_of_the_task_is_fedavgs_to_the_bit(go, weights):
    stage_1 = {"correct": False, "first_round": "task", "prototype_weights": weights}
    assert model_bytes(go({"fedeccr": stage_1}, rounds=1)) == model_bytes(go({}, projection=True, rounds=1))
    losses = [sorted(record["losses"]) for record in records(go({"fedeccr": stage_1}, rounds=2))]
    assert losses == [["task"], ["fedeccr.contrast", "task"]]


def test_fedeccr_is_its_stage_1_followed_by_uscc_bit_by_bit(go):
    whole = go({"fedeccr": QUICK}, **SKEWED)
    parts = go({"fedeccr": {"correct": False}, "uscc": QUICK}, **SKEWED)
    alone = go({"fedeccr": {"correct": False}}, **SKEWED)
    assert model_bytes(whole) == model_bytes(parts) != model_bytes(alone)
    for result in (whole, parts):
        assert result.metrics["global_before_correction"] == alone.metrics["global"]
    assert "global_before_correction" not in alone.metrics


def test_uscc_changes_the_classifier_only_and_reports_both_accuracies(go):
    plain, corrected = go({}), go({"uscc": {}})
    after = corrected.model.state_dict()
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(tensor, after[name]) == name.startswith("encoder.")
    assert corrected.metrics["global_before_correction"] == plain.metrics["global"]
    assert corrected.summary["metrics"]["global_before_correction"] == plain.metrics["global"]
    assert corrected.metrics["global"]["accuracy"] != plain.metrics["global"]["accuracy"]


# --- stage 2 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [1, 4])
def test_the_pooled_statistics_are_those_of_all_training_features(go, monkeypatch, clients):
    """Of every client, not of the cohort alone, under the final encoder."""
    seen = {}

    def spy(means, covariances, per_class, *, generator, known):
        seen.update(means=means, covariances=covariances, known=known, per_class=per_class)
        return sample_features(means, covariances, per_class, generator=generator, known=known)

    monkeypatch.setattr("fedcore_functional.calibration.sample_features", spy)
    result = go({"uscc": QUICK}, clients=clients, participation=0.5, client_test_fraction=0.2)
    data = load_dataset("digits")
    parts = torch.cat([*load_partition(result.directory / "partition.json", data).train])
    w = {name: tensor.double().numpy() for name, tensor in result.model.state_dict().items()}
    z, y = data.train.gather(parts).flatten(1).double().numpy(), data.train.labels[parts].numpy()
    for layer in ("base.fc1", "base.fc2"):
        z = np.maximum(z @ w[f"encoder.{layer}.weight"].T + w[f"encoder.{layer}.bias"], 0)
    for c in range(10):
        np.testing.assert_allclose(seen["means"][c].numpy(), z[y == c].mean(axis=0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(seen["covariances"][c].numpy(), np.cov(z[y == c].T), rtol=1e-3, atol=1e-4)
    assert seen["known"].all()
    assert seen["per_class"] == 50


def test_uscc_repairs_a_classifier_that_prefers_a_class(go):
    """After the last round a prior of e^8 for class 0 stands in the classifier; the encoder is fine."""
    result = go({PrefersClass0: {}, "uscc": {}}, local_epochs=4, rounds=1)
    before, after = result.metrics["global_before_correction"], result.metrics["global"]
    assert before["accuracy"] < 0.4
    assert after["accuracy"] > before["accuracy"] + 0.3


def test_uscc_corrects_a_classifier_trained_on_skewed_clients(go):
    result = go({"uscc": {}}, partition="classes", classes_per_client=2, clients=5, rounds=3, local_epochs=2)
    assert result.metrics["global"]["accuracy"] > result.metrics["global_before_correction"]["accuracy"] + 0.1


def test_what_travels_is_in_the_ledger(go):
    result = go({"uscc": QUICK}, clients=2, partition="iid")
    doubles = 64 + 64 * 65 // 2  # mean and half a covariance, d = 64
    assert result.summary["bytes"]["by_plugin"]["uscc"] == {"down": 0, "up": 2 * 10 * 8 * (2 + doubles)}


# --- options and combinations -------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_option_changes_the_result(go):
    choices = [
        {}, {"temperature": 1.0}, {"denominator": "others"}, {"contrast_weight": 0.1}, {"init": "random"},
        {"first_round": "task"}, {"prototype_weights": "samples"}, {"projection": False}, {"correct": False},
        {"per_class": 60}, {"epochs": 3}, {"lr": 0.02}, {"batch_size": 32},
    ]  # fmt: skip
    base = {**QUICK, "first_round": "contrast", "prototype_weights": "clients"}
    found = {model_bytes(go({"fedeccr": {**base, **options}}, **FEW)) for options in choices}
    assert len(found) == len(choices)


def test_a_weight_of_0_is_refused():
    """Round 0 would have no objective at all."""
    with raises(ConfigError, "contrast_weight", 0):
        create_plugin("fedeccr", {"contrast_weight": 0})


@pytest.mark.sampled(4)
@pytest.mark.parametrize("other", ["fedprox", "moon", "fedproc", "fedcd"])
def test_uscc_runs_behind_any_method(go, other):
    corrected, alone = go({installed(other): {}, "uscc": QUICK}, **FEW), go({other: {}}, **FEW)
    assert corrected.metrics["global_before_correction"] == alone.metrics["global"]
    after = corrected.model.state_dict()
    for name, tensor in alone.model.state_dict().items():
        assert torch.equal(tensor, after[name]) == name.startswith("encoder.")


@pytest.mark.parametrize("other", ["fedprox", "moon"])
def test_fedeccr_runs_beside(go, other):
    both = go({"fedeccr": QUICK, installed(other): {}})
    assert "global_before_correction" in both.metrics


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        ("fedproc", "fedeccr", "scales_task"),
        ("fedcd", "fedeccr", "scales_task"),
        ("fedeccr", "uscc", "corrects = 'classifier."),
        ("uscc", "fedeccr", "corrects = 'classifier."),
    ],
)
def test_refused(go, one, other, named):
    with raises(PluginConflictError, f"'{installed(one)}'", f"'{installed(other)}'", named):
        go({one: {}, other: {}})
