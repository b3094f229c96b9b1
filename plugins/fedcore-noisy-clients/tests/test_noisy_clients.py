"""Noise on inputs and labels: against NumPy, the same in all rounds, and clean where the model is evaluated."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedcore import Plugin, generator, hookimpl
from fedcore_noisy_clients import noisy_inputs, wrong_labels
from fedcore_testing import federations
from tests.sentences import raises

SEEN: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
go = federations(batch_size=16, samples=400, clients=4, participation=1.0, rounds=2, partition="iid", seed=3)


class Sees(Plugin):
    """Notes what clients train on, by round and client."""

    @hookimpl
    def local_samples(self, client, samples):
        everything = torch.arange(len(samples))
        SEEN[client.round, client.id] = samples.inputs(everything), samples.labels


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_noise_has_its_deviation():
    clean = torch.full((4000, 3, 2), 5.0)
    noise = (noisy_inputs(clean, 0.3, stream()) - clean).double().numpy()
    np.testing.assert_allclose(noise.std(), 0.3, rtol=0.02)
    np.testing.assert_allclose(noise.mean(), 0.0, atol=0.01)


def test_tokens_have_no_noise():
    with raises(ValueError, "noisy-clients.inputs=0"):
        noisy_inputs(torch.ones(3, 4, dtype=torch.int64), 0.1, stream())


@pytest.mark.parametrize(("rho", "tau"), [(0.4, 0.0), (0.4, 0.5), (1.0, 1.0), (0.0, 0.5)])
def test_the_shares_of_wrong_labels_are_those_of_fedcorr(rho, tau):
    labels = torch.arange(10).repeat(100)
    wrong = np.array(
        [(wrong_labels(labels, 10, rho, tau, stream(seed)) != labels).float().mean() for seed in range(600)]
    )
    noisy = wrong > 0
    np.testing.assert_allclose(noisy.mean(), rho, atol=0.05)
    # A label that is drawn anew is right once in ten times.
    np.testing.assert_allclose(wrong[noisy].mean() if noisy.any() else 0, 0.9 * (1 + tau) / 2 * (rho > 0), atol=0.04)
    assert not noisy.any() or wrong[noisy].min() >= 0.9 * tau - 0.05


def test_each_client_has_its_own_noise_in_all_rounds(go):
    SEEN.clear()
    go(Sees)
    clean = dict(SEEN)
    go(("noisy-clients", {"inputs": 0.4, "labels": 0.5, "least": 0.2}), Sees)
    wrong = 0
    for client in range(4):
        (inputs, labels), later = SEEN[0, client], SEEN[1, client]
        assert torch.equal(inputs, later[0])
        assert torch.equal(labels, later[1])
        noise = inputs - clean[0, client][0]
        assert noise.std().item() == pytest.approx(0.4 * (client + 1) / 4, rel=0.05)
        wrong += not torch.equal(labels, clean[0, client][1])
    assert 0 < wrong < 4


def test_a_client_is_noisy_or_not_whatever_the_number_of_clients():
    labels = torch.zeros(50, dtype=torch.int64)
    found = [wrong_labels(labels, 10, 0.5, 0.3, generator(7, "noisy-clients/labels", client=k)) for k in range(20)]
    noisy = [bool(each.any()) for each in found]
    assert 4 <= sum(noisy) <= 16


def test_more_noise_costs_accuracy(go):
    clean = go().metrics["global"]["accuracy"]
    noisy = go(("noisy-clients", {"inputs": 0.0, "labels": 1.0, "least": 1.0})).metrics["global"]["accuracy"]
    assert noisy < clean - 0.2
