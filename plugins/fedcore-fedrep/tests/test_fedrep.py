"""FedRep and FedBABU: hand cases, runs in NumPy, who trains what when, and the fine-tuned model of the evaluation."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from fedcore import PluginConflictError, SplitModel
from fedcore_testing import (
    PersonalClassifier,
    Quadratic,
    W,
    analytic_federation,
    client_arrays,
    committed,
    federations,
    hidden_tanh,
    initial_weights,
    mean_by_hand,
    personal_state,
    sgd_by_hand,
    small_config,
    tanh_by_hand,
    weights,
    with_batch_norm,
)
from tests.sentences import raises, warns

FEW = {"dataset": "module:fedcore_testing.problems.few_digits", "batch_size": 16, "local_epochs": 2}
go = federations(**FEW)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.w.expand(len(x), 1)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.Parameter(torch.zeros(1))

    def forward(self, features):
        return features + self.h


class BaseAndHead(SplitModel):
    """Logits w + h, so that each is pulled to what the other leaves of the target."""

    def make_classifier(self, feature_dim):
        return Head()


def base_and_head(num_classes, input_shape):
    return BaseAndHead(Base(), 1, 1)


TOY = {**analytic_federation([[4.0], [8.0]], [1, 3]), "model": base_and_head, "lr": 0.5, "rounds": 2}


def train(w, h, centre, head_epochs, epochs, lr=0.5):
    """Gradient of |w + h - c|^2 / 2, head first."""
    for epoch in range(epochs):
        gradient = w + h - centre
        if epoch < head_epochs:
            h -= lr * gradient
        else:
            w -= lr * gradient
    return w, h


@pytest.mark.parametrize(("epochs", "representation"), [(2, 1), (3, 1), (3, 2)])
def test_the_hand_case_of_fedrep(go, epochs, representation):
    result = go({Quadratic: {}, "fedrep": {"representation_epochs": representation}}, **TOY, local_epochs=epochs)
    w, heads = 0.0, [0.0, 0.0]
    for _ in range(2):
        ends = [train(w, h, c, epochs - representation, epochs) for h, c in zip(heads, (4.0, 8.0))]
        heads = [h for _, h in ends]
        w = (ends[0][0] + 3 * ends[1][0]) / 4
    assert weights(result)[W].tolist() == pytest.approx([w])
    assert [personal_state(result, client)["classifier.h"].item() for client in (0, 1)] == pytest.approx(heads)
    by_plugin = committed(result).ledger["by_plugin"]["model"]
    assert by_plugin["up"] == by_plugin["down"] == 2 * 2 * 4, "one float per client and round, each way"


def of_part(part, w, x, y):
    return {n: g for n, g in tanh_by_hand(w, x, y).items() if n.startswith(part)}


@pytest.mark.parametrize("method", ["fedrep", "fedbabu"])
def test_a_run_is_the_algorithm_in_numpy(go, tmp_path, method):
    """Full batches, momentum and weight decay: in three epochs FedRep's head takes two, its representation one."""
    options = {**FEW, "model": hidden_tanh, "batch_size": 500, "lr": 0.2, "weight_decay": 1e-2, "clients": 2}
    options |= {"local_epochs": 3, "rounds": 2}
    result = go(method, **options)
    w = {n: t.double().numpy() for n, t in initial_weights(small_config(tmp_path, **options)).items()}
    heads = [{n: v for n, v in w.items() if n.startswith("classifier")} for _ in range(2)]
    clients = client_arrays(result)
    for _ in range(2):
        ends = []
        for k, (x, y) in enumerate(clients):
            own = {**w, **heads[k]}
            for part, epochs in (("classifier", 2), ("encoder", 1)) if method == "fedrep" else (("encoder", 3),):
                own = sgd_by_hand(partial(of_part, part), own, x, y, epochs, lr=0.2)
            heads[k] = {n: v for n, v in own.items() if n.startswith("classifier")}
            ends.append({n: v for n, v in own.items() if n.startswith("encoder")})
        w |= mean_by_hand(ends, [len(x) for x, _ in clients])
    for name, tensor in weights(result).items():
        np.testing.assert_allclose(tensor, w[name], atol=2e-5)
    if method == "fedrep":
        for k, head in enumerate(heads):
            for name, value in head.items():
                np.testing.assert_allclose(personal_state(result, k)[name], value, atol=2e-5)


