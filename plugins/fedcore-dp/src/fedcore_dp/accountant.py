"""The epsilon of rounds of Gaussian noise, by privacy loss distributions or by Renyi divergences (dp-accounting)."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedcore import ServerContext

Accountant = Literal["pld", "rdp"]

ORDERS = (*(1 + tenths / 10 for tenths in range(1, 110)), *range(12, 65), 80, 96, 128, 192, 256, 512)
"""Orders of the Renyi divergence, the best of which is taken. A small epsilon needs the high ones."""

ROUNDS = "rounds"
"""The number of rounds whose cohorts are counted, in the server's state."""

LARGEST_LOSS = 1e3
"""Where the loss of all rounds may be larger, its distribution can take much memory."""


@functools.lru_cache(maxsize=4096)
def spent_epsilon(
    noise_multiplier: float, sampling_rate: float, rounds: int, delta: float, accountant: Accountant = "pld"
) -> float:
    """Return epsilon at ``delta`` after so many rounds of the (Poisson-sampled) Gaussian mechanism; may be infinite.

    :param noise_multiplier: standard deviation of the noise over the sensitivity of the sum that it is added to, > 0.
    :param sampling_rate: chance that one's data is in a round, each by itself; 1 is all data in every round.
    :param rounds: 0 has spent nothing.
    :param accountant: ``pld``: privacy loss distributions, rounded up; exact without sampling. ``rdp``: Renyi
        divergences, an upper bound that is further away, and that ``pld`` takes above ``LARGEST_LOSS``.
    """
    if rounds == 0:
        return 0.0
    largest = 1 / (2 * noise_multiplier**2) + 7 / noise_multiplier  # of one round
    reach = largest * max(1.0, rounds * sampling_rate**2 + math.sqrt(rounds) * sampling_rate)
    if accountant == "rdp" or (sampling_rate < 1 and reach > LARGEST_LOSS):
        return renyi_epsilon(noise_multiplier, sampling_rate, rounds, delta)
    if sampling_rate == 1:
        return gaussian_epsilon(noise_multiplier, rounds, delta)
    return loss_distribution_epsilon(noise_multiplier, sampling_rate, rounds, delta)


def gaussian_epsilon(noise_multiplier: float, rounds: int, delta: float) -> float:
    """Return the exact epsilon without sampling, where T rounds of multiplier z are one of z / sqrt(T).

    :source: Balle, Wang, ICML 2018, arXiv 1805.06530, Theorem 8.
    """
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    with np.errstate(divide="ignore"):  # log(0) on the way to a very large epsilon
        return float(get_epsilon_gaussian(noise_multiplier / math.sqrt(rounds), delta))


def loss_distribution_epsilon(noise_multiplier: float, sampling_rate: float, rounds: int, delta: float) -> float:
    """Return epsilon from the distribution of the privacy loss, on a grid; losses are rounded so that the bound holds.

    :source: Koskela, Jaelkoe, Honkela, AISTATS 2020, arXiv 1906.03049; Doroshenko, Ghazi, Kamath, Kumar, Manurangsi,
        PoPETs 2022, arXiv 2207.04380.
    """
    composed = _losses(noise_multiplier, sampling_rate).self_compose(rounds)
    return float(composed.get_epsilon_for_delta(delta))


@functools.lru_cache(maxsize=64)
def _losses(noise_multiplier: float, sampling_rate: float) -> Any:
    """Return the distribution of one round's loss, on a grid of about a hundredth of a usual loss."""
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    grid = min(1e-3, max(1e-4, sampling_rate / noise_multiplier / 100))
    return from_gaussian_mechanism(noise_multiplier, sampling_prob=sampling_rate, value_discretization_interval=grid)


def renyi_epsilon(noise_multiplier: float, sampling_rate: float, rounds: int, delta: float) -> float:
    """Return epsilon from the Renyi divergences of the rounds, at the best order.

    :source: Mironov, CSF 2017, arXiv 1702.07476; Mironov, Talwar, Zhang, 2019, arXiv 1908.10530; converted as in
        Canonne, Kamath, Steinke, NeurIPS 2020, arXiv 2004.00010, Proposition 12.
    """
    from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

    with _quiet():  # about a best order at the end of the range; the bound holds all the same
        one = _divergences(noise_multiplier, sampling_rate)
        epsilon, _ = compute_epsilon(ORDERS, [rounds * value for value in one], delta)
    return max(0.0, float(epsilon))


@functools.lru_cache(maxsize=64)
def _divergences(noise_multiplier: float, sampling_rate: float) -> tuple[float, ...]:
    """Return one round's Renyi divergence at each order; infinite where the library's series does not converge."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    one = RdpAccountant(ORDERS)
    one.compose(PoissonSampledDpEvent(sampling_rate, GaussianDpEvent(noise_multiplier)))
    return tuple(float(value) for value in one.rdp)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the library's warnings about single orders."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def spent_by(
    accountant: Accountant, noise_multiplier: float, sampling_rate: float, rounds: int, delta: float
) -> dict[str, float]:
    """Return epsilon by name: that of the accountant, and next to PLD's the one of the Renyi accountant."""
    spent = {"epsilon": spent_epsilon(noise_multiplier, sampling_rate, rounds, delta, accountant)}
    if accountant == "pld":
        spent["epsilon_rdp"] = spent_epsilon(noise_multiplier, sampling_rate, rounds, delta, "rdp")
    return spent


def count_cohort(server: ServerContext, name: str) -> None:
    """Count the cohort under a name of the server's state, (N,) int64: every client that is asked to train may send."""
    if name not in server.state:
        server.state[name] = torch.zeros(server.num_clients, dtype=torch.int64)
    server.state[name][server.cohort] += 1
    server.state[ROUNDS] = server.state.get(ROUNDS, 0) + 1


def counts_of(server: ServerContext, name: str) -> Tensor:
    """Return how often each client may have sent in the rounds so far, (N,) int64, from :func:`count_cohort`.

    A round without an accepted update keeps no count, but its clients may have sent. It counts for all clients.
    """
    counts: Tensor = server.state.get(name, torch.zeros(server.num_clients, dtype=torch.int64))
    counted: int = server.state.get(ROUNDS, 0)
    return counts + (server.round + 1 - counted)


def privacy_report(spent: dict[str, float], delta: float, *, seeded: bool) -> dict[str, Any]:
    """Return a record's figures of the privacy spent, in which an infinite epsilon is None.

    >>> privacy_report({"epsilon": math.inf}, 0.1, seeded=True)
    {'epsilon': None, 'delta': 0.1, 'noise': 'seeded'}
    """
    shown = {name: epsilon if math.isfinite(epsilon) else None for name, epsilon in spent.items()}
    return {"epsilon": None, **shown, "delta": delta, "noise": "seeded" if seeded else "secure"}
