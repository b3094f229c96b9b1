"""Assigning samples to clients: what cannot work is refused."""

import numpy as np
import pytest
import torch

from fedcore.base.errors import ConfigError, PluginContractError
from fedcore.data import Dataset, ResidentSamples, make_partition


def make_dataset(n=600, classes=10, seed=0, name="toy"):
    labels = torch.from_numpy(np.random.default_rng(seed).integers(0, classes, n))
    samples = ResidentSamples(torch.zeros(n, 1, 2, 2), labels, (0.0,), (1.0,))
    return Dataset(name, samples, samples, classes, (1, 2, 2))


DATASET = make_dataset()


def make(dataset=DATASET, **changes):
    arguments = {
        "partitioner": "dirichlet",
        "clients": 10,
        "alpha": 0.5,
        "classes_per_client": 2,
        "client_test_fraction": 0.25,
        "seed": 3,
    }
    return make_partition(dataset, **(arguments | changes))


def test_more_samples_than_there_are():
    with pytest.raises(ConfigError, match="--samples is 601, but the data set has 600"):
        make(samples=601)
    with pytest.raises(ConfigError, match="10 clients cannot each get one of 9 samples"):
        make(samples=9)


def test_numbers_that_cannot_work():
    for fraction in (-0.1, 1.0, float("nan")):
        with pytest.raises(ConfigError, match="client_test_fraction"):
            make(client_test_fraction=fraction)
    with pytest.raises(ConfigError, match="clients"):
        make(clients=0)


def overlapping(labels, num_clients, **_):
    return [np.array([0, 1])] * num_clients


def too_few(labels, num_clients, **_):
    return [np.arange(len(labels))]


def outside(labels, num_clients, **_):
    return [np.array([len(labels) + i]) for i in range(num_clients)]


@pytest.mark.parametrize("partitioner", [overlapping, too_few, outside])
def test_a_partitioner_that_breaks_its_contract(monkeypatch, partitioner):
    monkeypatch.setattr("fedcore.data.partitioners.resolve", lambda kind, name: partitioner)
    with pytest.raises(PluginContractError, match="invalid partition"):
        make(partitioner="mine")
