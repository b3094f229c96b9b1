"""CCVR: hand cases, statistics and calibration in whole runs, what it refuses, and that it changes nothing else."""

from __future__ import annotations

import copy
import pkgutil
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedcore
from fedcore import (
    Answer,
    ConfigError,
    Plugin,
    PluginConflictError,
    RoundFailedError,
    hookimpl,
)
from fedcore.data import load_dataset, load_partition
from fedcore.hooks import create_plugin
from fedcore_ccvr import Ccvr, TukeyLinear, tukey
from fedcore_functional import feature_statistics, sample_features
from fedcore_testing import (
    CorrectsClassifier,
    PersonalClassifier,
    federations,
    installed,
    model_bytes,
    records,
    softmax_by_hand,
    with_batch_norm,
)
from tests.sentences import raises

QUICK = {"epochs": 2, "per_class": 50}
SKEWED = {"partition": "classes", "classes_per_client": 2, "clients": 5, "rounds": 3, "local_epochs": 2}
SERVER = pkgutil.resolve_name("fedcore.server.context:ScopeContext")
"""What post_train sees of the server; not public, so that it is looked up by name."""
go = federations()


# --- hand cases ---------------------------------------------------------------------------------------------


def retrained_on(answers, **options):
    """What the classifier is retrained on after these answers: (features, labels)."""
    calls = []

    def ask(clients, question, check):
        calls.append(clients)
        for answer in answers:
            check(answer)
            yield answer

    server = SimpleNamespace(
        num_classes=2,
        feature_dim=answers[0].tensors["means"].shape[1] if answers else 1,
        client_sizes=torch.full((9,), 1000),
        network=lambda: SimpleNamespace(encoder=nn.Identity()),
        ask=ask,
        generator=lambda purpose: torch.Generator().manual_seed(0),
        update_model=calls.append,
    )
    with patch.object(Ccvr, "retrained", lambda self, server, *drawn: drawn):
        create_plugin("ccvr", options).post_train(server)
    assert calls[0] == "all"
    return calls[1]


def answer(client, z, y):
    return Answer(client, feature_statistics(torch.tensor(z), torch.tensor(y), 2))


def test_the_hand_case():
    """Clients {0, 2} and {4}: mean 2 and variance 4; biased local covariances would give 3.5."""
    answers = [answer(0, [[0.0], [2.0]], [0, 0]), answer(1, [[4.0], [7.0]], [0, 1])]
    features, labels = retrained_on(answers, per_class=100_000)
    assert torch.bincount(labels).tolist() == [100_000, 100_000]
    assert features[labels == 0].mean().item() == pytest.approx(2, abs=0.03)
    assert features[labels == 0].var().item() == pytest.approx(4, abs=0.1)
    assert (features[labels == 1] == 7).all(), "a single sample gives copies of itself"
    plugin = create_plugin("ccvr", {})
    assert (plugin.options.epochs, plugin.options.lr, plugin.options.batch_size) == (100, 0.01, 64)
    assert plugin.momentum == 0.9


# --- whole runs ---------------------------------------------------------------------------------------------


def test_no_epochs_leave_tukeys_transformation_out(go):
    result = go({"ccvr": {"epochs": 0, "tukey": 0.5}})
    assert model_bytes(result) == model_bytes(go({}))
    assert "global_before_correction" not in result.metrics


def numpy_features(result, samples):
    """Features of the digits' mlp in float64."""
    w = {name: tensor.double().numpy() for name, tensor in result.model.state_dict().items()}
    z = samples.flatten(1).double().numpy()
    for layer in ("base.fc1", "base.fc2"):
        z = np.maximum(z @ w[f"encoder.{layer}.weight"].T + w[f"encoder.{layer}.bias"], 0)
    return z


