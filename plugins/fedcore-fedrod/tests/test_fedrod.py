"""FedRoD: hand cases, losses and gradients against NumPy, a whole run with both heads, and both predictors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedcore
from fedcore import PluginConflictError, SplitModel
from fedcore.models import Outputs
from fedcore_fedrod import FedRoD, TwoHeads, personal_cross_entropy
from fedcore_functional import balanced_cross_entropy, log_prior
from fedcore_testing import (
    Cohorts,
    OwnTaskLoss,
    client_arrays,
    committed,
    federations,
    initial_weights,
    linear,
    mean_by_hand,
    model_bytes,
    plugin_state,
    records,
    same_tensors,
    small_config,
    softmax_by_hand,
    weights,
)
from tests.sentences import raises

FEW = {"dataset": "module:fedcore_testing.problems.few_digits", "batch_size": 16}
SKEWED = {"partition": "classes", "classes_per_client": 5}
go = federations(**FEW)
HEAD = ("classifier.weight", "classifier.bias")


# --- the equations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("counts", "gamma"), [((3, 1, 0), 1.0), ((9, 1, 0), 0.5)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_hand_case(counts, gamma, dtype):
    """n^gamma is (3, 1, 0) and g = 0 for both classes: p = (0.75, 0.25, 0)."""
    g = torch.tensor([[0.0, 0.0, 5.0]], dtype=dtype, requires_grad=True)
    value = balanced_cross_entropy(g, torch.tensor([0]), log_prior(torch.tensor(counts), gamma).to(dtype))
    value.backward()
    assert value.item() == pytest.approx(np.log(4 / 3), rel=1e-6)
    np.testing.assert_allclose(g.grad, [[-0.25, 0.25, 0.0]], atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
def test_balanced_softmax_against_numpy(dtype, gamma):
    rng = np.random.default_rng(0)
    g, counts = 3 * rng.standard_normal((7, 5)), np.array([40, 0, 3, 1, 700])
    y = rng.choice([0, 2, 3, 4], 7)
    p = counts**gamma * np.exp(g)
    p /= p.sum(1, keepdims=True)
    logits = torch.tensor(g, dtype=dtype, requires_grad=True)
    value = balanced_cross_entropy(logits, torch.tensor(y), log_prior(torch.tensor(counts), gamma).to(dtype))
    value.backward()
    tolerance = 1e-6 if dtype == torch.float64 else 1e-5  # the prior is float32
    assert value.item() == pytest.approx(-np.log(p[range(7), y]).mean(), rel=tolerance)
    np.testing.assert_allclose(logits.grad, (p - np.eye(5)[y]) / 7, rtol=tolerance, atol=tolerance)


def test_the_personal_loss_against_numpy_trains_the_personal_head_alone():
    rng = np.random.default_rng(0)
    g, h, y = rng.standard_normal((4, 3)), rng.standard_normal((4, 3)), np.array([0, 2, 1, 1])
    p = np.exp(g + h) / np.exp(g + h).sum(1, keepdims=True)
    generic, personal = (torch.tensor(logits, requires_grad=True) for logits in (g, h))
    value = personal_cross_entropy(generic, personal, torch.tensor(y))
    value.backward()
    assert value.item() == pytest.approx(-np.log(p[range(4), y]).mean(), rel=1e-12)
    np.testing.assert_allclose(personal.grad, (p - np.eye(3)[y]) / 4, rtol=1e-12)
    assert generic.grad is None


def test_the_personalised_predictor_is_the_sum_of_both_heads():
    model = TwoHeads(lambda x: Outputs(x, 2 * x), nn.Linear(2, 2))
    with torch.no_grad():
        model.head.weight.copy_(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
        model.head.bias.copy_(torch.tensor([10.0, 20.0]))
        features, logits = model(torch.tensor([[1.0, 3.0]]))
    assert features.tolist() == [[1.0, 3.0]]
    assert logits.tolist() == [[2 + 3 + 10.0, 6 + 1 + 20.0]]


# --- a whole run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gamma", "least"), [(1.0, 0), (0.5, 0), (1.0, 1), (0.0, 0)])
def test_a_run_is_the_method_in_numpy(go, tmp_path, gamma, least):
    """Softmax regression, full batches, momentum, weight decay, clients that come and go."""
    cohorts = [[0, 1], [1, 2], [0, 2]]
    options = {**FEW, **SKEWED, "model": linear, "batch_size": 500, "lr": 0.1, "weight_decay": 1e-2}
    options |= {"clients": 3, "rounds": 3, "local_epochs": 2}
    result = go(("fedrod", {"gamma": gamma, "least": least}), (Cohorts, {"rounds": cohorts}), **options)
    w = {name: t.double().numpy() for name, t in initial_weights(small_config(tmp_path, **options)).items()}
    own: dict[int, dict[str, np.ndarray]] = {}
    clients = client_arrays(result)
    for cohort in cohorts:
        ends = []
        for k in cohort:
            (x, y), generic, personal = clients[k], dict(w), own.get(k, dict(w))
            speeds = [dict.fromkeys(HEAD, 0.0), dict.fromkeys(HEAD, 0.0)]
            with np.errstate(divide="ignore"):
                prior = gamma * np.log(np.maximum(y.sum(0), least)) if gamma else np.zeros(10)
            for _ in range(2):
                shifted = {HEAD[0]: generic[HEAD[0]], HEAD[1]: generic[HEAD[1]] + prior}
                both = {name: generic[name] + personal[name] for name in HEAD}
                with np.errstate(invalid="ignore"):
                    gradients = [softmax_by_hand(head, x, y)[1] for head in (shifted, both)]
                for head, speed, gradient in zip((generic, personal), speeds, gradients):
                    for name in HEAD:
                        speed[name] = 0.9 * speed[name] + gradient[name] + 1e-2 * head[name]
                        head[name] = head[name] - 0.1 * speed[name]
            own[k] = personal
            ends.append(generic)
        w = mean_by_hand(ends, [len(clients[k][0]) for k in cohort])
    for name in HEAD:
        np.testing.assert_allclose(weights(result)[name], w[name], atol=1e-5)
        for k in range(3):
            kept = plugin_state(result, "fedrod", k)[name.removeprefix("classifier.")]
            np.testing.assert_allclose(kept, own[k][name], atol=1e-5)


class Deeper(SplitModel):
    """Its classifier has a hidden layer with BatchNorm and dropout."""

    def make_classifier(self, feature_dim):
        return nn.Sequential(nn.Linear(feature_dim, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 10))


def deeper(num_classes, input_shape):
    return Deeper(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU()), 8, num_classes)


def test_a_classifier_of_several_layers_keeps_its_buffers_and_random_numbers(go):
    fedavg, neutral = (go(plugin, model=deeper) for plugin in ({}, ("fedrod", FedRoD.neutral)))
    assert model_bytes(neutral) == model_bytes(fedavg)
    assert set(plugin_state(neutral, "fedrod", 0)) == {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"}


@pytest.mark.slow
def test_every_option_changes_the_trajectory(go):
    found = [
        model_bytes(go(("fedrod", change), **SKEWED)) for change in ({}, {"gamma": 0.5}, {"gamma": 0.0}, {"least": 1})
    ]
    assert len(set(found)) == 4


def test_a_client_keeps_its_head_over_rounds_of_absence(go):
    cohorts = {"rounds": [[0, 1], [1], [1]]}
    found = {r: go("fedrod", (Cohorts, cohorts), rounds=r) for r in (1, 3)}
    assert same_tensors(plugin_state(found[3], "fedrod", 0), plugin_state(found[1], "fedrod", 0))
    assert 2 not in committed(found[3]).manifest
    without_head = fedcore.client_model(found[3].directory, 2, allow_code=True)
    assert same_tensors(without_head.state_dict(), weights(found[3])), "it predicts by g"


def test_both_predictors_are_evaluated(go):
    result = go("fedrod", **SKEWED, rounds=4, local_epochs=2, client_test_fraction=0.25)
    figures = {name: result.metrics[name]["accuracy"] for name in ("global", "global_local", "personal")}
    assert figures["personal"] > figures["global_local"]
    hits = total = 0
    for client, (x, y) in enumerate(client_arrays(result, held_out=True)):
        model = fedcore.client_model(result.directory, client, allow_code=True)
        with torch.no_grad():
            logits = model(torch.tensor(x).float().view(-1, 1, 8, 8)).logits
        hits += int((logits.argmax(1).numpy() == y.argmax(1)).sum())
        total += len(y)
    assert figures["personal"] == pytest.approx(hits / total)


def test_runs_in_bf16(go):
    losses = records(go("fedrod", **SKEWED, precision="bf16", rounds=1))[0]["losses"]
    assert set(losses) == {"task", "fedrod.personal"}


def test_another_task_loss_is_refused(go):
    with raises(PluginConflictError, "task_loss"):
        go("fedrod", OwnTaskLoss)
