"""Flower's strategies and its differential privacy, on given replies of clients."""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import torch
import whole
from cases import Fixture, numbers, spread
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.server.strategy.aggregate import aggregate_bulyan, aggregate_krum
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyServerSideAdaptiveClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedYogi,
    Krum,
    MultiKrum,
    QFedAvg,
)
from flwr.serverapp.strategy.bulyan import aggregate_n_closest_weights
from flwr.serverapp.strategy.fedtrimmedavg import trim_mean
from flwr.supercore.differential_privacy import clip_inputs_inplace, compute_adaptive_noise_params, compute_stdv
from flwr.supercore.task_identity import TaskIdentity

logging.disable(logging.CRITICAL)
C = Fixture("flwr", "Flower", "flwr", source="run of the library's strategies on these replies")
AT = "flwr/serverapp/strategy"
C.difference(
    "v from 0",
    "decision",
    "Flower starts the second moment v at 0, fedcore at tau^2 as Algorithm 2 does.",
    follows="fedcore (Reddi et al., Algorithm 2: v_-1 >= tau^2)",
    where=f"{AT}/fedadagrad.py, fedyogi.py",
    option="none: where tau is small, as by default, v is forgotten after some rounds",
)
C.difference(
    "bias correction",
    "decision",
    "Flower's FedAdam multiplies the step by sqrt(1 - beta2^(t+1)) / (1 - beta1^(t+1)), t from 1, and starts v at 0; "
    "fedcore follows Algorithm 2, which has no correction.",
    follows="fedcore (Reddi et al., Algorithm 2)",
    where=f"{AT}/fedadam.py",
    option="none; the factor tends to 1, and fedadam.lr can be multiplied by it",
    tracker="intended: feat(framework) Update `FedAdam` strategy with bias-corrected learning rate",
)
C.difference(
    "rounding of the trimmed share",
    "decision",
    "Flower floors the float product of share and clients, fedcore rounds up, so that never fewer values are dropped "
    "than attackers are assumed.",
    follows="both (the paper's beta n is whole)",
    where=f"{AT}/fedtrimmedavg.py: trim_mean",
    option="a trimmed-mean.fraction whose product with the clients is Flower's whole number",
)
C.difference(
    "samples weigh the chosen",
    "decision",
    "Flower averages the models that Multi-Krum chose by their samples, fedcore counts each once, since an attacker "
    "could claim any number.",
    follows="fedcore (Blanchard et al., Section 4)",
    where=f"{AT}/multikrum.py",
)
C.difference(
    "one pass",
    "decision",
    "Flower's Bulyan takes the n - 2f best scores of one pass of Multi-Krum, fedcore runs Krum again on what is left, "
    "n - 2f times. Flower's older function aggregate_bulyan does so too, and agrees.",
    follows="fedcore (El Mhamdi et al., Section 4)",
    where=f"{AT}/bulyan.py",
    tracker="feat(framework): Implement `Bulyan` for Message API, which expects the output to stay as it was",
)
C.difference(
    "noise of the count",
    "decision",
    "For 20 clients and a noise multiplier of 2 the default noise of the count, m / 20, is too little: Flower's result "
    "is not a number, fedcore takes max(m / 20, z), so that the run is possible.",
    follows="Flower (Andrew et al.: sigma_b = m / 20)",
    where="flwr/supercore/differential_privacy.py: compute_adaptive_noise_params",
    option="none: with dp.count_noise=1 nothing would be left for the updates",
)
C.difference(
    "zero update",
    "library",
    "Flower divides the bound by the norm of the update; one that has not moved has norm 0, and the call ends with "
    "ZeroDivisionError. The paper's factor min(1, S / |d|) is 1 there.",
    follows="fedcore (McMahan et al., 2018)",
    where="flwr/supercore/differential_privacy.py: clip_inputs_inplace",
    tracker="open: fix(framework): Guard DP clipping against zero-norm updates",
)
C.difference(
    "sign of the quantile",
    "library",
    "Flower's indicator is 1 where an update was clipped, and its bound shrinks with it; in the paper it is 1 where "
    "the update was within the bound, so there the bound shrinks when many are within.",
    follows="fedcore (Andrew et al., Algorithm 1)",
    where=f"{AT}/dp_adaptive_clipping.py",
)


