"""FedTGP: margin and contrast against NumPy, the server's training by hand, and what clients send and keep."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedcore import PluginConflictError
from fedcore.models import Outputs
from fedcore_fedtgp import PrototypeModel, adaptive_margin, class_margins, equations, margin_contrast
from fedcore_testing import (
    committed,
    federations,
    model_bytes,
    personal_state,
    plugin_state,
    records,
    same_tensors,
)
from tests.sentences import raises

SKEWED = {"partition": "classes", "classes_per_client": 4}
go = federations(client_test_fraction=0.2)


# --- the equations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.0, 1.5, 100.0])
def test_the_margin_against_numpy(threshold):
    means, known = np.random.default_rng(0).standard_normal((6, 3)), [0, 1, 3, 5]
    near = [min(np.linalg.norm(means[a] - means[b]) for b in known if b != a) for a in known]
    mask = torch.zeros(6, dtype=torch.bool)
    mask[known] = True
    np.testing.assert_allclose(class_margins(torch.tensor(means), mask), near, rtol=1e-12)
    assert adaptive_margin(torch.tensor(means), mask, threshold) == pytest.approx(min(max(near), threshold))


def test_one_class_has_no_margin():
    assert adaptive_margin(torch.ones(3, 2), torch.tensor([False, True, False]), 100.0) == 0.0


def numpy_contrast(sent, labels, prototypes, margin):
    """Prototype by prototype, as printed."""
    total = 0.0
    for p, y in zip(sent, labels):
        phi = np.linalg.norm(prototypes - p, axis=1)
        own = np.exp(-(phi[y] + margin))
        total -= np.log(own / (own + sum(np.exp(-phi[c]) for c in range(len(phi)) if c != y)))
    return total / len(sent)


@pytest.mark.parametrize("margin", [0.0, 0.7, 5.0])
def test_contrast_and_gradient_against_numpy(margin):
    rng = np.random.default_rng(1)
    sent, prototypes, labels = rng.standard_normal((5, 3)), rng.standard_normal((4, 3)), np.array([0, 1, 1, 3, 2])
    leaf = torch.tensor(prototypes, requires_grad=True)
    value = margin_contrast(torch.tensor(sent), torch.tensor(labels), leaf, margin)
    value.backward()
    assert value.item() == pytest.approx(numpy_contrast(sent, labels, prototypes, margin), rel=1e-12)
    for i in range(4):
        for j in range(3):
            step = np.zeros_like(prototypes)
            step[i, j] = 1e-6
            up, down = (numpy_contrast(sent, labels, prototypes + s, margin) for s in (step, -step))
            assert leaf.grad[i, j].item() == pytest.approx((up - down) / 2e-6, rel=1e-5, abs=1e-9)


def test_a_prototype_on_its_target_has_a_finite_gradient():
    leaf = torch.zeros(2, 3, requires_grad=True)
    margin_contrast(torch.zeros(1, 3), torch.tensor([0]), leaf, 1.0).backward()
    assert leaf.grad.isfinite().all()


def test_the_servers_training_is_sgd_by_hand():
    """Two epochs of full batches, against modules and an optimizer of torch."""
    parameters = equations.first_parameters(3, 4, torch.Generator().manual_seed(0))
    sent, labels = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 1, 0])
    found = equations.trained(
        parameters, sent, labels, margin=0.5, epochs=2, lr=0.3, batch_size=9, generator=torch.Generator()
    )
    embedding = nn.Embedding.from_pretrained(parameters["embedding"].clone(), freeze=False)
    network = nn.Sequential(embedding, nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    network[1].load_state_dict({name: parameters[f"hidden.{name}"] for name in ("weight", "bias")})
    network[3].load_state_dict({name: parameters[f"output.{name}"] for name in ("weight", "bias")})
    optimizer = torch.optim.SGD(network.parameters(), lr=0.3)
    for _ in range(2):
        optimizer.zero_grad()
        distances = (sent.unsqueeze(1) - network(torch.arange(3))).square().sum(2).sqrt()
        odds = torch.exp(-distances - 0.5 * nn.functional.one_hot(labels, 3))
        (-(odds[range(5), labels] / odds.sum(1)).log().mean()).backward()
        optimizer.step()
    torch.testing.assert_close(equations.prototypes_of(found), network(torch.arange(3)).detach())


def test_logits_are_distances():
    class Own(nn.Module):
        def forward(self, x):
            return Outputs(x, x)

    features, logits = PrototypeModel(Own(), torch.tensor([[1.0, 1.0], [0.0, 2.0]]))(torch.tensor([[1.0, 3.0]]))
    assert features.tolist() == [[1.0, 3.0]]
    assert logits.tolist() == [[-2.0, -1.0]]


# --- whole runs -------------------------------------------------------------------------------------------------


def test_no_model_travels_and_prototypes_do(go):
    result = go("fedtgp", **SKEWED)
    ledger = committed(result).ledger["by_plugin"]
    assert not any(ledger.get("model", {}).values())
    up, down = 10 * (4 * 64 + 1), 10 * 4 * 64
    assert [record["bytes"]["by_plugin"]["fedtgp"]["up"] for record in records(result)] == [3 * up] * 2
    assert [record["bytes"]["by_plugin"]["fedtgp"]["down"] for record in records(result)] == [0, 3 * down]


def test_the_state_holds_the_servers_parameters_and_prototypes_alone(go):
    state = plugin_state(go("fedtgp", **SKEWED), "fedtgp")
    parameters = {name.removeprefix("tgp."): t for name, t in state.items() if name.startswith("tgp.")}
    assert set(state) == {"prototypes", *(f"tgp.{name}" for name in parameters)}
    torch.testing.assert_close(state["prototypes"], equations.prototypes_of(parameters))


def test_lambda_0_trains_as_solo_to_the_bit(go):
    tgp, solo = go({"fedtgp": {"lambda": 0.0}}, **SKEWED), go("solo", **SKEWED)
    assert all(same_tensors(personal_state(tgp, client), personal_state(solo, client)) for client in range(3))


def test_terms_start_with_the_second_round(go):
    losses = [sorted(record["losses"]) for record in records(go("fedtgp", **SKEWED))]
    assert losses == [["task"], ["fedtgp.prototypes", "task"]]


@pytest.mark.slow
def test_every_option_changes_the_trajectory(go):
    changes = [{}, {"lambda": 0.1}, {"threshold": 0.0}, {"server_epochs": 1}, {"server_lr": 0.5}]
    changes += [{"server_batch_size": 3}]
    found = [go({"fedtgp": change}, **SKEWED) for change in changes]
    bits = {str(sorted((n, t.sum().item()) for n, t in personal_state(result, 0).items())) for result in found}
    assert len(bits) == len(changes)
    assert len({model_bytes(result) for result in found}) == 1, "nothing is averaged"


@pytest.mark.parametrize("other", ["solo", "fedprox", "ditto"])
def test_what_cannot_be_combined_is_refused(go, other):
    with raises(PluginConflictError, other):
        go("fedtgp", other)


@pytest.mark.slow
def test_clients_learn_their_digits(go):
    result = go("fedtgp", **SKEWED, rounds=4, local_epochs=2, batch_size=16)
    assert result.metrics["personal"]["accuracy"] > 0.8