@pytest.mark.filterwarnings("ignore:fedrep")
def test_fedrep_without_epochs_for_the_head_trains_fedbabus_body_to_the_bit(go):
    rep, babu = (
        weights(go(one, model=with_batch_norm)) for one in ({"fedrep": {"representation_epochs": 9}}, "fedbabu")
    )
    assert all(torch.equal(rep[name], babu[name]) for name in rep)


def test_heads_that_nobody_trains_are_warned_of(go):
    with warns(RuntimeWarning, "fedrep", 2, "--local-epochs 3"):
        go({"fedrep": {"representation_epochs": 2}}, rounds=1)
    with warns(RuntimeWarning, "fedrep", 5, "--local-epochs 2"):
        go("fedrep", rounds=1, local_steps=5)


def test_fedbabus_head_stays_as_it_was_initialized(go, tmp_path):
    result = go("fedbabu")
    start = initial_weights(small_config(tmp_path, **FEW))
    moved = {name.partition(".")[0] for name, t in weights(result).items() if not torch.equal(t, start[name])}
    assert moved == {"encoder"}


@pytest.mark.parametrize("part", ["model", "head", "body"])
def test_the_evaluated_model_is_fine_tuned_as_in_numpy(go, part):
    """Full-batch fine-tuning by hand, its accuracy on each client's held-out part. One client never took part."""
    options = {"model": hidden_tanh, "clients": 2, "client_test_fraction": 0.3, "rounds": 1, "participation": 0.5}
    given = {"epochs": 3, "part": part, "batch_size": 500, "lr": 1.5}
    result = go({"fedbabu": given}, **options)
    prefix = {"model": "", "head": "classifier", "body": "encoder"}[part]
    for client, (trained, held) in enumerate(zip(client_arrays(result), client_arrays(result, held_out=True))):
        own, (x, y) = {n: t.double().numpy() for n, t in weights(result).items()}, held
        for _ in range(3):
            own |= {n: own[n] - 1.5 * g for n, g in of_part(prefix, own, *trained).items()}
        h = np.tanh(x @ own["encoder.base.1.weight"].T + own["encoder.base.1.bias"])
        hits = (h @ own["classifier.weight"].T + own["classifier.bias"]).argmax(1) == y.argmax(1)
        assert result.metrics["personal"]["per_client"][str(client)] == pytest.approx(hits.mean(), abs=1e-6)


def test_without_fine_tuning_the_global_model_is_evaluated(go):
    result = go({"fedbabu": {"epochs": 0}}, client_test_fraction=0.3)
    assert result.metrics["personal"]["accuracy"] == result.metrics["global_local"]["accuracy"]


def test_by_default_it_is_fine_tuned_at_the_last_rounds_rate(go):
    """Two rounds of a cosine: lr, then lr / 2. The third round's rate would be 0, and leave the global model."""
    options = {"client_test_fraction": 0.3, "rounds": 2, "lr": 0.1, "lr_schedule": "cosine"}
    figures = [go({"fedbabu": given}, **options).metrics["personal"] for given in ({}, {"lr": 0.05}, {"epochs": 0})]
    assert figures[0] == figures[1] != figures[2]


def test_a_plugin_that_keeps_the_head_that_fedbabu_does_not_train_is_told_to_have_no_effect(go):
    with warns(RuntimeWarning, "'personalclassifier'"):
        result = go({"fedbabu": {}, PersonalClassifier: {}}, rounds=1, client_test_fraction=0.3)
    assert result.metrics["personal"] == go("fedbabu", rounds=1, client_test_fraction=0.3).metrics["personal"]


@pytest.mark.parametrize("other", ["fedper", "scaffold", "fednova", "fedbabu"])
def test_what_cannot_be_combined_is_refused(go, other):
    with raises(PluginConflictError, other):
        go("fedrep", other)
