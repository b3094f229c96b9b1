"""Which samples a client trains on and holds out, and the digest of that."""

import pytest
import torch

from fedcore.data import Partition
from tests.data.labelled import DATASET, make_dataset, partitioned


def test_holdout_is_disjoint_by_class_and_of_the_asked_size():
    partition, whole = partitioned(), partitioned(client_test_fraction=0.0)
    labels = DATASET.train.labels
    for train, test, both in zip(partition.train, partition.test, whole.train, strict=True):
        assert torch.equal(torch.cat([train, test]).sort().values, both.sort().values)
        per_class, held = (torch.bincount(labels[i], minlength=10) for i in (both, test))
        assert ((held - 0.25 * per_class).abs() < 1).all()  # by class: never off by a whole sample
        assert (held[per_class == 1] == 0).all()
        assert abs(len(test) - 0.25 * len(both)) <= 0.5 or (held == per_class - 1)[held < per_class].all()
    assert all(len(test) == 0 for test in whole.test)


@pytest.mark.parametrize("fraction", [0.01, 0.5, 0.99])
def test_every_client_keeps_training_samples(fraction):
    partition = partitioned(make_dataset(30), clients=30, partition="iid", client_test_fraction=fraction)
    assert all(len(train) == 1 for train in partition.train)
    larger = partitioned(client_test_fraction=fraction)
    for train, test in zip(larger.train, larger.test, strict=True):
        labels = DATASET.train.labels
        assert set(labels[test].tolist()) <= set(labels[train].tolist())


def test_few_samples_are_dealt_class_by_class():
    """Of 600 samples 90 are dealt, each class with its share, whoever holds them; others by another seed."""
    labels = DATASET.train.labels
    few = partitioned(samples=90, clients=3)
    dealt = torch.cat([*few.train, *few.test])
    assert len(dealt) == len(dealt.unique()) == 90
    share = torch.bincount(labels[dealt], minlength=10) - 0.15 * torch.bincount(labels, minlength=10)
    assert (share.abs() < 1).all()
    assert few.info["samples"] == 90
    other = partitioned(samples=90, clients=3, seed=4)
    assert set(dealt.tolist()) != set(torch.cat([*other.train, *other.test]).tolist())
    assert partitioned(samples=600).sha256 == partitioned().sha256
    assert "samples" not in partitioned().info


def test_each_clients_holdout_has_a_stream_of_its_own():
    dataset = make_dataset(classes=1)
    split, whole = (partitioned(dataset, partition="iid", client_test_fraction=f) for f in (0.25, 0.0))
    places = {
        tuple(torch.isin(both, test).nonzero().flatten().tolist())
        for both, test in zip(whole.train, split.test, strict=True)
    }
    assert len(places) == 10


def test_same_seed_same_hash_other_seed_other_hash():
    assert partitioned().sha256 == partitioned().sha256
    assert len({partitioned().sha256, partitioned(seed=4).sha256, partitioned(client_test_fraction=0.0).sha256}) == 3


def test_hash_sees_lists_their_order_and_their_borders_only():
    a, b, none = torch.tensor([0, 1]), torch.tensor([2]), torch.tensor([], dtype=torch.int64)
    base = Partition([a, b], [none, none], {})
    different = [
        Partition([b, a], [none, none], {}),
        Partition([a.flip(0), b], [none, none], {}),
        Partition([torch.tensor([0]), torch.tensor([1, 2])], [none, none], {}),
        Partition([a, b], [torch.tensor([3]), none], {}),
    ]
    assert Partition([a, b], [none, none], {"seed": 5}).sha256 == base.sha256
    assert len({base.sha256, *(p.sha256 for p in different)}) == 5


def test_class_counts():
    labels = torch.tensor([0, 0, 1, 2, 2, 2])
    none = torch.tensor([], dtype=torch.int64)
    partition = Partition([torch.tensor([0, 3]), torch.tensor([1, 2, 5])], [torch.tensor([4]), none], {})
    assert partition.class_counts(labels, 4).tolist() == [[1, 0, 1, 0], [1, 1, 1, 0]]
