"""Partitioners: hand cases, and what must hold for any labels and any seed."""

import sys
import time
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcore.base.errors import ConfigError, UnknownNameError
from fedcore.base.registry import resolve
from fedcore.data import PartitionWarning, capped_counts
from fedcore.data.partitioners import dirichlet, fill_up
from tests.sentences import raises, warns

ALL = ["iid", "dirichlet", "dirichlet-clients", "shards", "classes", "quantity"]
LABELS = np.random.default_rng(0).integers(0, 10, 5000)


def partition(name, labels, clients, alpha, seed, **options):
    """Return a partitioner's parts and its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PartitionWarning)
        parts = resolve("partitioner", name)(labels, clients, alpha=alpha, seed=seed, **options)
    return parts, [str(warning.message) for warning in caught]


def counts(parts, labels=LABELS):
    return np.stack([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])


def test_capping_hand_case():
    # Client 1 holds 9 + 8 = 17 >= 30 / 2 when class 2 is dealt, so it gets nothing of it.
    draws = np.array([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4]])
    assert capped_counts(np.array([10, 10, 10]), draws).tolist() == [[9, 1], [8, 2], [0, 10]]


def test_a_client_at_exactly_the_average_is_capped():
    draws = np.array([[0.5, 0.25, 0.25], [0.9, 0.05, 0.05]])
    # After class 0 client 0 has 6 = 18 / 3; the rest of class 1 is halved between the others.
    assert capped_counts(np.array([12, 6]), draws).tolist() == [[6, 3, 3], [0, 3, 3]]


def test_cuts_are_floored_sums_and_the_last_client_gets_the_rest():
    assert capped_counts(np.array([10]), np.array([[0.25, 0.25, 0.25, 0.25]])).tolist() == [[2, 3, 2, 3]]


@pytest.mark.parametrize("rest", [0.0, np.nan])
def test_underflowed_draws_lose_no_sample_and_make_no_nan(rest):
    draws = np.array([[1.0, rest, rest]] * 3)
    # Class 0 goes to client 0, which is then capped with nothing left for the others to share.
    draws[0] = [1, 0, 0]
    assert capped_counts(np.array([5, 5, 5]), draws).tolist() == [[5, 0, 0], [0, 5, 0], [0, 0, 5]]


def naive_dirichlet(labels, num_clients, alpha, rng, min_size=10):
    """MOON's partition_data, transcribed: lists of lists, one class at a time."""
    smallest = 0
    while smallest < min_size:
        lists = [[] for _ in range(num_clients)]
        for k in range(labels.max() + 1):
            positions = rng.permutation(np.where(labels == k)[0])
            q = rng.dirichlet(np.repeat(alpha, num_clients))
            q = np.array([p * (len(held) < len(labels) / num_clients) for p, held in zip(q, lists)])
            q = q / q.sum()
            cuts = (np.cumsum(q) * len(positions)).astype(int)[:-1]
            lists = [held + part.tolist() for held, part in zip(lists, np.split(positions, cuts))]
        smallest = min(map(len, lists))
    return lists


@pytest.mark.parametrize("alpha", [0.1, 0.5, 5.0])
def test_dirichlet_has_the_distribution_of_the_reference(alpha):
    # The streams differ, so compare averages over seeds: sizes' spread, and the share of the largest class.
    def summary(parts):
        table = counts(parts)
        return table.sum(axis=1).std(), (table.max(axis=1) / table.sum(axis=1)).mean()

    ours = np.array([summary(dirichlet(LABELS, 8, alpha=alpha, seed=s)) for s in range(60)])
    rng = np.random.default_rng(1)
    theirs = np.array([summary(naive_dirichlet(LABELS, 8, alpha, rng)) for _ in range(60)])
    error = np.sqrt((ours.var(axis=0) + theirs.var(axis=0)) / 60)
    assert (np.abs(ours.mean(axis=0) - theirs.mean(axis=0)) < 4 * error).all()


def test_dirichlet_redraws_until_everybody_has_the_minimum():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(10):  # one draw in about twenty is good enough
            sizes = [len(p) for p in dirichlet(LABELS, 10, alpha=0.3, seed=seed, min_size=350)]
            assert min(sizes) >= 350
            assert sum(sizes) == 5000


