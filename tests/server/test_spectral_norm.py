"""Buffers whose mean is no such buffer: the singular vectors of spectral normalisation."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

from fedcore import Plugin, hookimpl


def network(normalise):
    def factory(num_classes):
        first, second = normalise(nn.Linear(64, 48)), normalise(nn.Linear(48, 32))
        return nn.Sequential(nn.Flatten(), first, nn.ReLU(), second, nn.ReLU(), nn.Linear(32, num_classes))

    return factory


def largest_singular_values(trained):
    trained.eval()(torch.zeros(1, 1, 8, 8))  # the older form computes its weight in forward
    return [float(torch.linalg.matrix_norm(trained[layer].weight.detach(), 2)) for layer in (1, 3)]


@pytest.mark.parametrize("normalise", [parametrizations.spectral_norm, spectral_norm])
def test_the_global_weights_have_the_singular_value_1(go, normalise):
    """Before, they had up to 37: the mean of the clients' unit vectors is shorter."""
    result = go(model=network(normalise), rounds=3, alpha=0.1, lr=0.1, local_epochs=3)
    assert largest_singular_values(result.network) == pytest.approx([1.0, 1.0], abs=0.05)
    for name, vector in result.network.state_dict().items():
        if name.endswith(("_u", "_v")):
            assert float(vector.norm()) == pytest.approx(1.0, abs=1e-3)


class LooksAtTheNextModel(Plugin):
    """Measures the model that a server optimizer starts from, such as FedDF's student."""

    @hookimpl
    def server_step(self, server, mean):
        server.state["values"] = largest_singular_values(server.network({**mean, **server.buffers}).encoder.base)

    @hookimpl
    def report(self, server):
        return dict(server.state)


class KeepsTheMeanOfSome(Plugin):
    """Keeps the mean of the first two updates, as a method of clusters does."""

    owns = ("*",)

    @hookimpl
    def aggregate(self, server, updates):
        server.state.update(server.mean_of(updates[:2]))
        server.state["values"] = largest_singular_values(server.network(dict(server.state)).encoder.base)

    @hookimpl
    def report(self, server):
        return {"values": server.state["values"]}


def test_the_mean_of_some_updates_has_the_singular_vectors_of_its_weights(go):
    """Before, the singular values of its network were 2.8 and 2.4."""
    options = {"alpha": 0.1, "lr": 0.1, "local_epochs": 3, "rounds": 1}
    result = go(KeepsTheMeanOfSome, model=network(parametrizations.spectral_norm), **options)
    assert result.history[-1]["report.keepsthemeanofsome.values"] == pytest.approx([1.0, 1.0], abs=0.05)


def test_a_server_step_sees_the_singular_vectors_of_the_mean(go):
    """Before, the singular values of its network were 5.8 and 5.2 there."""
    result = go(LooksAtTheNextModel, model=network(parametrizations.spectral_norm), alpha=0.1, lr=0.1, local_epochs=3)
    assert result.history[-1]["report.looksatthenextmodel.values"] == pytest.approx([1.0, 1.0], abs=0.05)
