"""fed-playground's aggregation strategies and attacks on random vectors."""

from __future__ import annotations

import math

import numpy as np
from cases import Fixture, spread
from fed_playground.src import aggregation, attacks
from fed_playground.src.encryption import NoEncryption

C = Fixture("fed_playground", "fed-playground", "fed-playground", source="run of the library on these vectors")
plain = NoEncryption()
for seed in range(4):
    for n, f in ((11, 2), (15, 3)):
        rows = spread(100 + seed, n, 10, hostile=f, shift=4.0)
        updates, said, exact = list(rows), f"{n} clients, f {f}, seed {seed}", {"rows": rows, "tolerance": 1e-9}

        def of(rule: aggregation.AggregationStrategy, updates: list[np.ndarray] = updates) -> np.ndarray:
            """Return a strategy's result."""
            return rule.aggregate(updates, plain)

        C.add("Krum", said, "krum", of(aggregation.KrumAggregation(f)), attackers=f, **exact)
        C.add("Krum", f"{said}: keeps 5", "krum", of(aggregation.KrumAggregation(f, 5)), attackers=f, keep=5, **exact)
        C.add("Bulyan", said, "bulyan", of(aggregation.BulyanAggregation(f)), attackers=f, **exact)
        C.add(
            "RFA", said, "geometric_median", of(aggregation.GeometricMedianAggregation(3000)), rows=rows, tolerance=1e-5
        )
        share = round(f / n, 3) + 0.001
        C.add("trimmed mean", said, "trimmed_mean", of(aggregation.TrimmedMeanAggregation(share)), trim=f, **exact)
        C.add("median", said, "median", of(aggregation.MedianAggregation()), **exact)
        if n == 11:
            C.add("weighted mean", said, "weighted_mean", of(aggregation.MeanAggregation()), models=rows)
            honest, hostile = rows[f:], list(range(f))
            value = attacks.IPMAttack(0.5).corrupt(updates, hostile)[0]
            C.add(
                "ALIE, IPM",
                f"{said}: IPM",
                "inner_product_manipulation",
                value,
                rows=honest,
                epsilon=0.5,
                tolerance=1e-12,
            )
            value = attacks.ALittleIsEnoughAttack(1.2).corrupt(updates, hostile)[0]
            count = len(honest)
            z = 1.2 * math.sqrt((count - 1) / count)
            C.add(
                "ALIE, IPM",
                f"{said}: ALIE with n in the deviation, fedcore's z times sqrt((n-1)/n)",
                "alie",
                value,
                rows=honest,
                z=z,
                tolerance=1e-9,
            )
C.write()