def reply(arrays: list[Any], samples: int, **metrics: float) -> Any:
    """Return a client's message."""
    message = Mock(spec=Message)
    message.content = RecordDict(
        {
            "arrays": ArrayRecord([np.asarray(array) for array in arrays]),
            "metrics": MetricRecord({"num-examples": samples, **metrics}),
        }
    )
    message.has_error.side_effect = lambda: False
    message.has_content.side_effect = lambda: True
    return message


def aggregated(strategy: Any, replies: list[Any], server_round: int = 1) -> np.ndarray:
    """Return the first array of a strategy's result."""
    return strategy.aggregate_train(server_round, replies)[0].to_numpy_ndarrays()[0]


def rounds(strategy: Any, start: np.ndarray, means: np.ndarray) -> list[np.ndarray]:
    """Return the model after each round in which one client sends a mean."""
    models, current = [], start
    for number, mean in enumerate(means, 1):
        strategy.current_arrays = {"0": current}
        current = aggregated(strategy, [reply([mean], 1)], number)
        models.append(current)
    return models


# weighted means
W = "weighted mean"
first, second = np.array([1.0, 2, 3, 4, 5, 6]), np.array([29.0, 23, 19, 17, 13, 11])
for name, rows in (("layer 0", [first, second]), ("layer 1", [np.array([7.0, 8, 9, 10]), np.array([7.0, 5, 3, 2])])):
    value = aggregated(FedAvg(), [reply([rows[0].astype("f4")], 1), reply([rows[1].astype("f4")], 2)])
    C.add(
        W,
        f"fedavgm_test's arrays 1:2, {name}",
        "weighted_mean",
        value,
        models=rows,
        shares=[1.0, 2.0],
        source="its test's input",
    )
rows = numbers(1, 3, 21)
shares = [0.25, 0.4, 0.35]
value = aggregated(FedAvg(weighted_by_key="w"), [reply([row], 1, w=share) for row, share in zip(rows, shares)])
C.add(W, "strategy_utils_test: .25 .4 .35", "weighted_mean", value, models=rows, shares=shares)
value = aggregated(FedAvg(), [reply([np.array(1.0)], 1), reply([np.array(3.0)], 2)])
C.add(W, "a scalar 1:2", "weighted_mean", [float(value)], models=[[1.0], [3.0]], shares=[1.0, 2.0])

# FedOpt
start = np.array([0.1, 0.1, 0.1, 0.1])
means = np.array([[0.6, 0.6, 0.6, 0.6], [0.4, 0.7, 0.6, 0.1], [-0.1, 0.3, 0.2, 0.0]])
OPT = "FedOpt"
adagrad = {"lr": 0.1, "tau": 0.5}
common = {"start": start, "tolerance": 1e-9}
C.add(
    OPT,
    "fedadagrad_test: one step",
    "server_rounds",
    rounds(FedAdagrad(eta=0.1, eta_l=0.316, tau=0.5), start, means[:1]),
    plugin="fedadagrad",
    options=adagrad,
    means=means[:1],
    differs="v from 0",
    **common,
)
strategy = FedAdagrad(eta=0.1, eta_l=0.316, tau=0.5)
strategy.v_t = {"0": np.full(4, 0.25)}
C.add(
    OPT,
    "FedAdagrad, 3 rounds, v_-1 = tau^2 given to Flower",
    "server_rounds",
    rounds(strategy, start, means),
    plugin="fedadagrad",
    options=adagrad,
    means=means,
    **common,
)
betas = {"beta1": 0.9, "beta2": 0.99, "tau": 1e-3}
own = {"beta_1": 0.9, "beta_2": 0.99, "tau": 1e-3}
strategy = FedYogi(eta=0.01, **own)
strategy.v_t = {"0": np.full(4, 1e-6)}
yogi = {"plugin": "fedyogi", "options": {"lr": 0.01, **betas}, "means": means}
C.add(
    OPT,
    "FedYogi, 3 rounds, v_-1 = tau^2 given to Flower",
    "server_rounds",
    rounds(strategy, start, means),
    **yogi,
    **common,
)
C.add(
    OPT,
    "FedYogi, 3 rounds as it is",
    "server_rounds",
    rounds(FedYogi(eta=0.01, **own), start, means),
    differs="v from 0",
    **yogi,
    **common,
)
adam = {"plugin": "fedadam", "options": {"lr": 0.1, **betas}, "means": means}
C.add(
    OPT,
    "FedAdam, 3 rounds as it is",
    "server_rounds",
    rounds(FedAdam(eta=0.1, **own), start, means),
    differs="bias correction",
    **adam,
    **common,
)
strategy = FedAdam(eta=0.1, **own)
strategy.v_t = {"0": np.full(4, 1e-6)}
models, current = [], start
for number, mean in enumerate(means, 1):
    strategy.current_arrays = {"0": current}
    strategy.eta = 0.1 * (1 - 0.9 ** (number + 1.0)) / math.sqrt(1 - 0.99 ** (number + 1.0))
    current = aggregated(strategy, [reply([mean], 1)], number)
    models.append(current)
