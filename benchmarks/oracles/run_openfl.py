"""OpenFL's aggregation functions and its NumPy optimizers."""

from __future__ import annotations

import numpy as np
from cases import Fixture, numbers, spread
from openfl.interface.aggregation_functions.geometric_median import geometric_median
from openfl.interface.aggregation_functions.weighted_average import weighted_average
from openfl.utilities.optimizers.numpy.adagrad_optimizer import NumPyAdagrad
from openfl.utilities.optimizers.numpy.adam_optimizer import NumPyAdam
from openfl.utilities.optimizers.numpy.yogi_optimizer import NumPyYogi

C = Fixture("openfl", "OpenFL", "openfl", source="run of the library's functions on these inputs")
C.difference(
    "weights divided again and again",
    "library",
    "OpenFL divides the weights of the step before by the distances, so that they pile up from step to step, and takes "
    "four steps; in Weiszfeld's algorithm each step divides the clients' own weights.",
    follows="fedcore (Pillutla et al., Algorithm 2)",
    where="openfl/interface/aggregation_functions/geometric_median.py: geometric_median",
)
C.difference(
    "v shrinks in Yogi",
    "library",
    "OpenFL's Yogi is beta2 v + (1 - beta2) sign(g^2 - v) g^2, which shrinks v besides; the paper adds the second term "
    "to v itself.",
    follows="fedcore (Reddi et al., Algorithm 2, FedYogi)",
    where="openfl/utilities/optimizers/numpy/yogi_optimizer.py: NumPyYogi",
)
C.difference(
    "Adam's correction",
    "decision",
    "OpenFL corrects the bias of both moments, as Adam does; Algorithm 2 has no correction.",
    follows="fedcore (Reddi et al., Algorithm 2)",
    where="openfl/utilities/optimizers/numpy/adam_optimizer.py: NumPyAdam",
    option="none; the correction tends to 1",
)
rows = numbers(1, 3, 6)
for shares in ([0.2, 0.3, 0.5], [1.0, 1.0, 1.0], [10.0, 30.0, 20.0]):
    value = weighted_average(rows, np.array(shares))
    C.add("weighted mean", f"weighted_average, {shares}", "weighted_mean", value, models=rows, shares=shares)
for seed in range(3):
    rows = spread(400 + seed, 9, 6, hostile=2, shift=3.0)
    value = geometric_median(rows, np.ones(9), maxiter=100, ftol=1e-12)
    C.add(
        "RFA",
        f"9 clients, seed {seed}, up to 100 steps",
        "geometric_median",
        value,
        rows=rows,
        tolerance=1e-4,
        differs="weights divided again and again",
    )
start = numbers(2, 4)
for seed in range(2):
    moves = numbers(20 + seed, 4, 4)

    def run(optimizer: object, moves: np.ndarray = moves) -> list[np.ndarray]:
        """Return the steps."""
        steps, before = [], start.copy()
        for move in moves:
            optimizer.step({"w": move})
            steps.append(before - optimizer.params["w"])
            before = optimizer.params["w"].copy()
        return steps

    value = run(NumPyAdam(params={"w": start.copy()}, learning_rate=0.1, betas=(0.9, 0.99), epsilon=1e-3))
    C.add(
        "FedOpt",
        f"Adam from v 0 with its correction, seed {seed}",
        "adaptive_steps",
        value,
        kind="adam",
        moves=moves,
        tau=1e-3,
        lr=0.1,
        tolerance=1e-9,
    )
    models = [start - sum(value[: number + 1]) for number in range(4)]
    C.add(
        "FedOpt",
        f"Adam as it is, seed {seed}",
        "server_moves",
        models,
        plugin="fedadam",
        options={"lr": 0.1, "tau": 1e-3, "beta1": 0.9, "beta2": 0.99},
        start=start,
        gradients=moves,
        differs="Adam's correction",
    )
    value = run(NumPyYogi(params={"w": start.copy()}, learning_rate=0.1, betas=(0.9, 0.99), epsilon=1e-3))
    C.add(
        "FedOpt",
        f"Yogi from v 0 with Adam's correction, seed {seed}",
        "adaptive_steps",
        value,
        kind="yogi",
        moves=moves,
        tau=1e-3,
        lr=0.1,
        differs="v shrinks in Yogi",
    )
    value = run(
        NumPyAdagrad(params={"w": start.copy()}, learning_rate=0.1, initial_accumulator_value=0.01, epsilon=0.1)
    )
    models = [start - sum(value[: number + 1]) for number in range(4)]
    C.add(
        "FedOpt",
        f"Adagrad, v from tau^2, seed {seed}",
        "server_moves",
        models,
        plugin="fedadagrad",
        options={"lr": 0.1, "tau": 0.1, "beta1": 0.0},
        start=start,
        gradients=moves,
        tolerance=1e-9,
    )
C.write()
