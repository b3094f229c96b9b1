"""Assigning samples to clients: what cannot work is refused."""

import numpy as np
import pytest
import torch

from fedcore.base.errors import ConfigError, PluginContractError
from tests.data.labelled import DATASET, partitioned


def test_more_samples_than_there_are():
    with pytest.raises(ConfigError, match="--samples is 601, but the data set has 600"):
        partitioned(samples=601)
    with pytest.raises(ConfigError, match="10 clients cannot each get one of 9 samples"):
        partitioned(samples=9)


@pytest.mark.parametrize("samples", [100, 590, 591, 595, 599, 600])
def test_as_many_samples_as_asked_for(samples):
    assert len(partitioned(samples=samples, client_test_fraction=0.0).train.positions) == samples


def test_numbers_that_cannot_work():
    for fraction in (-0.1, 1.0, float("nan")):
        with pytest.raises(ConfigError, match="client_test_fraction"):
            partitioned(client_test_fraction=fraction)
    with pytest.raises(ConfigError, match="clients"):
        partitioned(clients=0)


def overlapping(labels, num_clients, **_):
    return [np.array([0, 1])] * num_clients


def too_few(labels, num_clients, **_):
    return [np.arange(len(labels))]


def outside(labels, num_clients, **_):
    return [np.array([len(labels) + i]) for i in range(num_clients)]


@pytest.mark.parametrize("partitioner", [overlapping, too_few, outside])
def test_a_partitioner_that_breaks_its_contract(monkeypatch, partitioner):
    monkeypatch.setattr("fedcore.data.assign.resolve", lambda kind, name: partitioner)
    with pytest.raises(PluginContractError, match="invalid partition"):
        partitioned(partitioner="mine")


@pytest.mark.parametrize("leaving_out", [{}, {"samples": 300}, {"public": torch.arange(0, 600, 3)}])
def test_a_partitioner_gets_the_data_set_and_the_rows_of_its_labels(monkeypatch, leaving_out):
    seen = []

    def by_row(labels, num_clients, *, dataset, rows, **_):
        seen.append((dataset, rows))
        assert (dataset.train.labels.numpy()[rows] == labels).all()
        return list(np.array_split(np.arange(len(labels)), num_clients))

    monkeypatch.setattr("fedcore.data.assign.resolve", lambda kind, name: by_row)
    partition = partitioned(partitioner="mine", client_test_fraction=0.0, **leaving_out)
    dataset, rows = seen[0]
    assert dataset is DATASET
    assert torch.cat(list(partition.train)).tolist() == rows.tolist()
    assert not set(rows.tolist()) & set(leaving_out.get("public", torch.empty(0)).tolist())