C.add(OPT, "FedAdam, 3 rounds, correction undone, v_-1 = tau^2", "server_rounds", models, **adam, **common)

# FedAvgM: its package strategy is heavy ball
for beta, lr in ((1e-9, 1.0 + 1e-9), (0.3, 1.0), (0.9, 1.0), (0.9, 0.5), (0.5, 2.0)):
    strategy = FedAvgM(server_learning_rate=lr, server_momentum=beta)
    strategy.current_arrays = ArrayRecord([np.zeros(4)])
    models = [aggregated(strategy, [reply([mean], 1)], number) for number, mean in enumerate(means, 1)]
    C.add(
        "FedAvgM",
        f"3 rounds, beta {beta}, lr {lr}",
        "server_rounds",
        models,
        plugin="fedavgm",
        options={"beta": beta, "lr": lr},
        start=np.zeros(4),
        means=means,
        tolerance=1e-8,
    )

# q-FFL
start, losses = numbers(2, 15), [0.7, 2.3, 1.1]
clients = np.round(start + numbers(3, 3, 15, scale=0.1), 4)
for q in (0.0, 0.1, 1.0, 2.0, 5.0):
    strategy = QFedAvg(client_learning_rate=0.05, q=q)
    strategy.current_arrays = ArrayRecord([start.copy()])
    value = aggregated(strategy, [reply([model.copy()], 10, train_loss=loss) for model, loss in zip(clients, losses)])
    C.add(
        "q-FFL",
        f"q {q}, three clients",
        "qffl_round",
        value,
        q=q,
        start=start,
        models=clients,
        losses=losses,
        lr=0.05,
        tolerance=1e-9,
    )

# robust rules
rows = np.array([[0.5] * 4, [1.0, 0.2, 0.5, 1.0], [0.2, 0.5, 1.0, 0.2], [0.5, 1.0, 0.2, 0.5]])
value = aggregated(FedTrimmedAvg(beta=0.25), [reply([row], count) for row, count in zip(rows, (1, 5, 2, 9))])
C.add("trimmed mean", "fedtrimmedavg_test: beta .25 of 4", "trimmed_mean", value, rows=rows, trim=1)
value = aggregated(FedMedian(), [reply([row], count) for row, count in zip(rows[1:], (5, 2, 9))])
C.add("median", "fedmedian_test", "median", value, rows=rows[1:])
C.add("median", "four clients", "median", aggregated(FedMedian(), [reply([row], 1) for row in rows]), rows=rows)


