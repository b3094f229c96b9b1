"""Methods that keep something on each client, FedDF and LoRA: whole rounds in NumPy's float64, from their papers.

As in :mod:`tests.oracles.papers`: written before the plugins were read, from the papers' algorithms as
``shared/spec/baselines.md`` and the cards state them. A function returns the global weights at the end, and what each
client keeps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tests.oracles.papers import (
    CLASSIFIER,
    HIDDEN,
    Array,
    Client,
    Federation,
    Weights,
    class_means,
    cross_entropies,
    features,
    gradient,
    log_softmax,
    logits,
    mean_of,
    stepped,
    trained_by_task,
)

Kept = dict[int, Weights]


def task(at: Mapping[str, Array], client: Client) -> Any:
    """Return the mean cross-entropy of a client's samples."""
    return cross_entropies(logits(at, features(at, client.x)), client.y).mean()


def task_of(client: Client) -> Callable[[Weights], Any]:
    """Return the loss of a client."""
    return lambda at: task(at, client)


def partly_stepped(loss: Callable[[Weights], Any], w: Weights, rates: Mapping[str, float]) -> Weights:
    """Return the weights after a step of those that have a rate."""
    slopes = gradient(loss, w)
    return {name: value - rates.get(name, 0.0) * slopes[name] for name, value in w.items()}


def kept_apart(
    federation: Federation,
    kept: Sequence[str],
    trained_in: Callable[[int], Sequence[str]] = lambda epoch: (*HIDDEN, *CLASSIFIER),
) -> tuple[Weights, Kept]:
    """FedAvg in which clients keep some parameters, and an epoch trains some.

    FedPer keeps the last layers, LG-FedAvg the first, FedRep the head, which is trained before the body (its
    Algorithm 1), FedBABU nothing, and trains the body alone.
    """
    w = dict(federation.start)
    own: Kept = {}
    for cohort in federation.cohorts:
        trained = []
        for number in cohort:
            at = {**w, **own.get(number, {})}
            for epoch in range(federation.epochs):
                rates = dict.fromkeys(trained_in(epoch), federation.lr)
                at = partly_stepped(task_of(federation.clients[number]), at, rates)
            own[number] = {name: at[name] for name in kept}
            trained.append(at)
        w = {**w, **mean_of(trained, federation.sizes(cohort), [name for name in w if name not in kept])}
    return w, own


def fine_tuned(federation: Federation, w: Weights, epochs: int) -> Kept:
    """FedBABU's evaluation: the global model after some epochs of plain SGD on each client's samples."""
    own: Kept = {}
    for number, client in enumerate(federation.clients):
        own[number] = dict(w)
        for _ in range(epochs):
            own[number] = stepped(task_of(client), own[number], federation.lr)
    return own


def ditto(federation: Federation, *, lam: float) -> tuple[Weights, Kept]:
    """Ditto, Algorithm 1: w by FedAvg, v_k along F_k(v_k) + lambda/2 |v_k - w_t|^2."""
    w = dict(federation.start)
    own: Kept = {}
    for cohort in federation.cohorts:
        trained = []
        for number in cohort:
            client, received = federation.clients[number], w

            def loss(at: Weights, client: Client = client, received: Weights = received) -> Any:
                return task(at, client) + lam / 2 * sum(((at[name] - received[name]) ** 2).sum() for name in at)

            for _ in range(federation.epochs):
                own[number] = stepped(loss, own.get(number, federation.start), federation.lr)
            trained.append(trained_by_task(federation, w, client))
        w = mean_of(trained, federation.sizes(cohort))
    return w, own


# --- FedBN ----------------------------------------------------------------------------------------------------

NORM = ("encoder.base.2.weight", "encoder.base.2.bias")
STATISTICS = ("encoder.base.2.running_mean", "encoder.base.2.running_var")


def fedbn(federation: Federation, *, local: bool) -> tuple[Weights, Kept]:
    """FedBN, Algorithm 1, of linear, BatchNorm and tanh: BatchNorm's parameters and statistics stay on the clients.

    :param local: False is FedAvg, in which they are averaged.
    """
    kept = (*NORM, *STATISTICS) if local else ()
    w = dict(federation.start)
    own: Kept = {}
    for cohort in federation.cohorts:
        trained = []
        for number in cohort:
            client = federation.clients[number]

            def loss(at: Weights, client: Client = client) -> Any:
                u = client.x @ at[HIDDEN[0]].T + at[HIDDEN[1]]
                spread = ((u - u.mean(axis=0)) ** 2).mean(axis=0)
                z = np.tanh((u - u.mean(axis=0)) / np.sqrt(spread + 1e-5) * at[NORM[0]] + at[NORM[1]])
                return cross_entropies(logits(at, z), client.y).mean()

            at = {**w, **own.get(number, {})}
            for _ in range(federation.epochs):
                u = client.x @ at[HIDDEN[0]].T + at[HIDDEN[1]]
                seen = dict(zip(STATISTICS, (u.mean(axis=0), u.var(axis=0, ddof=1)), strict=True))
                at = stepped(loss, at, federation.lr)
                at.update({name: 0.9 * at[name] + 0.1 * value for name, value in seen.items()})
            own[number] = {name: at[name] for name in kept}
            trained.append(at)
        w = {**w, **mean_of(trained, federation.sizes(cohort), [name for name in w if name not in kept])}
    return w, own


