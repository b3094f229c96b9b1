"""Assigning samples to clients: what cannot work is refused."""

import warnings

import numpy as np
import pytest
import torch

from fedcore.base.errors import ConfigError, PluginContractError
from fedcore.data import PartitionWarning
from fedcore.data.assign import public_rows
from tests.data.labelled import DATASET, partitioned, with_labels
from tests.sentences import raises


def test_more_samples_than_there_are():
    with raises(ConfigError, "--samples", "601", "600"):
        partitioned(samples=601)
    with raises(ConfigError, "--samples", "600", "540"):
        partitioned(samples=600, public="0.1")
    with raises(ConfigError, "10", "9"):
        partitioned(samples=9)


RARE = torch.cat([torch.arange(50).repeat_interleave(2), torch.full((1000,), 50)])
"""50 classes of two samples, and one of a thousand."""


@pytest.mark.parametrize("dataset", [DATASET, with_labels(RARE), with_labels(torch.arange(600))])
@pytest.mark.parametrize("samples", [100, 590, 591, 595, 599, 600])
def test_as_many_samples_as_asked_for(dataset, samples):
    partition = partitioned(dataset, partition="iid", samples=samples, client_test_fraction=0.0)
    assert len(partition.train.positions) == samples


@pytest.mark.parametrize("samples", [590, 600])
def test_fewer_samples_are_still_of_all_classes(samples):
    """The small classes give less than their share, so that more are drawn from the large one; each keeps a sample."""
    partition = partitioned(with_labels(RARE), partition="iid", samples=samples, client_test_fraction=0.0)
    assert RARE[partition.train.positions].unique().tolist() == list(range(51))


EVEN = with_labels(torch.arange(10).repeat(5000))


@pytest.mark.parametrize(
    ("imbalance", "sizes"),
    [
        (100, [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]),  # CIFAR-10-LT
        (10, [5000, 3871, 2997, 2320, 1796, 1391, 1077, 834, 645, 500]),
        (1, [5000] * 10),
    ],
)
def test_a_long_tail_has_the_sizes_of_the_literature(imbalance, sizes):
    partition = partitioned(EVEN, partition="iid", imbalance=imbalance, client_test_fraction=0.0)
    assert EVEN.train.labels[partition.train.positions].bincount().tolist() == sizes
    assert partition.info.get("imbalance", 1) == imbalance


def test_a_long_tail_is_drawn_from_the_seed():
    drawn = [partitioned(EVEN, imbalance=50, seed=seed).train.positions.sort().values for seed in (1, 2, 1)]
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


def test_a_class_that_is_smaller_than_its_place_in_the_tail_keeps_all():
    dataset = with_labels(torch.tensor([0] * 9 + [1] * 90 + [2]))
    partition = partitioned(dataset, partition="iid", imbalance=10, clients=2, client_test_fraction=0.0)
    assert dataset.train.labels[partition.train.positions].bincount().tolist() == [9, 28, 1]
    one = with_labels(torch.zeros(20, dtype=torch.int64))
    assert len(partitioned(one, partition="iid", imbalance=10, client_test_fraction=0.0).train.positions) == 20


def overlapping(labels, num_clients, **_):
    return [np.array([0, 1])] * num_clients


def too_few(labels, num_clients, **_):
    return [np.arange(len(labels))]


def outside(labels, num_clients, **_):
    return [np.array([len(labels) + i]) for i in range(num_clients)]


@pytest.mark.parametrize("partitioner", [overlapping, too_few, outside])
def test_a_partitioner_that_breaks_its_contract(monkeypatch, partitioner):
    monkeypatch.setattr("fedcore.data.assign.resolve", lambda kind, name: partitioner)
    with raises(PluginContractError):
        partitioned(partition="mine")


def test_a_partitioners_notes_are_kept_and_other_warnings_passed_on(monkeypatch):
    def warns(labels, num_clients, **_):
        warnings.warn("half are empty", PartitionWarning, stacklevel=1)
        warnings.warn("overflow", RuntimeWarning, stacklevel=1)
        return list(np.array_split(np.arange(len(labels)), num_clients))

    monkeypatch.setattr("fedcore.data.assign.resolve", lambda kind, name: warns)
    with pytest.warns(RuntimeWarning, match="overflow") as told:
        partition = partitioned(partition="mine")
    assert (len(told), partition.info["notes"]) == (1, ["half are empty"])


@pytest.mark.parametrize("leaving_out", [{}, {"samples": 300}, {"public": 0.3}, {"imbalance": 5.0}])
def test_a_partitioner_gets_the_data_set_and_the_rows_of_its_labels(monkeypatch, leaving_out):
    seen = []

    def by_row(labels, num_clients, *, dataset, rows, **_):
        seen.append((dataset, rows))
        assert (dataset.train.labels.numpy()[rows] == labels).all()
        return list(np.array_split(np.arange(len(labels)), num_clients))

    monkeypatch.setattr("fedcore.data.assign.resolve", lambda kind, name: by_row)
    partition = partitioned(partition="mine", client_test_fraction=0.0, **leaving_out)
    dataset, rows = seen[0]
    assert dataset is DATASET
    assert torch.cat(list(partition.train)).tolist() == rows.tolist()
    assert not set(rows.tolist()) & set(public_rows(DATASET, str(leaving_out.get("public")), 3).tolist())
