"""Clipping, noise and accounting against NumPy, SciPy and figures by hand."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.optimize import brentq

from fedcore_dp import accountant, central, clip_factor, clipping, joint_norm, secure_normal, secure_uniform
from fedcore_dp.noise import seeded_normal


@pytest.mark.parametrize("module", [accountant, central, clipping], ids=lambda module: module.__name__)
def test_the_examples_hold(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize(("norm", "bound", "factor"), [(3.0, 4.0, 1.0), (5.0, 2.0, 0.4), (math.inf, 1.0, 0.0)])
def test_clip_factor(norm, bound, factor):
    assert clip_factor(norm, bound) == factor


def test_the_norm_is_that_of_all_tensors_as_one_vector_and_does_not_overflow():
    parts = [torch.randn(3, 4), torch.randn(5), torch.full((2,), 3e38)]
    joined = np.concatenate([part.double().numpy().ravel() for part in parts])
    assert joint_norm(parts) == pytest.approx(np.linalg.norm(joined), rel=1e-12)
    assert joint_norm([]) == 0.0


# --- noise -------------------------------------------------------------------------------------------------------


def draws(count):
    return {
        "secure": secure_normal((count,)).numpy(),
        "seeded": seeded_normal(torch.Generator().manual_seed(1))((count,)).numpy(),
    }


@pytest.mark.parametrize("source", ["secure", "seeded"])
def test_noise_is_standard_normal(source):
    """Bounds that a right source misses with a chance of less than one in a billion."""
    numbers = draws(200_000)[source]
    assert stats.kstest(numbers, "norm").pvalue > 1e-9
    assert abs(numbers.mean()) < 6.2 / math.sqrt(len(numbers))
    assert abs(numbers.var() - 1) < 6.2 * math.sqrt(2 / len(numbers))
    halves = numbers.reshape(2, -1)
    assert abs(np.corrcoef(halves)[0, 1]) < 6.2 / math.sqrt(halves.shape[1])


def test_the_four_that_make_one_are_not_found_again():
    """Neighbours and numbers half a tensor apart come from other bits."""
    numbers = secure_normal((4, 50_000)).numpy()
    lags = [np.corrcoef(numbers[i], numbers[j])[0, 1] for i in range(4) for j in range(i)]
    assert max(map(abs, lags)) < 6.2 / math.sqrt(numbers.shape[1])


def test_secure_noise_is_never_the_same_twice_and_seeded_noise_is():
    assert not torch.equal(secure_normal((8,)), secure_normal((8,)))
    assert np.array_equal(draws(8)["seeded"], draws(8)["seeded"])


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 5), ((1 << 20) + 3,)])
def test_shapes(shape):
    for source in (secure_normal, seeded_normal(torch.Generator())):
        numbers = source(shape)
        assert numbers.shape == shape
        assert numbers.dtype == torch.float64
        assert bool(torch.isfinite(numbers).all())


def test_uniform_numbers():
    numbers = secure_uniform(100_000)
    assert stats.kstest(numbers, "uniform").pvalue > 1e-9
    assert 0 <= min(numbers) <= max(numbers) < 1


# --- epsilon -----------------------------------------------------------------------------------------------------


def renyi_by_hand(z, rounds, delta):
    """The best order of rounds * a / (2 z^2), of many more orders than the accountant tries."""
    orders = np.linspace(1.0001, 400, 2_000_000)
    bound = rounds * orders / (2 * z**2) + np.log1p(-1 / orders) - (np.log(delta) + np.log(orders)) / (orders - 1)
    return float(bound.min())


def exact(z, rounds, delta):
    """Balle and Wang, ICML 2018, arXiv 1805.06530, Theorem 8; T rounds of multiplier z are one of z / sqrt(T)."""
    mu = math.sqrt(rounds) / z

    def excess(epsilon):
        return (
            stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu) - delta
        )

    return float(brentq(excess, 0, 500))


@pytest.mark.parametrize(("z", "rounds", "delta"), [(1.0, 1, 1e-5), (4.0, 1, 1e-5), (2.0, 25, 1e-3), (20.0, 100, 1e-6)])
def test_epsilon_without_sampling(z, rounds, delta):
    found = accountant.spent_epsilon(z, 1.0, rounds, delta)
    assert found == pytest.approx(renyi_by_hand(z, rounds, delta), rel=0.01)
    assert exact(z, rounds, delta) <= found <= 1.25 * exact(z, rounds, delta)


@pytest.mark.parametrize("rate", [0.01, 0.3, 1.0])
def test_epsilon_is_the_librarys_own(rate):
    from opacus.accountants import RDPAccountant  # takes a second, in each process that collects tests

    library = RDPAccountant()
    for _ in range(40):
        library.step(noise_multiplier=1.3, sample_rate=rate)
    own = library.get_epsilon(1e-4, alphas=list(accountant.ORDERS))
    assert accountant.spent_epsilon(1.3, rate, 40, 1e-4) == pytest.approx(own, rel=1e-12)
    assert own <= library.get_epsilon(1e-4)


def test_epsilon_is_above_the_tighter_accountants_and_near_it():
    from opacus.accountants import PRVAccountant

    library = PRVAccountant()
    for _ in range(50):
        library.step(noise_multiplier=1.0, sample_rate=0.1)
    tight = library.get_epsilon(1e-5)
    assert 0.99 * tight <= accountant.spent_epsilon(1.0, 0.1, 50, 1e-5) <= 1.3 * tight


def test_epsilon_grows_with_rounds_and_falls_with_noise_and_sampling():
    spent = accountant.spent_epsilon
    assert spent(1.0, 1.0, 0, 1e-5) == 0.0
    assert spent(1.0, 1.0, 1, 1e-5) < spent(1.0, 1.0, 2, 1e-5)
    assert spent(2.0, 1.0, 2, 1e-5) < spent(1.0, 1.0, 2, 1e-5)
    assert spent(1.0, 0.1, 2, 1e-5) < spent(1.0, 1.0, 2, 1e-5)
