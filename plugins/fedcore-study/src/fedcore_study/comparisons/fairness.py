"""How evenly a model serves the clients: the figures that papers on fairness report of the clients' accuracies.

Li, Sanjabi, Beirami and Smith (q-FFL, ICLR 2020, arXiv 1905.10497) give mean, variance, worst and best 10 %; Jain,
Chiu and Hawe (DEC-TR-301, 1984) the index. All clients count alike here, whatever their samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedcore_study.lenient import number

FIGURES = {
    "mean": ("clients' mean %", 100.0, 2, 1),
    "std": ("std %", 100.0, 2, -1),
    "worst": ("worst 10 %", 100.0, 2, 1),
    "best": ("best 10 %", 100.0, 2, 1),
    "variance": ("variance", 1.0, 1, -1),
    "jain": ("Jain", 1.0, 4, 1),
}
"""The figures of a :class:`Spread`, each with its heading in a table, its factor and decimals there, and 1 if more is
better or -1 if less is.
"""


@dataclass(frozen=True)
class Spread:
    """One run's accuracies over its clients, as fractions. A figure that the run did not record is None."""

    mean: float | None
    std: float | None
    """The population standard deviation."""
    worst: float | None
    """The mean of the lowest tenth."""
    best: float | None
    """The mean of the highest tenth."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Spread:
        """Return the spread in a protocol's figures."""
        return cls(*(number(row.get(name)) for name in ("mean", "std", "worst10", "best10")))

    @property
    def variance(self) -> float | None:
        """The variance of the accuracies in percent, as in q-FFL's tables."""
        return None if self.std is None else (100 * self.std) ** 2

    @property
    def jain(self) -> float | None:
        """Jain's index (sum x)^2 / (n sum x^2) of n values of at least 0, which is mean^2 / (mean^2 + std^2).

        It is 1 if all values are equal, 1/n if all but one are 0, and None if all are 0.
        """
        if self.mean is None or self.std is None or not self.mean:
            return None
        return self.mean**2 / (self.mean**2 + self.std**2)