def cut(share: float, clients: int) -> int:
    """Return how many values Flower's trimmed mean drops at each side: told by the mean of squares."""
    squares = np.arange(clients, dtype=float) ** 2
    left = trim_mean(squares, share)
    return next(k for k in range((clients + 1) // 2) if np.isclose(squares[k : clients - k].mean(), left))


for share, count in (
    (0.2, 5),
    (0.2, 10),
    (0.25, 4),
    (0.1, 5),
    (0.2, 7),
    (0.29, 100),
    (0.07, 100),
    (0.3, 10),
    (0.45, 10),
):
    differs = (
        "rounding of the trimmed share"
        if cut(share, count) != min(math.ceil(share * count - 1e-9), (count - 1) // 2)
        else ""
    )
    C.add(
        "trimmed mean",
        f"values dropped per side: {share} of {count}",
        "trim_count",
        cut(share, count),
        fraction=share,
        clients=count,
        differs=differs,
    )

for name, values, keep in (("krum_test", (0.2, 0.7, 1.0), 1), ("multikrum_test", (0.2, 0.5, 1.0), 2)):
    rows = np.array([[value] * 4 for value in values])
    value = aggregated(MultiKrum(num_malicious_nodes=1, num_nodes_to_select=keep), [reply([row], 5) for row in rows])
    C.add("Krum", f"{name}: keeps {keep} of {values}", "krum", value, rows=rows, attackers=1, keep=keep, tolerance=1e-9)
for seed in range(6):
    rows = spread(seed, 11, 12, hostile=2, shift=5.0)
    for keep in (1, 5):
        value = aggregated(
            MultiKrum(num_malicious_nodes=2, num_nodes_to_select=keep), [reply([row], 1) for row in rows]
        )
        C.add(
            "Krum",
            f"11 clients, f 2, keeps {keep}, seed {seed}",
            "krum",
            value,
            rows=rows,
            attackers=2,
            keep=keep,
            tolerance=1e-9,
        )
rows = np.array([[0.2], [0.5], [1.0]])
value = aggregated(
    MultiKrum(num_malicious_nodes=1, num_nodes_to_select=2), [reply([row], n) for row, n in zip(rows, (1, 9, 1))]
)
C.add(
    "Krum",
    "Multi-Krum, samples 1:9:1",
    "krum",
    value,
    rows=rows,
    attackers=1,
    keep=2,
    differs="samples weigh the chosen",
)

tests = (
    ("two values", [1.1, 2.1], [[1.1, 2.1], [0.9, 1.9], [5.0, 5.0]], 2),
    ("single value", [1.0], [[1.0], [2.0], [0.5]], 2),
)
for name, centre, rows, count in tests:
    value = aggregate_n_closest_weights([np.array(centre)], [[np.array(row)] for row in rows], count)[0]
    C.add("Bulyan", f"bulyan_test: {name}", "mean_around_median", value, rows=rows, count=count)
for seed in range(6):
    rows = spread(10 + seed, 11, 12, hostile=2, shift=3.0)
    value = aggregated(Bulyan(num_malicious_nodes=2), [reply([row], 1) for row in rows])
    older = aggregate_bulyan([([row], 1) for row in rows], 2, aggregate_krum, to_keep=0)[0]
    differs = "" if np.allclose(value, older) else "one pass"
    C.add(
        "Bulyan",
        f"11 clients, f 2, seed {seed}",
        "bulyan",
        value,
        rows=rows,
        attackers=2,
        tolerance=1e-9,
        differs=differs,
    )
    C.add(
        "Bulyan",
        f"11 clients, f 2, seed {seed}: aggregate_bulyan",
        "bulyan",
        older,
        rows=rows,
        attackers=2,
        tolerance=1e-9,
    )

# differential privacy
A = "adaptive clipping"
for noise, clients, count_noise in ((0.6, 20, 0.5), (0.5, 100, None), (1.0, 40, 2.0), (0.05, 4, None)):
    used, multiplier = compute_adaptive_noise_params(noise, clients, count_noise)
    name = f"z_delta of z {noise}, {clients} clients, sigma_b {count_noise or 'm/20'}"
    C.add(A, name, "update_multiplier", multiplier, noise=noise, count_noise=float(used), tolerance=1e-12)
for noise, clients in ((0.5, 20), (0.05, 4), (2.0, 20)):
    try:
        possible = math.isfinite(compute_adaptive_noise_params(noise, clients, None)[1])
    except (ValueError, ZeroDivisionError):
        possible = False
    C.add(
        A,
        f"a noise exists for z {noise} and {clients} clients",
        "adaptive_run_is_possible",
        possible,
        noise=noise,
        clients=clients,
        differs="" if possible else "noise of the count",
    )
update = [np.array([3.0, 0.0]), np.array([[0.0, 4.0]])]
for bound in (1.0, 5.0, 10.0):
    clipped = [part.copy() for part in update]
    clip_inputs_inplace(clipped, bound)
    C.add(
        "DP clipping",
        f"norm 5 clipped to {bound:g}",
        "dp_clip",
        np.concatenate([part.ravel() for part in clipped]),
        tensors=update,
        bound=bound,
    )
C.add(
    "DP noise",
    "z 1.5, S .1, 10 clients",
    "noise_of_mean",
    compute_stdv(1.5, 0.1, 10),
    multiplier=1.5,
    bound=0.1,
    clients=10.0,
)
try:
    clip_inputs_inplace([np.zeros(3)], 1.0)
    factor = 1.0
except ZeroDivisionError:
    factor = math.nan
C.add("DP clipping", "an update of norm 0", "dp_clip_factor", factor, norm=0.0, bound=1.0, differs="zero update")
adaptive = DifferentialPrivacyServerSideAdaptiveClipping(
    FedAvg(), 0.0, 4, initial_clipping_norm=1.0, target_clipped_quantile=0.5, clip_norm_lr=0.2
)
adaptive.current_arrays = ArrayRecord([np.zeros(2)])
adaptive.aggregate_train(1, [reply([np.array(move)], 1) for move in ([0.1, 0], [0.2, 0], [0.3, 0], [9.0, 0])])
C.add(
    A,
    "the next bound after 3 of 4 updates within it, gamma .5, eta .2",
    "next_clip",
    float(adaptive.clipping_norm),
    clip=1.0,
    inside=[1, 1, 1, 0],
    quantile=0.5,
    rate=0.2,
    differs="sign of the quantile",
)


# whole runs of its strategies' loop; a grid in memory trains the clients
class Grid:
    """What a strategy sends messages to."""

    def get_node_ids(self) -> list[int]:
        """Return the clients."""
        return list(range(len(whole.parts)))

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Any]:
        """Train the clients that got a message."""
        return [trained(message) for message in messages]


def trained(message: Any) -> Any:
    """Return a client's reply: full batches of SGD, with the proximal term where it is asked for."""
    client, received = message.metadata.dst_node_id, message.content["arrays"].to_numpy_ndarrays()
    x, y = whole.samples(client)
    own, mu = whole.model(), message.content["config"].get("proximal-mu", 0.0)
    with torch.no_grad():
        for parameter, value in zip(own.parameters(), received, strict=True):
            parameter.copy_(torch.tensor(value))
    first, sgd = None, torch.optim.SGD(own.parameters(), lr=whole.LR)
    for _ in range(whole.EPOCHS):
        loss = torch.nn.functional.cross_entropy(own(x), y)
        first = float(loss.detach()) if first is None else first
        for parameter, value in zip(own.parameters(), received, strict=True):
            loss = loss + mu / 2 * (parameter - torch.tensor(value)).square().sum()
        sgd.zero_grad()
        loss.backward()
        sgd.step()
    arrays = [parameter.detach().numpy() for parameter in own.parameters()]
    answer = reply(arrays, len(y), train_loss=first)
    answer.metadata = message.metadata
    return answer


TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
quarter = {"fraction": 0.25}
for name, strategy, plugins in (
    ("FedAvg", FedAvg, {}),
    ("FedProx, mu .4", partial(FedProx, proximal_mu=0.4), {"fedprox": {"mu": 0.4}}),
    ("FedAvgM, beta .5", partial(FedAvgM, server_momentum=0.5), {"fedavgm": {"beta": 0.5}}),
    ("FedTrimmedAvg, beta .25", partial(FedTrimmedAvg, beta=0.25), {"trimmed-mean": quarter}),
    ("FedMedian", FedMedian, {"median": {}}),
    ("Krum, no malicious node", partial(Krum, num_malicious_nodes=0), {"krum": {"fraction": 0.0}}),
):
    made = strategy(fraction_evaluate=0.0)
    start = ArrayRecord([parameter.detach().numpy().copy() for parameter in whole.model().parameters()])
    ended = made.start(Grid(), start, num_rounds=whole.ROUNDS).arrays.to_numpy_ndarrays()
    whole.add(C, name, np.concatenate([one.ravel() for one in ended]), plugins, cohorts=None)
C.write()
