"""NIID-Bench's split: its public code, transcribed, draws the same."""

import numpy as np
import pytest

from fedcore import ConfigError
from tests.data.test_partitioners import LABELS, naive_dirichlet, partition
from tests.sentences import raises


@pytest.mark.parametrize(("clients", "alpha", "seed"), [(10, 0.5, 0), (8, 0.1, 3), (20, 5.0, 2)])
def test_it_is_the_split_of_the_public_code_sample_by_sample(clients, alpha, seed):
    rng = np.random.RandomState(seed)
    theirs = naive_dirichlet(LABELS, clients, alpha, rng)
    for held in theirs:
        rng.shuffle(held)
    ours, notes = partition("niid-bench", LABELS, clients, alpha, seed)
    assert [part.tolist() for part in ours] == theirs
    assert not notes


def test_sizes_on_cifar10():
    """Ten classes of 5,000: the sizes that MOON's public code deals with init_seed 0, beta 0.5."""
    parts, _ = partition("niid-bench", np.repeat(np.arange(10), 5000), 10, 0.5, 0)
    assert [len(part) for part in parts] == [5307, 3688, 4435, 5047, 5189, 3803, 5202, 4325, 8078, 4926]


def test_it_deals_classes_that_nobody_holds_as_the_public_code_does():
    labels = np.where(LABELS == 4, 5, LABELS)
    rng = np.random.RandomState(1)
    theirs = naive_dirichlet(labels, 5, 0.5, rng)
    ours, _ = partition("niid-bench", labels, 5, 0.5, 1)
    assert [sorted(part) for part in ours] == [sorted(part) for part in theirs]


def test_it_refuses_what_the_public_code_has_no_split_for():
    with raises(ConfigError, "1000", "50", "--partition"):
        partition("niid-bench", LABELS, 50, 1e-2, 0)
    with raises(ConfigError, "2", "32", "4294967296"):
        partition("niid-bench", LABELS, 5, 0.5, 1 << 32)
