"""autodp's exact Gaussian mechanism."""

from __future__ import annotations

import math

from autodp import mechanism_zoo
from cases import Fixture

C = Fixture("autodp", "autodp", "autodp", source="run of the library's mechanism")
for noise, rounds, delta in ((1.0, 1, 1e-5), (5.0, 10, 1e-6), (2.0, 100, 1e-5), (0.8, 3, 1e-6)):
    value = mechanism_zoo.ExactGaussianMechanism(noise / math.sqrt(rounds)).get_approxDP(delta)
    C.add(
        "PLD epsilon",
        f"exact Gaussian, z {noise}, {rounds} rounds, delta {delta}",
        "epsilon",
        float(value),
        noise=noise,
        rate=1.0,
        rounds=rounds,
        delta=delta,
        tolerance=1e-4,
    )
C.write()
