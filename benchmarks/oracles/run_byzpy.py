"""ByzPy's aggregators, pre-aggregators and attacks on random vectors."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import torch
from byzpy.aggregators.coordinate_wise.mean_of_medians import MeanOfMedians
from byzpy.aggregators.coordinate_wise.median import CoordinateWiseMedian
from byzpy.aggregators.coordinate_wise.trimmed_mean import CoordinateWiseTrimmedMean
from byzpy.aggregators.geometric_wise.geometric_median import GeometricMedian
from byzpy.aggregators.geometric_wise.krum import Krum, MultiKrum
from byzpy.aggregators.norm_wise.center_clipping import CenteredClipping
from byzpy.attacks.empire import EmpireAttack
from byzpy.attacks.little import LittleAttack
from byzpy.pre_aggregators.bucketing import Bucketing
from byzpy.pre_aggregators.clipping import Clipping
from byzpy.pre_aggregators.nnm import NearestNeighborMixing
from cases import Fixture, krum_of_paper, spread

C = Fixture("byzpy", "ByzPy", "byzpy", source="run of the library on these vectors")
C.difference(
    "Krum's neighbours",
    "decision",
    "ByzPy adds up the distances to the n - f - 1 nearest others, fedcore to the n - f - 2 of the paper; in these "
    "inputs that changes which vector is chosen.",
    follows="fedcore (Blanchard et al., Section 4)",
    where="byzpy/aggregators/geometric_wise/krum.py",
    option="a krum.fraction of one attacker less: f - 1 in place of f gives ByzPy's scores",
)
C.difference(
    "ALIE's side, deviation and z",
    "decision",
    "ByzPy's attack is the mean plus z deviations (divided by n), z the quantile of (N - s) / N; fedcore's is the mean "
    "minus z deviations (divided by n - 1), z that of (n - m - s) / (n - m), as in Blades.",
    follows="both: two versions of the paper seem to be in use (its text was not at hand)",
    where="byzpy/attacks/little.py",
    option="attack.strength sets z; the side and the deviation are fixed",
)
f, n = 3, 12
for seed in range(4):
    rows = spread(200 + seed, n, 10, hostile=f, shift=4.0)
    given, said, exact = (
        [torch.tensor(row) for row in rows],
        f"12 clients, f 3, seed {seed}",
        {"rows": rows, "tolerance": 1e-9},
    )
    C.add(
        "median",
        f"{said}, 11 of them",
        "median",
        CoordinateWiseMedian().aggregate(given[:11]),
        rows=rows[:11],
        tolerance=1e-9,
    )
    C.add("trimmed mean", said, "trimmed_mean", CoordinateWiseTrimmedMean(f).aggregate(given), trim=f, **exact)
    value = GeometricMedian(tol=1e-10, max_iter=3000).aggregate(given)
    C.add("RFA", said, "geometric_median", value, rows=rows, tolerance=1e-5)
    chosen = Krum(f).aggregate(given)
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
    C.add(
        "Krum",
        f"{said}: keeps 5, fedcore with f - 1",
        "krum",
        MultiKrum(f, 5).aggregate(given),
        attackers=f - 1,
        keep=5,
        **exact,
    )
    value = CenteredClipping(c_tau=2.0, M=3, init="zero").aggregate(given)
    C.add(
        "centred clipping",
        f"{said}: 3 steps from 0",
        "centred_clipping",
        value,
        centre=np.zeros(10),
        radius=2.0,
        iterations=3,
        **exact,
    )
    C.add(
        "mean around the median",
        f"{said}, 11 of them",
        "mean_around_median",
        MeanOfMedians(f).aggregate(given[:11]),
        rows=rows[:11],
        count=11 - f,
        tolerance=1e-9,
    )
    C.add(
        "NNM",
        said,
        "neighbour_mixing",
        torch.stack(NearestNeighborMixing(f).pre_aggregate(given)),
        attackers=f,
        **exact,
    )
    order = [int(one) for one in np.random.default_rng(seed).permutation(n)]
    value = torch.stack(Bucketing(4, perm=order).pre_aggregate(given))
    C.add("bucketing", f"{said}: size 4 in order", "bucketing", value, order=order, size=4, **exact)
    C.add(
        "norm clipping",
        f"{said}: bound 2",
        "norm_clipping",
        torch.stack(Clipping(2.0).pre_aggregate(given)),
        bound=2.0,
        **exact,
    )
    C.add(
        "ALIE, IPM",
        f"{said}: Empire of -.5 is IPM",
        "inner_product_manipulation",
        EmpireAttack(-0.5).apply(honest_grads=given),
        epsilon=0.5,
        **exact,
    )
for clients, hostile in ((15, 3), (25, 8), (50, 24)):
    rows = spread(300 + clients, clients - hostile, 6)
    value = LittleAttack(hostile, N=clients).apply(honest_grads=[torch.tensor(row) for row in rows])
    s = clients // 2 + 1 - hostile
    honest = clients - hostile
    z = NormalDist().inv_cdf((honest - s) / honest)
    C.add(
        "ALIE, IPM",
        f"ALIE, {clients} clients, {hostile} malicious",
        "alie",
        value,
        rows=rows,
        z=z,
        differs="ALIE's side, deviation and z",
    )
    its = -NormalDist().inv_cdf((clients - s) / clients) * math.sqrt((honest - 1) / honest)
    C.add(
        "ALIE, IPM",
        f"ALIE, {clients} clients, {hostile} malicious, with its side, deviation and z",
        "alie",
        value,
        rows=rows,
        z=its,
        tolerance=1e-6,
    )
C.write()