@pytest.mark.parametrize("power", [None, 0.5])
def test_the_gaussians_are_those_of_all_training_features(go, monkeypatch, power):
    """Of every client, not of the cohort alone, under the final encoder, held-out parts left out."""
    seen = {}

    def spy(means, covariances, per_class, *, generator, known):
        seen.update(means=means, covariances=covariances)
        return sample_features(means, covariances, per_class, generator=generator, known=known)

    monkeypatch.setattr("fedcore_functional.calibration.sample_features", spy)
    result = go({"ccvr": {**QUICK, "tukey": power}}, clients=4, participation=0.5, client_test_fraction=0.2)
    data = load_dataset("digits")
    parts = torch.cat([*load_partition(result.directory / "partition.json", data).train])
    z, y = numpy_features(result, data.train.gather(parts)), data.train.labels[parts].numpy()
    z = z if power is None else z**power
    for c in range(10):
        np.testing.assert_allclose(seen["means"][c].numpy(), z[y == c].mean(axis=0), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(seen["covariances"][c].numpy(), np.cov(z[y == c].T), rtol=1e-3, atol=1e-4)


def test_the_classifier_is_retrained_as_sgd_would(go, monkeypatch):
    """Against an independent loop over the same features, momentum included; the encoder does not move."""
    seen = {}

    def spy(self, server, features, labels):
        seen.update(x=features, y=labels, start={n: t.clone() for n, t in server.model.items()})
        return original(self, server, features, labels)

    original = Ccvr.retrained
    monkeypatch.setattr(Ccvr, "retrained", spy)
    options = {"per_class": 30, "epochs": 1, "batch_size": 300, "lr": 0.1}  # one step of all 300: order is nothing
    result = go({"ccvr": options}, rounds=1)
    x, y = seen["x"].double().numpy(), seen["y"].numpy()
    w = {name: tensor.double().numpy() for name, tensor in seen["start"].items()}
    after = result.model.state_dict()
    for name, gradient in softmax_by_hand(w, x, np.eye(10)[y])[1].items():
        np.testing.assert_allclose(after[name].numpy(), w[name] - 0.1 * gradient, rtol=1e-4, atol=1e-6)
    for name, tensor in go({}, rounds=1).model.state_dict().items():
        assert torch.equal(tensor, seen["start"][name])
        assert torch.equal(tensor, after[name]) == name.startswith("encoder.")


def test_it_corrects_a_classifier_trained_on_skewed_clients(go):
    result, plain = go({"ccvr": {}}, **SKEWED), go({}, **SKEWED)
    assert result.metrics["global_before_correction"] == plain.metrics["global"]
    assert result.metrics["global"]["accuracy"] > plain.metrics["global"]["accuracy"] + 0.1


@pytest.mark.slow
def test_every_option_changes_the_result(go):
    choices = [
        {}, {"per_class": 60}, {"epochs": 3}, {"lr": 0.02}, {"momentum": 0.5}, {"batch_size": 32}, {"tukey": 0.5},
        {"tukey": 0.6},
    ]  # fmt: skip
    assert len({model_bytes(go({"ccvr": {**QUICK, **options}})) for options in choices}) == len(choices)


def test_a_run_that_stopped_before_calibrating_resumes_to_the_same_bits(go, monkeypatch, tmp_path):
    stops = [True]

    def stopping(self, *arguments):
        if stops.pop() if stops else False:
            raise RoundFailedError("stop")
        return original(self, *arguments)

    original = Ccvr.retrained
    with monkeypatch.context() as patched:
        patched.setattr(Ccvr, "retrained", stopping)
        with pytest.raises(RoundFailedError, match="stop"):
            go({"ccvr": {**QUICK, "tukey": 0.5}}, out=tmp_path / "run")
    resumed = fedcore.resume(tmp_path / "run", allow_code=True)
    assert model_bytes(resumed) == model_bytes(go({"ccvr": {**QUICK, "tukey": 0.5}}))


@pytest.mark.parametrize("power", [None, 0.5])
def test_batch_norm_is_left_as_it_is(go, power):
    options = {"model": with_batch_norm}
    after = go({"ccvr": {**QUICK, "tukey": power}}, **options).model.state_dict()
    for name, tensor in go({}, **options).model.state_dict().items():
        assert torch.equal(tensor, after[name]) == name.startswith("encoder.")


def test_uscc_is_ccvr_with_other_numbers(go, monkeypatch):
    installed("uscc")
    original = SERVER.generator
    monkeypatch.setattr(SERVER, "generator", lambda self, purpose: original(self, "the same"))
    options = {"per_class": 50, "epochs": 3, "lr": 0.01, "batch_size": 64}
    uscc, ccvr = go({"uscc": options}, **SKEWED), go({"ccvr": {**options, "momentum": 0.0}}, **SKEWED)
    assert model_bytes(uscc) == model_bytes(ccvr)


# --- Tukey's transformation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [0.3, 0.5, 1.0])
def test_tukey_against_numpy_with_a_finite_gradient(power):
    x = torch.tensor([-2.0, -0.0, 0.0, 1e-30, 0.5, 3.0], dtype=torch.float64, requires_grad=True)
    value = tukey(x, power)
    np.testing.assert_allclose(value.detach().numpy(), np.maximum(x.detach().numpy(), 0) ** power, rtol=1e-12)
    value.sum().backward()
    assert x.grad[:3].tolist() == [0, 0, 0]
    assert x.grad[4].item() == pytest.approx(power * 0.5 ** (power - 1))


def test_the_head_is_linear_until_it_is_calibrated():
    linear, x = nn.Linear(5, 3), torch.randn(4, 5)
    weight = linear.weight.detach().clone()
    made = TukeyLinear(linear, 0.5)
    assert list(made.state_dict()) == ["weight", "bias", "calibrated"]
    assert torch.equal(made.weight, weight)
    for mode in (True, False):
        assert torch.equal(made.train(mode)(x), linear(x))
    made.calibrated.fill_(True)
    assert torch.equal(made.train()(x), linear(x)), "calibration trains it on transformed features"
    assert torch.equal(made.eval()(x), linear(tukey(x, 0.5)))
    assert torch.equal(copy.deepcopy(made)(x), made(x))


def test_making_the_head_draws_no_random_number():
    linear, before = nn.Linear(5, 3), torch.get_rng_state()
    TukeyLinear(linear, 0.5)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_with_tukey_training_is_the_same_and_the_final_model_classifies_transformed_features(go):
    plain, result = go({}), go({"ccvr": {"tukey": 0.5}})
    assert result.metrics["global_before_correction"] == plain.metrics["global"]
    after = result.model.state_dict()
    assert after["classifier.calibrated"].tolist() == [True]
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(tensor, after[name]) == name.startswith("encoder.")
    data = load_dataset("digits").test
    x = data.gather(torch.arange(len(data)))
    z = torch.from_numpy(numpy_features(result, x)).float()
    logits = F.linear(z.sqrt(), after["classifier.weight"], after["classifier.bias"])
    torch.testing.assert_close(result.model(x).logits, logits, rtol=1e-4, atol=1e-4)
    accuracy = (logits.argmax(1) == data.labels).double().mean().item()
    assert result.metrics["global"]["accuracy"] == pytest.approx(accuracy, abs=0.003)
    assert accuracy > plain.metrics["global"]["accuracy"]
    assert fedcore.evaluate_run(result.directory, allow_code=True)["global"] == result.metrics["global"]


class Deep(Plugin):
    """Makes the classifier more than a linear layer."""

    @hookimpl
    def configure_model(self, model):
        model.classifier = nn.Sequential(model.classifier)


def test_tukey_refuses_what_it_cannot_transform(go):
    with raises(ConfigError, "ccvr.tukey"):
        go({Deep: {}, "ccvr": {"tukey": 0.5}})
    with raises(ConfigError, "--buffers"):
        go({"ccvr": {"tukey": 0.5}}, buffers="local")
    go({Deep: {}, "ccvr": QUICK}, rounds=1)


# --- options and company ------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["uscc", "fedeccr", CorrectsClassifier])
@pytest.mark.parametrize("first", [True, False])
def test_a_second_corrector_is_refused(go, other, first):
    names = ["ccvr", installed(other) if isinstance(other, str) else other]
    names = names if first else names[::-1]
    with raises(PluginConflictError):
        go({name: {} for name in names})


def test_a_personal_classifier_is_refused(go):
    with raises(PluginConflictError, "'ccvr'", "'personalclassifier'"):
        go({"ccvr": {}, PersonalClassifier: {}})


def test_partial_participation_asks_everybody(go):
    result = go({"ccvr": QUICK}, clients=4, participation=0.25, rounds=1)
    lines = records(result)
    assert len(lines[0]["cohort"]) == 1
    assert lines[-1]["phase"] == "post_train"
    assert lines[-1]["bytes"]["by_plugin"]["ccvr"]["up"] > 3 * 8 * 64 * 65 / 2
