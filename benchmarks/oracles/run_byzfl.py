"""ByzFL's aggregators, pre-aggregators and attacks: the examples of its documentation, and random vectors."""

from __future__ import annotations

import byzfl
import numpy as np
from cases import Fixture, krum_of_paper, spread

C = Fixture("byzfl", "ByzFL", "byzfl", source="run of the library on these vectors")
C.difference(
    "three steps from 0",
    "decision",
    "By default ByzFL's geometric median takes three steps from 0; fedcore starts at the coordinate-wise median and "
    "runs until it moves no more. At the fixed point they agree.",
    follows="both (Pillutla et al. leave the start and the number of steps open)",
    where="byzfl/aggregators: GeometricMedian",
    option="none; GeometricMedian(nu=1e-6, T=2000) of ByzFL gives fedcore's point",
)
C.difference(
    "Krum's neighbours",
    "decision",
    "ByzFL adds up the distances to the n - f - 1 nearest others, fedcore to the n - f - 2 of the paper; in these "
    "inputs that changes which vector is chosen.",
    follows="fedcore (Blanchard et al., Section 4)",
    where="byzfl/aggregators: Krum, MultiKrum",
    option="a krum.fraction of one attacker less: f - 1 in place of f gives ByzFL's scores",
)
C.difference(
    "side of ALIE",
    "decision",
    "ByzFL's attack is the mean plus tau standard deviations, fedcore's the mean minus z, as in the authors' code on "
    "gradients.",
    follows="both (the side is a choice of the attacker)",
    where="byzfl/attacks: ALittleIsEnough",
)

rows = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
example = {"rows": rows, "source": "example of its documentation"}
C.add(
    "weighted mean",
    "Average",
    "weighted_mean",
    byzfl.Average()(rows),
    models=rows,
    source="example of its documentation",
)
C.add("median", "Median", "median", byzfl.Median()(rows), **example)
C.add("trimmed mean", "TrMean(1)", "trimmed_mean", byzfl.TrMean(1)(rows), trim=1, **example)
C.add(
    "RFA",
    "GeometricMedian(): nu .1, 3 steps from 0",
    "geometric_median",
    byzfl.GeometricMedian()(rows),
    smoothing=0.1,
    iterations=3,
    differs="three steps from 0",
    **example,
)
C.add(
    "RFA",
    "GeometricMedian(1e-6, 2000)",
    "geometric_median",
    byzfl.GeometricMedian(1e-6, 2000)(rows),
    rows=rows,
    tolerance=1e-4,
)
C.add("Krum", "Krum(1) of 3", "krum", byzfl.Krum(1)(rows), attackers=1, keep=1, **example)
C.add("Krum", "MultiKrum(1) of 3: keeps 2", "krum", byzfl.MultiKrum(1)(rows), attackers=1, keep=2, **example)
zero = np.zeros(3)
C.add(
    "centred clipping",
    "CenteredClipping(): 1 step, tau 100",
    "centred_clipping",
    byzfl.CenteredClipping()(rows),
    centre=zero,
    radius=100.0,
    iterations=1,
    **example,
)
C.add("NNM", "NNM(1)", "neighbour_mixing", byzfl.NNM(1)(rows), attackers=1, **example)
C.add("norm clipping", "Clipping(2.0)", "norm_clipping", byzfl.Clipping(2.0)(rows.copy()), bound=2.0, **example)
C.add(
    "ALIE, IPM",
    "SignFlipping of the mean is IPM of epsilon 1",
    "inner_product_manipulation",
    byzfl.SignFlipping()(rows),
    epsilon=1.0,
    **example,
)
C.add(
    "ALIE, IPM",
    "InnerProductManipulation(2.0)",
    "inner_product_manipulation",
    byzfl.InnerProductManipulation(2.0)(rows),
    epsilon=2.0,
    **example,
)
C.add(
    "ALIE, IPM",
    "ALittleIsEnough(1.5)",
    "alie",
    byzfl.ALittleIsEnough(1.5)(rows),
    z=1.5,
    differs="side of ALIE",
    **example,
)
C.add("ALIE, IPM", "ALittleIsEnough(-1.5)", "alie", byzfl.ALittleIsEnough(-1.5)(rows), rows=rows, z=1.5)
np.random.seed(3)
buckets = byzfl.Bucketing(2)(rows.copy())
np.random.seed(3)
order = [int(row[0] - 1) // 3 for row in np.random.permutation(rows)]
C.add("bucketing", "Bucketing(2) of 3 in its order", "bucketing", buckets, rows=rows, order=order, size=2)

f, n, d = 3, 12, 20
for seed in (0, 1, 2, 3, 14):
    rows = spread(seed + 50, n, d, hostile=f, shift=4.0)
    said, exact = f"12 clients, f 3, seed {seed}", {"rows": rows, "tolerance": 1e-10}
    C.add("median", said, "median", byzfl.Median()(rows), **exact)
    C.add("trimmed mean", said, "trimmed_mean", byzfl.TrMean(f)(rows), trim=f, **exact)
    C.add(
        "RFA",
        f"{said}, converged",
        "geometric_median",
        byzfl.GeometricMedian(1e-6, 3000)(rows),
        rows=rows,
        tolerance=1e-5,
    )
    value = byzfl.CenteredClipping(L=3, tau=2.0)(rows)
    C.add(
        "centred clipping",
        f"{said}: 3 steps, tau 2",
        "centred_clipping",
        value,
        centre=np.zeros(d),
        radius=2.0,
        iterations=3,
        **exact,
    )
    rule, again = byzfl.CenteredClipping(L=2, tau=1.5), np.round(rows + 1, 3)
    rule(rows)
    C.add(
        "centred clipping",
        f"{said}: the second round starts at the first's result",
        "centred_clipping_twice",
        rule(again),
        again=again,
        radius=1.5,
        iterations=2,
        **exact,
    )
    C.add("NNM", said, "neighbour_mixing", byzfl.NNM(f)(rows), attackers=f, **exact)
    chosen = byzfl.Krum(f)(rows)
    C.add(
        "Krum",
        said,
        "krum",
        chosen,
        attackers=f,
        differs="" if np.allclose(krum_of_paper(rows, f), chosen) else "Krum's neighbours",
        **exact,
    )
    C.add("Krum", f"{said}: fedcore with f - 1", "krum", chosen, attackers=f - 1, **exact)
    value = byzfl.MultiKrum(f)(rows)
    C.add("Krum", f"{said}: MultiKrum, fedcore with f - 1", "krum", value, attackers=f - 1, keep=n - f, **exact)
    C.add(
        "mean around the median", f"{said}: Meamed", "mean_around_median", byzfl.Meamed(f)(rows), count=n - f, **exact
    )
    C.add("ALIE, IPM", f"{said}: ALIE, tau .7", "alie", byzfl.ALittleIsEnough(-0.7)(rows), z=0.7, **exact)
C.write()
