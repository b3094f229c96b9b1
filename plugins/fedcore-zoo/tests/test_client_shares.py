"""Class shares drawn per client: hand cases, the distribution next to NumPy's, equal sizes, extreme numbers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcore import RunConfig
from fedcore.data import load_dataset, make_partition
from fedcore_zoo.client_shares import (
    MAX_REDRAWS,
    TOLERANCE,
    balanced_log_shares,
    log_shares,
    normalised,
    split_by_shares,
)
from tests.data.test_partitioners import partition

LABELS = np.repeat(np.arange(10), 600)
TINY = 1e-300


def rng(seed=0):
    return np.random.default_rng(seed)


def counts(labels, clients, alpha, seed=0):
    parts, notes = partition("dirichlet-clients", labels, clients, alpha, seed)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    return np.stack([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts]), notes


# --- shares ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shapes", [[0.01] * 10, [0.3, 0.7], [2.0, 5.0, 30.0], [0.05, 0.15, 4.0]])
def test_log_shares_have_the_distribution_of_numpys(shapes):
    shapes, number = np.array(shapes), 20_000
    ours, theirs = normalised(log_shares(shapes, number, rng(1))), rng(2).dirichlet(shapes, size=number)
    for moment in (lambda x: x, np.square, lambda x: x.max(axis=1), lambda x: x > 0.5):
        a, b = moment(ours), moment(theirs)
        error = np.sqrt((a.var(axis=0) + b.var(axis=0)) / number)
        assert (np.abs(a.mean(axis=0) - b.mean(axis=0)) <= 4.5 * error + 1e-12).all()
    expected = shapes / shapes.sum()
    np.testing.assert_allclose(ours.mean(axis=0), expected, atol=5 * np.sqrt(0.25 / number))


@pytest.mark.parametrize("alpha", [TINY, 1e-12, 1e-3, 1e12])
def test_no_concentration_makes_nan_or_a_row_of_zeros(alpha):
    shapes = np.full(10, alpha / 10)
    logs = log_shares(shapes, 5000, rng())
    assert np.isfinite(logs).all()
    shares = normalised(logs)
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    if alpha < 1e-3:
        assert (shares.max(axis=1) == 1).all()  # each client has one class ...
        assert np.bincount(shares.argmax(axis=1)).min() > 350  # ... any, as often as another
    if alpha > 1:
        np.testing.assert_allclose(shares, 0.1, atol=1e-4)


@pytest.mark.parametrize(("clients", "alpha"), [(20, 0.1), (20, 0.01), (50, 0.5), (100, 1.0), (20, TINY)])
def test_redraws_bring_the_mean_to_the_datas_shares(clients, alpha):
    p = np.array([0.05, 0.05, 0.1, 0.3, 0.2, 0.3])
    for seed in range(3):
        shares = normalised(balanced_log_shares(p, clients, alpha, rng(seed)))
        once = normalised(log_shares(alpha * p, clients, rng(seed)))
        distance, before = (np.square(each.mean(axis=0) - p).sum() for each in (shares, once))
        assert distance < before / 20
        assert distance < 100 * TOLERANCE


def test_redraws_end_and_draws_that_are_near_enough_are_kept(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "fedcore_zoo.client_shares.log_shares",
        lambda shapes, count, rng: calls.append(count) or log_shares(shapes, count, rng),
    )
    balanced_log_shares(np.full(10, 0.1), 3, TINY, rng())  # three clients of one class each never have ten
    assert len(calls) == 1 + MAX_REDRAWS
    calls.clear()
    balanced_log_shares(np.full(10_000, 1e-4), 3, 1.0, rng())  # bounded by the classes, too
    assert sum(calls) * 10_000 < 10_000_000
    calls.clear()
    balanced_log_shares(np.full(10, 0.1), 3, 1e12, rng())
    assert calls == [3]


# --- dealing --------------------------------------------------------------------------------------------------


def test_dealing_hand_case():
    """Client 0 asks for 6 of class 0, client 1 for 2; there are 4 = 3 + 1. Both fill up with class 1."""
    logs = np.log(np.array([[1.0, TINY], [1 / 3, 2 / 3]]))
    found, otherwise = split_by_shares(logs, np.array([6, 6]), np.array([4, 8]), rng())
    assert found.tolist() == [[3, 3], [1, 5]]
    assert otherwise == 4


def test_who_lacks_samples_takes_the_next_class_it_drew():
    """Both want class 0 alone, of which there is half; behind it they differ, beyond what a float can hold."""
    logs = np.array([[0.0, -2e5, -1e5], [0.0, -1e5, -2e5]])
    found, otherwise = split_by_shares(logs, np.array([4, 4]), np.array([4, 2, 2]), rng())
    assert found.tolist() == [[2, 0, 2], [2, 2, 0]]
    assert otherwise == 4


def test_rounding_is_right_on_average_and_by_less_than_one():
    logs, sizes = np.log(np.tile([0.17, 0.33, 0.5], (3000, 1))), np.full(3000, 5)
    found, _ = split_by_shares(logs, sizes, np.full(3, 15_000), rng())
    assert set(np.unique(found[:, 0])) == {0, 1}
    np.testing.assert_allclose(found.mean(axis=0), [0.85, 1.65, 2.5], atol=0.03)


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    weights=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    scale=st.sampled_from([0.0, 1.0, 100.0, 1e301]),
    seed=st.integers(0, 2**32),
)
def test_every_client_gets_its_number_and_every_class_is_dealt(sizes, weights, scale, seed):
    total, classes = sum(sizes), len(weights)
    class_sizes = rng(seed).multinomial(total, (np.array(weights) + 0.01) / (sum(weights) + 0.01 * classes))
    logs = -scale * rng(seed + 1).random((len(sizes), classes))
    found, otherwise = split_by_shares(logs, np.array(sizes), class_sizes, rng(seed))
    assert (found >= 0).all()
    assert found.sum(axis=1).tolist() == sizes
    assert (found.sum(axis=0) == class_sizes).all()
    assert 0 <= otherwise <= total


# --- the partitioner ------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("alpha", [TINY, 0.1, 0.5, 1e12])
@pytest.mark.parametrize("clients", [1, 7, 20, 77])
def test_sizes_are_equal(clients, alpha):
    table, _ = counts(LABELS, clients, alpha)
    assert table.sum(axis=1).max() - table.sum(axis=1).min() <= 1


def test_the_limits_of_alpha():
    table, notes = counts(LABELS, 20, TINY)
    assert ((table > 0).sum(axis=1) == 1).all()  # two clients for each of ten classes
    assert notes == []
    table, notes = counts(LABELS, 20, 1e12)
    assert table.max() - table.min() <= 2
    assert notes == []


def test_shares_are_those_of_clients_dirichlets():
    """Mean largest share and mean square of 200 clients beside NumPy's draws of Dirichlet(alpha * p)."""
    for alpha in (0.1, 0.5, 5.0):
        table = np.concatenate([counts(LABELS, 200, alpha, seed)[0] for seed in range(5)])
        shares = table / table.sum(axis=1, keepdims=True)
        theirs = rng(1).dirichlet(np.full(10, alpha / 10), size=20_000)
        for moment in (lambda x: x.max(axis=1), lambda x: np.square(x).sum(axis=1)):
            a, b = moment(shares), moment(theirs)
            assert abs(a.mean() - b.mean()) < 4 * a.std() / np.sqrt(len(a)) + 0.02  # 30 samples round the shares


def test_the_same_alpha_is_more_heterogeneous_than_dirichlets():
    def largest(name):
        parts, _ = partition(name, LABELS, 20, 0.5, 0)
        return np.mean([np.bincount(LABELS[part]).max() / len(part) for part in parts])

    assert largest("dirichlet-clients") > largest("dirichlet") + 0.1


def test_shares_that_cannot_be_are_reported():
    _, (note,) = counts(LABELS, 5, TINY)  # 5 clients want 1,200 of one class, which has 600
    assert "3000 of 6000 samples are of other classes than drawn" in note
    _, notes = counts(LABELS, 1, 0.1)
    assert notes == []


def test_a_partition_of_a_data_set_holds_out_and_has_its_hash():
    def made(seed):
        config = RunConfig(partition="dirichlet-clients", clients=20, alpha=0.1, client_test_fraction=0.1, seed=seed)
        return make_partition(load_dataset("digits", None), config)

    one, again, other = made(0), made(0), made(1)
    assert one.sha256 == again.sha256 != other.sha256
    sizes = one.train.sizes + one.test.sizes
    assert set(sizes.tolist()) <= {71, 72}
    assert set(one.test.sizes.tolist()) <= {6, 7, 8}