def test_hopeless_dirichlet_ends_fills_up_and_says_so():
    with warns(PartitionWarning):
        parts = dirichlet(LABELS, 50, alpha=1e-4, seed=0)
    sizes = [len(part) for part in parts]
    assert min(sizes) == 10
    assert sorted(np.concatenate(parts)) == list(range(5000))


def test_minimum_that_cannot_be_is_lowered_and_reported():
    parts, notes = partition("dirichlet", LABELS[:45], 10, 0.5, 0)
    assert min(map(len, parts)) == 4
    assert any("lowered to 4" in note for note in notes)


def test_fill_up_levels_the_largest_and_touches_nobody_else():
    owner = np.repeat([0, 1, 2, 3, 4], [20, 18, 5, 1, 0])
    before = owner.copy()
    assert fill_up(owner, 5, 5, np.random.default_rng(0)) == 9
    sizes = np.bincount(owner)
    assert sorted(sizes[:2]) == [14, 15]
    assert sizes[2:].tolist() == [5, 5, 5]
    assert (owner[before == 2] == 2).all()
    assert (owner[before == 3] == 3).all()


def test_iid_sizes_and_classes_are_even():
    parts, _ = partition("iid", LABELS, 7, 0.5, 0)
    assert {len(part) for part in parts} == {714, 715}
    assert counts(parts).min() > 40


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(ALL),
    labels=st.lists(st.integers(0, 6), min_size=1, max_size=120),
    share=st.floats(0, 1),
    alpha=st.floats(1e-300, 1e6),
    k=st.integers(1, 7),
    seed=st.integers(0, 2**40),
)
def test_every_sample_once_nobody_empty_same_seed_same_parts(name, labels, share, alpha, k, seed):
    labels = np.array(labels)
    clients = 1 + int(share * (len(labels) - 1))
    k = min(k, len(np.unique(labels)))
    parts, notes = partition(name, labels, clients, alpha, seed, classes_per_client=k, min_size=3)
    again, _ = partition(name, labels, clients, alpha, seed, classes_per_client=k, min_size=3)
    assert len(parts) == clients
    assert min(map(len, parts)) >= 1
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    everything = np.sort(np.concatenate(parts))
    if any("unused" in note for note in notes):
        assert len(np.unique(everything)) == len(everything) < len(labels)
    else:
        assert np.array_equal(everything, np.arange(len(labels)))
    if name in ("dirichlet", "quantity"):
        assert min(map(len, parts)) >= min(3, len(labels) // clients)


@pytest.mark.parametrize("name", ALL)
def test_seeds_matter_and_order_is_random(name):
    one, _ = partition(name, LABELS, 10, 0.5, 1)
    two, _ = partition(name, LABELS, 10, 0.5, 2)
    assert not all(np.array_equal(np.sort(a), np.sort(b)) for a, b in zip(one, two, strict=True))
    assert not np.array_equal(one[0], np.sort(one[0]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_a_hundred_thousand_clients_take_seconds(name):
    labels = np.random.default_rng(0).integers(0, 10, 1_000_000)
    started = time.perf_counter()
    parts, _ = partition(name, labels, 100_000, 0.5, 0)
    assert time.perf_counter() - started < 30  # 2 s here; a loop over clients and classes takes minutes
    assert len(np.unique(np.concatenate(parts))) == 1_000_000


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("clients", [0, -1, 5001])
def test_impossible_numbers_of_clients(name, clients):
    with raises(ConfigError):
        partition(name, LABELS, clients, 0.5, 0)


@pytest.mark.parametrize("name", ["dirichlet", "dirichlet-clients", "quantity"])
@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_alpha(name, alpha):
    with raises(ConfigError):
        partition(name, LABELS, 10, alpha, 0)


def test_unknown_partitioner():
    with raises(UnknownNameError):
        partition("dirichelt", LABELS, 10, 0.5, 0)


def test_the_package_of_a_foreign_partitioner_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    with raises(ConfigError, "'fedcore-flower[partitioners]'"):
        partition("flwr:iid", np.arange(8) % 2, 2, 1.0, 0)