# --- FedCP ----------------------------------------------------------------------------------------------------

PERSONAL = ("P.weight", "P.bias")
POLICY = ("policy.weight", "policy.bias", "norm.weight", "norm.bias")


def discrepancy(a: Array, b: Array) -> Any:
    """Return MMD of two sets (n, d) with kernels exp(-d^2 / 2a), a in 10, 15, 20, 50, the diagonal included."""

    def kernels(one: Array, other: Array) -> Any:
        apart = ((one[:, None] - other[None]) ** 2).sum(axis=2)
        return sum(np.exp(-apart / (2 * width)).mean() for width in (10, 15, 20, 50))

    return kernels(a, a) + kernels(b, b) - 2 * kernels(a, b)


def policy(at: Mapping[str, Array], h: Array, context: Array, noise: Any = 0.0) -> tuple[Array, Array]:
    """Return r and s = 1 - r: the Gumbel-softmax over pairs, tau = 1, of ReLU(LN(W (h v) + b))."""
    u = (h * context) @ at[POLICY[0]].T + at[POLICY[1]]
    middle = u.mean(axis=1, keepdims=True)
    u = (u - middle) / np.sqrt(((u - middle) ** 2).mean(axis=1, keepdims=True) + 1e-5)
    u = u * at[POLICY[2]] + at[POLICY[3]]
    pairs = np.exp(np.where(u.real > 0, u, 0.0).reshape(len(u), 2, -1) + noise)
    return pairs[:, 0] / pairs.sum(axis=1), pairs[:, 1] / pairs.sum(axis=1)


def fedcp(federation: Federation, *, lam: float, context: Array, noise: Any) -> tuple[Weights, Kept]:
    """FedCP: P_i(r h) + H(s h), CE + lambda MMD(h, f_g(x)); up goes half P_i and half H as head.

    :param context: v of a client's first participation, (d,).
    :param noise: the Gumbel noise of every step, added to the pairs.
    """
    w = dict(federation.start)
    own: Kept = {}
    for cohort in federation.cohorts:
        trained = []
        for number in cohort:
            client, received = federation.clients[number], w
            first = dict(zip(PERSONAL, (federation.start[name] for name in CLASSIFIER), strict=True))
            at = {**w, **own.get(number, first)}
            v = of_rows(at[PERSONAL[0]]) if number in own else context

            def loss(at: Weights, client: Client = client, received: Weights = received, v: Array = v) -> Any:
                h = features(at, client.x)
                r, s = policy(at, h, v, noise)
                out = (r * h) @ at[PERSONAL[0]].T + at[PERSONAL[1]] + logits(received, s * h)
                return cross_entropies(out, client.y).mean() + lam * discrepancy(h, features(received, client.x))

            rates = dict.fromkeys((*HIDDEN, *PERSONAL, *POLICY), federation.lr)
            for _ in range(federation.epochs):
                at = partly_stepped(loss, at, rates)
            own[number] = {name: at[name] for name in PERSONAL}
            up = {name: at[name] for name in (*HIDDEN, *POLICY)}
            up.update({head: (at[mine] + w[head]) / 2 for head, mine in zip(CLASSIFIER, PERSONAL, strict=True)})
            trained.append(up)
        w = mean_of(trained, federation.sizes(cohort))
    return w, own


def of_rows(head: Array) -> Array:
    """Return FedCP's context: the sum of a head's rows, over its length."""
    total = head.sum(axis=0)
    context: Array = total / np.sqrt((total**2).sum())
    return context


# --- FedPAC ---------------------------------------------------------------------------------------------------


def fedpac(federation: Federation, *, lam: float, head_lr: float, head_epochs: int = 1) -> tuple[Weights, Kept]:
    """FedPAC: the head first, then the encoder with aligned features; heads are combined by a quadratic programme."""
    classes, w = federation.classes, dict(federation.start)
    own: Kept = {}
    aims, known = np.zeros((classes, 6)), np.zeros(classes, dtype=bool)
    for t, cohort in enumerate(federation.cohorts):
        trained, found, statistics = [], [], []
        for number in cohort:
            client = federation.clients[number]
            at = {**w, **own.get(number, {})}
            z = features(at, client.x)
            means, counts = class_means(z, client.y, classes)
            shares = counts / counts.sum()
            squares = np.array([(z[client.y == c] ** 2).sum() / max(counts[c], 1) for c in range(classes)])
            variance = (shares * squares - shares**2 * (means**2).sum(axis=1)).sum() / len(client.y)
            statistics.append((variance, shares[:, None] * means))
            goals = np.where(known[:, None], aims, means)[client.y]

            def loss(at: Weights, client: Client = client, goals: Array = goals, first: bool = t == 0) -> Any:
                z = features(at, client.x)
                apart = 0.0 if first else lam * ((z - goals) ** 2).mean()
                return cross_entropies(logits(at, z), client.y).mean() + apart

            for epoch in range(federation.epochs):
                head = epoch < head_epochs
                rates = dict.fromkeys(CLASSIFIER if head else HIDDEN, head_lr if head else federation.lr)
                at = partly_stepped(loss, at, rates)
            trained.append(at)
            found.append(class_means(features(at, client.x), client.y, classes))
        w = {**w, **mean_of(trained, federation.sizes(cohort), HIDDEN)}
        totals = np.sum([counts for _, counts in found], axis=0)
        sums = np.sum([counts[:, None] * means for means, counts in found], axis=0)
        aims = np.where(totals[:, None] > 0, sums / np.maximum(totals, 1)[:, None], aims)
        known = known | (totals > 0)
        for number, shares in zip(cohort, combinations(statistics), strict=True):
            own[number] = mean_of(trained, list(shares), CLASSIFIER)
    return w, own


