"""Microsoft's PRV accountant: lower and upper bounds of epsilon."""

from __future__ import annotations

import math

from cases import Fixture
from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant

C = Fixture(
    "prv_accountant",
    "prv-accountant",
    "prv-accountant",
    source="run of the library's accountant; its test's exact deltas",
)
for noise, rate, rounds, delta in (
    (0.8, 5e-3, 1000, 1e-6),
    (1.0, 0.01, 1000, 1e-5),
    (0.9, 256 / 100000, 4900, 1e-5),
    (2.0, 0.2, 500, 1e-6),
):
    made = PRVAccountant(
        prvs=[PoissonSubsampledGaussianMechanism(rate, noise)],
        max_self_compositions=[rounds],
        eps_error=0.02,
        delta_error=delta * 1e-3,
    )
    low, _, high = made.compute_epsilon(delta, [rounds])
    C.add(
        "PLD epsilon",
        f"between its bounds: z {noise}, q {rate:g}, {rounds} rounds, delta {delta}",
        "epsilon",
        (low + high) / 2,
        noise=noise,
        rate=rate,
        rounds=rounds,
        delta=delta,
        tolerance=(high - low) / 2,
        relative=0.0,
    )


def phi(x: float) -> float:
    """Return the normal distribution's function, exact in its tail too."""
    return math.erfc(-x / math.sqrt(2)) / 2


for rounds, epsilon in ((9999, 0.1), (10000, 1.0), (10000, 10.0)):
    mu = math.sqrt(rounds) / 100
    delta = phi(-epsilon / mu + mu / 2) - math.exp(epsilon) * phi(-epsilon / mu - mu / 2)
    C.add(
        "PLD epsilon",
        f"test_accountant: Gaussian, z 100, {rounds} rounds, epsilon {epsilon}",
        "epsilon",
        epsilon,
        noise=100.0,
        rate=1.0,
        rounds=rounds,
        delta=delta,
        tolerance=1e-5,
        source="its test's formula",
    )
C.write()
