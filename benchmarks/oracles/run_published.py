"""Values that tests of libraries state: of some that cannot be installed next to each other, or at all, from an index.

The libraries are not run. A fixture's source says so; the values are those of the tests' assertions.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np
from cases import Fixture

# --- FL4Health ------------------------------------------------------------------------------------------------
C = Fixture("fl4health", "FL4Health", of="0.4.2", source="values in its tests; the library was not run")
C.difference(
    "orders up to 63",
    "decision",
    "FL4Health tries orders up to 63, fedcore's accountant rdp up to 512, so that its valid epsilon is smaller.",
    follows="both (valid bounds)",
    where="fl4health/privacy/moments_accountant.py",
)
C.difference(
    "fractional orders",
    "decision",
    "At fractional orders dp-accounting 0.6.0, which fedcore's accountant rdp uses, over-estimates the divergence, or "
    "leaves the order out; FL4Health sums the series. Both are valid bounds.",
    follows="FL4Health (closer to Mironov et al.'s series); fedcore's default accountant pld is not touched",
    where="fl4health/privacy/moments_accountant.py",
    option="none; dp.accountant=pld, the default, is not touched",
)
first = np.ones(8)
first[0] = 10.0
layers = [first, np.ones(8), 2 * np.ones(8)]
weighted, plain = np.full(8, 7 / 6), np.full(8, 4 / 3)
weighted[0], plain[0] = 17 / 3, 13 / 3
others = [3 * np.ones(12), np.ones(12), np.ones(12)]
W = "weighted mean"
C.add(W, "test_aggregate_results, 3:2:1", "weighted_mean", weighted, models=layers, shares=[3.0, 2.0, 1.0])
C.add(
    W,
    "test_aggregate_results, 3:2:1, second layer",
    "weighted_mean",
    2 * np.ones(12),
    models=others,
    shares=[3.0, 2.0, 1.0],
)
C.add(W, "test_aggregate_results, unweighted", "weighted_mean", plain, models=layers)
C.add(W, "test_aggregate_results, unweighted, second layer", "weighted_mean", 5 / 3 * np.ones(12), models=others)
C.add(W, "aggregate_losses", "weighted_mean", [17 / 6], models=[[1.0], [2.0], [10.0]], shares=[3.0, 2.0, 1.0])
S = "SCAFFOLD"
C.add(
    S, "test_compute_updated_weights: 6 to 46 at .25", "mixed_models", [16.0], server=[6.0], client=[46.0], share=0.25
)
C.add(
    S,
    "test_compute_updated_control_variates: half of the clients",
    "scaffold_round",
    [[2.0], [10.0]],
    start=[0.0],
    models=[[2.0], [2.0]],
    changes=[[20.0], [20.0]],
    clients=4,
)
C.add(
    S,
    "test_compute_updated_control_variate",
    "scaffold_control",
    160.0,
    start=3.0,
    trained=0.0,
    corrected=-100.0,
    lr=0.01,
    steps=5,
    tolerance=1e-4,
)
A = "adaptive clipping"
C.add(
    A,
    "test_modify_noise_multiplier: z 2, sigma_b 5",
    "update_multiplier",
    2.0412,
    noise=2.0,
    count_noise=5.0,
    tolerance=1e-4,
)
np.random.seed(42)
draws = [float(np.random.normal(0, 5.0)) for _ in range(2)]
C.add(
    A,
    "test_calculate_clipping_update, two rounds",
    "noised_clips",
    [0.00447446, 0.000979264],
    clip=0.1,
    centred=3.73,
    noises=draws,
    clients=1,
    quantile=0.5,
    rate=0.5,
)
np.random.seed(42)
draw = float(np.random.normal(0, 1.0))
C.add(
    A,
    "test_gaussian_noisy_aggregate_clipping_bits: 3 of 4",
    "noised_share",
    0.874,
    centred=1.0,
    noise=draw,
    clients=4,
    tolerance=1e-3,
)
D = "DP clipping"
C.add(D, "test_weight_update_and_clipping", "dp_clip", [0.11785] * 72, tensors=[[2.0] * 72], bound=1.0, tolerance=1e-5)
C.add(D, "test_clipping_bit_flip", "dp_clip", [1.0] * 72, tensors=[[1.0] * 72], bound=9.0)
np.random.seed(42)
np.random.rand(2, 3, 4, 5), np.random.normal(0, 1, (2, 3, 4, 5))
layer, noise = np.random.rand(2, 2), np.random.normal(0.0, 1.0, (2, 2))
for row, value in ((0, -0.002834), (1, 0.0161857)):
    C.add(
        "DP noise",
        f"test_add_noise_to_layer, [{row}, 0]",
        "noised_mean",
        value,
        total=float(layer[row, 0]),
        noise=float(noise[row, 0]),
        multiplier=1.0,
        bound=1.0,
        lot=25.0,
    )
for size, value in ((150, 1.5), (6, 0.06), (2400, 24.0), (16, 0.16), (32, 0.32)):
    C.add(
        "FedProx",
        f"test_forming_proximal_loss: {size} weights",
        "proximal",
        value,
        parameters=[0.1] * size,
        reference=[0.0] * size,
        weight=2.0,
    )
C.add(
    "FedProx",
    "test_proximal_loss_derivative",
    "proximal_gradient",
    [0.01] * 6,
    parameters=[0.1] * 6,
    reference=[0.0] * 6,
    weight=0.1,
)
anchor, pull, push = (
    [[1.0, 2, 2, 1], [2.0, 1, 1, -1]],
    [[1.0, 2, 3, 4], [5.0, 6, 7, 8]],
    [[1.0, 2, 2, 1], [1.0, 1, 1, 1]],
)
C.add(
    "MOON",
    "test_moon_contrastive_loss",
    "moon_loss",
    0.837868,
    anchor=anchor,
    positive=pull,
    negative=push,
    tolerance=1e-4,
)
one, zero = [[1.0] * 3], [[0.0] * 3]
C.add("MOON", "a negative of zeros", "moon_loss", 0.1269, anchor=one, positive=one, negative=zero, tolerance=1e-4)
C.add("MOON", "features of zeros: log 2", "moon_loss", 0.6931, anchor=zero, positive=one, negative=zero, tolerance=1e-4)
np.random.seed(42)
rows, new = [np.random.rand(2, 3) for _ in range(4)], [np.random.rand(2, 3) for _ in range(4)]
for number, place, value in ((0, (0, 0), 1.096533), (2, (1, 1), 0.642292)):
    moves = [[float(part[number][place])] for part in (rows, rows, new)]
    C.add(
        "FedAvgM",
        f"test_update_with_momentum, m[{number}]{list(place)}",
        "momentum_velocity",
        value,
        beta=0.9,
        moves=moves,
        tolerance=1e-5,
    )


def spent(area: str, name: str, value: float, bound: float, differs: str = "", **inputs: Any) -> None:
    """Add an epsilon by Renyi divergences."""
    C.add(area, name, "epsilon", value, accountant="rdp", tolerance=bound, relative=0.0, differs=differs, **inputs)


R = "RDP epsilon"
for rounds, value in ((10000, 1.035), (40000, 2.213)):
    spent(R, f"q .01, z 4, {rounds} rounds, delta 1e-5", value, 0.01, noise=4.0, rate=0.01, rounds=rounds, delta=1e-5)
for rounds, noise, delta, value in ((640, 4.0, 9e-6, 1.083), (288, 3.0, 9e-7, 1.109), (54, 2.0, 1e-11, 1.169)):
    spent(
        R,
        f"q 1/60, z {noise}, {6 * rounds} rounds, delta {delta}",
        value,
        0.001,
        noise=noise,
        rate=1 / 60,
        rounds=6 * rounds,
        delta=delta,
    )
TABLE = {
    (1e5, 1e2, 1.0): (0.697, 0.700, 0.725, 0.774, 0.884, 1.899, 6.830),
    (1e6, 1e1, 1.0): (0.504, 0.504, 0.504, 0.504, 0.507, 0.530, 0.532),
    (1e6, 1e3, 1.0): (0.892, 0.895, 0.919, 0.985, 1.095, 2.130, 7.505),
    (1e6, 1e4, 1.0): (1.366, 1.525, 1.685, 2.634, 7.810, 30.388, 160.853),
    (1e6, 1e3, 3.0): (0.162, 0.162, 0.163, 0.166, 0.200, 0.502, 1.705),
    (1e9, 1e3, 1.0): (0.684, 0.685, 0.685, 0.690, 0.712, 0.712, 0.712),
}
SMALLER = {  # cells in which an order above 63 gives less
    (1e5, 1e2, 1.0): (5, 6),
    (1e6, 1e4, 1.0): (1, 2, 4, 6),
    (1e6, 1e3, 3.0): (0, 1, 2, 3, 4),
}
LARGER = ((1e6, 1e4, 1.0), 5)  # its best order is a fraction
for (clients, cohort, noise), values in TABLE.items():
    for power, value in enumerate(values):
        differs = "orders up to 63" if power in SMALLER.get((clients, cohort, noise), ()) else ""
        if ((clients, cohort, noise), power) == LARGER:
            differs = "fractional orders"
        spent(
            R,
            f"McMahan et al. 2018, Table 1: {clients:g} clients, cohort {cohort:g}, z {noise:g}, {10**power} rounds",
            value,
            0.001,
            differs,
            noise=noise,
            rate=cohort / clients,
            rounds=10**power,
            delta=clients**-1.1,
        )
C.write()

# --- TensorFlow Federated --------------------------------------------------------------------------------------
C = Fixture("tff", "TensorFlow Federated", of="its tests", source="values in its tests; the library was not run")
inputs: dict[str, Any] = {"start": [1.0], "gradients": [[2.0]] * 4, "plugin": "fedavgm"}
for said, options, values in (
    ("no momentum, rate .01", {"beta": 0.0, "lr": 0.01}, (0.98, 0.96, 0.94, 0.92)),
    ("momentum .5", {"beta": 0.5, "lr": 0.01}, (0.98, 0.95, 0.915, 0.8775)),
    ("momentum .5, Nesterov", {"beta": 0.5, "lr": 0.01, "variant": "nesterov"}, (0.97, 0.935, 0.8975, 0.85875)),
):
    C.add("FedAvgM", f"sgdm: {said}", "server_moves", [[value] for value in values], options=options, **inputs)
steps = [[0.01], [0.0070711], [0.0057735], [0.005]]
C.add(
    "FedOpt",
    "adagrad from v 0, epsilon 0: its steps",
    "adaptive_steps",
    steps,
    kind="adagrad",
    moves=[[2.0]] * 4,
    lr=0.01,
    tolerance=1e-6,
)
for kind in ("adam", "yogi"):
    C.add(
        "FedOpt",
        f"{kind}: its steps of .1",
        "adaptive_steps",
        [[0.1]] * 4,
        kind=kind,
        moves=[[2.0]] * 4,
        lr=0.1,
        beta2=0.999,
        tolerance=1e-4,
    )
value = 3.14159 * math.exp(2.71828 * 0.61803)
C.add(
    "adaptive clipping",
    "quantile test_adaptation, geometric",
    "next_clip",
    value,
    clip=3.14159,
    inside=[0, 0],
    quantile=0.61803,
    rate=2.71828,
)
C.write()

# --- fedjax ----------------------------------------------------------------------------------------------------
C = Fixture("fedjax", "fedjax", of="0.0.17", source="values in its tests; the library was not run")
C.add(
    W,
    "aggregator_test",
    "weighted_mean",
    [1.5, 3.25, 5.0],
    models=[[1.0, 2, 3], [2.0, 4, 6], [1.0, 3, 5]],
    shares=[2.0, 4.0, 2.0],
)
C.add(
    W,
    "tree_mean, 6 7 8",
    "weighted_mean",
    [46 / 21, 67 / 21],
    models=[[0.0, 1], [2.0, 3], [4.0, 5]],
    shares=[6.0, 7.0, 8.0],
)
C.add(
    D,
    "tree_clip_by_global_norm",
    "dp_clip",
    [2, 2.5, 0.5, 0.5, 1.5, 0.5],
    tensors=[[4.0, 5, 1, 1], [3.0, 1]],
    bound=3.640055,
    tolerance=1e-5,
)
for said, batches, value in (
    ("for_each_client, cid0", [[2.0, 4, 6], [8.0, 10, 12]], 13.96),
    ("for_each_client, cid1", [[1.0, 3, 5], [7.0, 9, 11]], 11.97),
    ("apply, cid0", [[4.0, 6], [2.0]], 6.95),
    ("apply, cid1", [[8.0, 10]], 9.0),
):
    C.add(
        "FedProx", f"fed_prox_test {said}", "proximal_run", value, start=4.0, batches=batches, mu=0.01, tolerance=1e-5
    )
C.add(
    "FedProx",
    "fed_prox_test: the server's parameters",
    "weighted_mean",
    [-3.77],
    models=[[4 - 6.95], [4 - 9.0]],
    shares=[3.0, 2.0],
)
C.write()

# --- FLSim -----------------------------------------------------------------------------------------------------
C = Fixture("flsim", "FLSim", of="its tests", source="values in its tests; the library was not run")
for n in (10, 1):
    rows = [[float(number)] for number in range(1, n + 1)]
    sizes = [row[0] for row in rows]
    C.add(
        W,
        f"test_sync_servers: weighted average of {n}",
        "weighted_mean",
        [float(np.average(sizes, weights=sizes))],
        models=rows,
        shares=sizes,
    )
    C.add(W, f"test_sync_servers: average of {n}", "weighted_mean", [float(np.mean(sizes))], models=rows)
for bound, norm, value in ((5.0, 10.0, 0.5), (1.0, 1.0, 1.0), (2.0, 0.8, 1.0)):
    C.add(
        D,
        f"test_calc_clip_factor: {bound:g} of {norm:g}",
        "dp_clip_factor",
        value,
        norm=norm,
        bound=bound,
        tolerance=1e-3,
    )
    C.add(
        "norm clipping",
        f"robust clip_factor: {bound:g} of {norm:g}",
        "norm_clip_factor",
        value,
        norm=norm,
        bound=bound,
        tolerance=1e-3,
    )
for entry, value in ((2.0, 9.16515138991168), (1.0, 4.58257569495584)):
    C.add(D, f"test_calc_user_update_norm: 21 entries of {entry:g}", "joint_norm", value, tensors=[[entry] * 21])
for late, power in ((0, 0.5), (3, 0.5), (8, 0.5), (8, 0.3)):
    C.add(
        "FedBuff",
        f"polynomial staleness {late}, exponent {power}",
        "staleness",
        1 / (1 + late) ** power,
        rounds=late,
        power=power,
    )
norms = [math.sqrt(21) * number for number in range(1, 11)]
C.add(
    A,
    "test_median_norm_clip: within 3 of the median norm",
    "clip_after",
    float(np.median(norms)),
    clip=0.1,
    norms=norms,
    rounds=400,
    quantile=0.5,
    rate=0.1,
    tolerance=3.0,
    relative=0.0,
)
C.write()

# --- dp-accounting ---------------------------------------------------------------------------------------------
C = Fixture("dp_accounting_tests", "dp-accounting", of="0.6.0", source="values in its tests; the library was not run")
for said, noise, rate, rounds, delta in (
    ("Gaussian, z sqrt 3, 3 rounds", math.sqrt(3), 1.0, 3, 0.126936),
    ("sampled .2, z .5, 3 rounds", 0.5, 0.2, 3, 0.15594),
):
    C.add(
        "PLD epsilon",
        f"{said}: epsilon 1",
        "epsilon",
        1.0,
        noise=noise,
        rate=rate,
        rounds=rounds,
        delta=delta,
        tolerance=1e-3,
    )
C.add(
    R,
    "z 4.530877117, 1 round, delta 1e-6: epsilon 1",
    "epsilon",
    1.0,
    noise=4.530877117,
    rate=1.0,
    rounds=1,
    delta=1e-6,
    accountant="rdp",
    tolerance=2e-3,
)
C.write()

# --- pfl-research's tests, Blades' formula ---------------------------------------------------------------------
C = Fixture("pfl_tests", "pfl-research", of="0.6.0", source="values in its tests; the library was not run")
C.add(
    A, "test_adaptive_clipping: share .5, target .5", "next_clip", 3.0, clip=3.0, inside=[1, 0], quantile=0.5, rate=0.1
)
C.add(
    A,
    "test_adaptive_clipping: share .5, target .2",
    "next_clip",
    2.825293600752746,
    clip=3.0,
    inside=[1, 0],
    quantile=0.2,
    rate=0.2,
)
C.add(A, "test_adaptive_clipping_simulation: noise 1.25 x .6", "update_multiplier", 0.75, noise=0.6, count_noise=0.5)
C.write()
C = Fixture("blades", "Blades", of="git 711e8df", source="its formula of z; the library was not run")
for clients, hostile in ((10, 3), (20, 5), (50, 24), (60, 12), (100, 20)):
    honest = clients - hostile
    s = clients // 2 + 1 - hostile
    C.add(
        "ALIE, IPM",
        f"z of {clients} clients, {hostile} malicious",
        "alie_z",
        NormalDist().inv_cdf((honest - s) / honest),
        clients=clients,
        malicious=hostile,
    )
C.write()