def combinations(statistics: Sequence[tuple[float, Array]]) -> list[Array]:
    """Return each client's alpha: argmin sum_j a_j^2 V_j + sum_c |h_ic - sum_j a_j h_jc|^2 on the simplex.

    Every support is tried: the least value among those whose solution is not negative is the programme's.
    Shares below 0.001 become 0 and the others add up to 1 again, as in the authors' code.
    """
    number = len(statistics)
    variances = np.array([variance for variance, _ in statistics])
    all_h = np.stack([h.ravel() for _, h in statistics])
    chosen = []
    for own in all_h:
        apart = all_h - own  # since the shares add up to 1
        matrix = np.diag(variances) + apart @ apart.T
        best: tuple[float, Array] = (np.inf, np.zeros(number))
        for size in range(1, number + 1):
            for support in itertools.combinations(range(number), size):
                some = np.ix_(support, support)
                solution = np.linalg.lstsq(matrix[some], np.ones(size), rcond=None)[0]
                shares = np.zeros(number)
                shares[list(support)] = solution / solution.sum()
                value = float(shares @ matrix @ shares)
                if (shares >= -1e-12).all() and value < best[0]:
                    best = (value, shares)
        shares = np.where(best[1] < 0.001, 0.0, best[1])
        chosen.append(shares / shares.sum())
    return chosen


# --- FedDF and LoRA -------------------------------------------------------------------------------------------


def feddf(federation: Federation, public: Array, batches: Sequence[Sequence[Array]], lr: float) -> Weights:
    """FedDF, Algorithm 1: the mean of the models, then Adam on KL(softmax(mean logits), softmax(student)).

    :param batches: the positions of the public samples of each step, round by round.
    """
    w = dict(federation.start)
    for cohort, drawn in zip(federation.cohorts, batches, strict=True):
        trained = [trained_by_task(federation, w, federation.clients[number]) for number in cohort]
        w = mean_of(trained, federation.sizes(cohort))
        teacher = log_softmax(np.mean([logits(own, features(own, public)) for own in trained], axis=0))
        first = {name: np.zeros_like(value) for name, value in w.items()}
        second = {name: np.zeros_like(value) for name, value in w.items()}
        for step, rows in enumerate(drawn):

            def loss(at: Weights, rows: Array = rows, teacher: Array = teacher) -> Any:
                student = log_softmax(logits(at, features(at, public[rows])))
                return (np.exp(teacher[rows]) * (teacher[rows] - student)).sum(axis=1).mean()

            rate = lr * (1 + np.cos(np.pi * step / len(drawn))) / 2
            w = adam(w, gradient(loss, w), first, second, step + 1, rate)
    return w


def adam(w: Weights, slopes: Weights, first: Weights, second: Weights, number: int, lr: float) -> Weights:
    """Return the weights after a step of Adam (0.9, 0.999, 1e-8), whose moments are renewed in place."""
    moved = {}
    for name, slope in slopes.items():
        first[name] = 0.9 * first[name] + 0.1 * slope
        second[name] = 0.999 * second[name] + 0.001 * slope**2
        root = np.sqrt(second[name] / (1 - 0.999**number))
        moved[name] = w[name] - lr * first[name] / (1 - 0.9**number) / (root + 1e-8)
    return moved


ADAPTERS = ("B", "A")


def lora(federation: Federation, *, rank: int, alpha: float) -> Weights:
    """LoRA, Eq. 3: W x + (alpha / r) B A x with W frozen; FedAvg of A, B and the classifier."""
    w = dict(federation.start)
    names = (*ADAPTERS, *CLASSIFIER)
    for cohort in federation.cohorts:
        trained = []
        for number in cohort:

            def loss(at: Weights, client: Client = federation.clients[number]) -> Any:
                full = at[HIDDEN[0]] + alpha / rank * at["B"] @ at["A"]
                return task({**at, HIDDEN[0]: full}, client)

            at = dict(w)
            for _ in range(federation.epochs):
                at = partly_stepped(loss, at, dict.fromkeys(names, federation.lr))
            trained.append(at)
        w = {**w, **mean_of(trained, federation.sizes(cohort), names)}
    return w
