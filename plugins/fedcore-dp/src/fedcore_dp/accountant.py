"""The epsilon of rounds of Gaussian noise, by the Renyi accountant of Opacus."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

ORDERS = (1.01, 1.02, 1.05, *(1 + tenths / 10 for tenths in range(1, 110)), *range(12, 65), 80, 96, 128, 192, 256, 512)
"""Orders of the Renyi divergence, the best of which is taken; Opacus ends at 63, too low for a small epsilon."""


@functools.lru_cache(maxsize=4096)
def spent_epsilon(noise_multiplier: float, sampling_rate: float, rounds: int, delta: float) -> float:
    """Return epsilon at ``delta`` after so many rounds of the (Poisson-sampled) Gaussian mechanism; may be infinite.

    :param noise_multiplier: standard deviation of the noise over the sensitivity of what it is added to, > 0.
    :param sampling_rate: chance that a client takes part in a round, each by itself; 1 is every client in every round.
    :param rounds: 0 has spent nothing.
    :source: Mironov, CSF 2017, arXiv 1702.07476; Mironov, Talwar, Zhang, 2019, arXiv 1908.10530; converted as in Balle,
        Barthe, Gaboardi, Hsu, Sato, AISTATS 2020, arXiv 1905.09982, Theorem 21.
    """
    if rounds == 0:
        return 0.0
    from opacus.accountants.analysis import rdp  # takes seconds; clients and the list of plugins do without it

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a best order at the end of the range: the bound holds all the same
        one = _per_round(noise_multiplier, sampling_rate)
        epsilon, _ = rdp.get_privacy_spent(orders=list(ORDERS), rdp=[rounds * value for value in one], delta=delta)
    return max(0.0, float(epsilon))


@functools.lru_cache(maxsize=64)
def _per_round(noise_multiplier: float, sampling_rate: float) -> tuple[float, ...]:
    """Return one round's Renyi divergence at each order."""
    from opacus.accountants.analysis import rdp

    found: Any = rdp.compute_rdp(q=sampling_rate, noise_multiplier=noise_multiplier, steps=1, orders=list(ORDERS))
    return tuple(float(value) for value in found)


def privacy_report(epsilon: float | None, delta: float, *, seeded: bool) -> dict[str, Any]:
    """Return what a record says of the privacy spent; an epsilon that is infinite is none.

    >>> privacy_report(math.inf, 0.1, seeded=True)
    {'epsilon': None, 'delta': 0.1, 'noise': 'seeded'}
    """
    finite = epsilon is not None and math.isfinite(epsilon)
    return {"epsilon": epsilon if finite else None, "delta": delta, "noise": "seeded" if seeded else "secure"}
