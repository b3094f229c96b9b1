"""Splits by labels and by sizes: hand cases. What holds for any partitioner is in tests/data/test_partitioners.py."""

import numpy as np
import pytest

from fedcore import ConfigError
from tests.data.test_partitioners import LABELS, counts, partition
from tests.sentences import raises


def test_shards_are_two_runs_of_the_sorted_labels():
    labels = np.repeat(np.arange(10), 60)
    parts, _ = partition("shards", labels, 15, 0.5, 0)
    assert {len(part) for part in parts} == {40}
    assert ((counts(parts, labels) > 0).sum(axis=1) <= 2).all()
    assert (counts(parts, labels) % 20 == 0).all()  # 30 shards of 20; three make up a class
    three, _ = partition("shards", labels, 10, 0.5, 0, classes_per_client=3)
    assert (counts(three, labels) % 20 == 0).all()


@pytest.mark.parametrize(("clients", "k"), [(10, 2), (4, 3), (3, 4), (30, 1), (7, 10)])
def test_classes_gives_each_client_k_and_each_class_an_owner(clients, k):
    for seed in range(5):
        parts, notes = partition("classes", LABELS, clients, 0.5, seed, classes_per_client=k)
        table = counts(parts)
        assert ((table > 0).sum(axis=1) == k).all()
        assert (table.sum(axis=0) == np.bincount(LABELS)).all()
        for column in table.T:
            owners = column[column > 0]
            assert owners.max() - owners.min() <= 1
        assert notes == []


def test_classes_without_choice_are_spread_evenly():
    parts, _ = partition("classes", LABELS, 20, 0.5, 0, classes_per_client=1)
    assert ((counts(parts) > 0).sum(axis=0) == 2).all()


def test_owners_of_a_class_too_small_for_them_get_other_samples():
    labels = np.array([0] + [1] * 30)
    parts, notes = partition("classes", labels, 5, 0.5, 0, classes_per_client=1)
    assert sorted(map(len, parts)) == [1, 1, 1, 14, 14]  # two of class 0's three owners took one of class 1
    assert notes[0].startswith("classes: 2 clients")


def test_classes_nobody_owns_are_unused_and_reported():
    parts, notes = partition("classes", LABELS, 3, 0.5, 0, classes_per_client=2)
    owned = (counts(parts) > 0).sum(axis=0)
    assert owned.tolist().count(1) == 6  # no class twice while others have no owner
    unused = np.flatnonzero(owned == 0)
    assert len(notes) == 1
    assert ", ".join(map(str, unused)) in notes[0]
    assert str(int(np.isin(LABELS, unused).sum())) in notes[0]


def test_quantity_varies_sizes_but_not_classes():
    parts, _ = partition("quantity", LABELS, 10, 0.5, 3)
    sizes = np.array([len(part) for part in parts])
    assert sizes.min() >= 10
    assert sizes.max() > 4 * sizes.min()
    largest = counts(parts)[sizes.argmax()] / sizes.max()
    np.testing.assert_allclose(largest, np.bincount(LABELS) / 5000, atol=0.04)


def test_impossible_classes_per_client():
    with raises(ConfigError, "10"):
        partition("classes", LABELS, 10, 0.5, 0, classes_per_client=11)
