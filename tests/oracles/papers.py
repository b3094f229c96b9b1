"""Methods whose papers no library computes: whole rounds in NumPy's float64, from the papers' text alone.

Whoever wrote this had not read the plugins, only their cards and the names of their options. A gradient is that of the
whole loss by a complex step: exact to rounding, and nothing is differentiated by hand. All clients take full batches of
plain SGD, so a local epoch is a step. A model is the hidden layer of tanh of ``fedcore_testing.hidden_tanh`` and a
linear classifier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Weights = dict[str, Array]

HIDDEN = ("encoder.base.1.weight", "encoder.base.1.bias")
CLASSIFIER = ("classifier.weight", "classifier.bias")


@dataclass(frozen=True)
class Client:
    """A client's samples: inputs (n, d) and labels (n,)."""

    x: Array
    y: Array

    def counts(self, classes: int) -> Array:
        """Return the samples of each class."""
        return np.bincount(self.y, minlength=classes)


@dataclass(frozen=True)
class Federation:
    """Clients, the clients of each round, the model at the start, and how clients train."""

    clients: Sequence[Client]
    cohorts: Sequence[Sequence[int]]
    start: Weights
    epochs: int
    lr: float
    classes: int = 3

    @property
    def rounds(self) -> int:
        """T."""
        return len(self.cohorts)

    def sizes(self, cohort: Sequence[int]) -> list[int]:
        """Return how many samples each of these clients has."""
        return [len(self.clients[number].y) for number in cohort]


def features(w: Mapping[str, Array], x: Array) -> Array:
    """Return z (n, 6)."""
    return np.tanh(x @ w[HIDDEN[0]].T + w[HIDDEN[1]])


def logits(w: Mapping[str, Array], z: Array) -> Array:
    """Return the classifier's outputs (n, C)."""
    return z @ w[CLASSIFIER[0]].T + w[CLASSIFIER[1]]


def log_softmax(s: Array) -> Array:
    """Return the logarithms of the probabilities, row by row."""
    s = s - s.real.max(axis=1, keepdims=True)
    return s - np.log(np.exp(s).sum(axis=1, keepdims=True))


def cross_entropies(s: Array, y: Array) -> Array:
    """Return each row's cross-entropy."""
    return -log_softmax(s)[np.arange(len(y)), y]


def cosines(a: Array, b: Array) -> Array:
    """Return the cosine of each row of a with each row of b."""
    lengths = np.sqrt((a * a).sum(axis=1))[:, None] * np.sqrt((b * b).sum(axis=1))[None, :]
    return (a @ b.T) / lengths


def rowwise(a: Array, b: Array) -> Array:
    """Return the cosine of each row of a with the same row of b."""
    return (a * b).sum(axis=1) / (np.sqrt((a * a).sum(axis=1)) * np.sqrt((b * b).sum(axis=1)))


def gradient(loss: Callable[[Weights], Any], w: Mapping[str, Array]) -> Weights:
    """Return the derivative of an analytic loss by each number, by a complex step of 1e-30."""
    found = {name: np.zeros_like(value) for name, value in w.items()}
    moved: Weights = {name: value.astype(complex) for name, value in w.items()}
    for name, value in moved.items():
        for place in np.ndindex(value.shape):
            value[place] += 1e-30j
            found[name][place] = complex(loss(moved)).imag / 1e-30
            value[place] = value[place].real
    return found


def stepped(loss: Callable[[Weights], Any], w: Weights, lr: float) -> Weights:
    """Return the weights after a step."""
    slopes = gradient(loss, w)
    return {name: value - lr * slopes[name] for name, value in w.items()}


def mean_of(models: Sequence[Weights], shares: Sequence[float], names: Sequence[str] | None = None) -> Weights:
    """Return the weighted mean of models."""
    total = sum(shares)
    return {
        name: sum(share / total * model[name] for share, model in zip(shares, models, strict=True))
        for name in names or models[0]
    }


def class_means(z: Array, y: Array, classes: int) -> tuple[Array, Array]:
    """Return the mean feature of each class, 0 where there is none, and the counts."""
    counts = np.bincount(y, minlength=classes)
    sums = np.stack([z[y == one].sum(axis=0) for one in range(classes)])
    return sums / np.maximum(counts, 1)[:, None], counts


# --- FedProc (Mu et al.), and FedECCR's stage 1 ---------------------------------------------------------------


def prototype_contrast(
    federation: Federation,
    *,
    first: str = "contrast",
    weights: str = "clients",
    temperature: float = 1.0,
    alpha: float | None = None,
    factor: float = 1.0,
) -> Weights:
    """FedProc, Algorithm 1: alpha l_gpc + (1 - alpha) l_ce with alpha = 1 - t/T, and prototypes next to the model.

    With a temperature it is FedECCR's stage 1 (Algorithm 1 there).

    :param first: how c^0 comes about, which the paper leaves open: ``contrast`` with the cohort's prototypes under
        w^0, or ``task``, a first round of cross-entropy alone.
    :param weights: line 9's mean over clients, of those that have the class, or over samples.
    """
    classes, w = federation.classes, dict(federation.start)
    known, prototypes = np.zeros(classes, dtype=bool), np.zeros((classes, 6))

    def pooled(found: Sequence[tuple[Array, Array]]) -> None:
        shares = np.stack([counts if weights == "samples" else counts > 0 for _, counts in found]).astype(float)
        held = shares.sum(axis=0) > 0
        means = np.einsum("kc,kcd->cd", shares, np.stack([mean for mean, _ in found]))
        prototypes[held] = means[held] / shares.sum(axis=0)[held, None]
        known[held] = True

    for t, cohort in enumerate(federation.cohorts):
        clients = [federation.clients[number] for number in cohort]
        if t == 0 and first == "contrast":
            pooled([class_means(features(w, client.x), client.y, classes) for client in clients])
        share = 1 - t / federation.rounds if alpha is None else alpha
        if t == 0 and first == "task":
            share = 0.0
        trained, found = [], []
        for client in clients:

            def loss(at: Weights, client: Client = client, share: float = share) -> Any:
                z = features(at, client.x)
                ce = cross_entropies(logits(at, z), client.y).mean()
                if share == 0:
                    return ce
                of_known = np.flatnonzero(known)
                place = {int(one): number for number, one in enumerate(of_known)}
                near = log_softmax(cosines(z, prototypes[of_known]) / temperature)
                gpc = sum(-near[row, place[int(y)]] for row, y in enumerate(client.y) if known[y]) / len(client.y)
                return share * factor * gpc + (1 - share) * ce

            own = dict(w)
            for _ in range(federation.epochs):
                own = stepped(loss, own, federation.lr)
            trained.append(own)
            found.append(class_means(features(own, client.x), client.y, classes))
        w = mean_of(trained, [len(client.y) for client in clients])
        pooled(found)
    return w


# --- FedECCR's stage 2, USCC ----------------------------------------------------------------------------------


def corrected_classifier(
    federation: Federation, w: Weights, per_class: int, lr: float, draws: np.random.Generator
) -> Weights:
    """One epoch of one batch of simulated features: N(mu_c, Sigma_c) of all clients' features (Eqs. 4 to 7)."""
    z = np.concatenate([features(w, client.x) for client in federation.clients])
    y = np.concatenate([client.y for client in federation.clients])
    rows = [
        draws.multivariate_normal(z[y == one].mean(axis=0), np.cov(z[y == one].T), per_class, method="eigh")
        for one in range(federation.classes)
    ]
    labels = np.repeat(np.arange(federation.classes), per_class)
    held = {name: w[name] for name in CLASSIFIER}
    return stepped(lambda at: cross_entropies(logits(at, np.concatenate(rows)), labels).mean(), held, lr)


# --- FDCL -----------------------------------------------------------------------------------------------------


def fdcl(federation: Federation, *, mu: float, temperature: float, outputs: str = "probabilities") -> Weights:
    """FDCL: L_task + mu (L_e + L_c) against the received model g and the client's own model p of its last round.

    L_e draws features to g and away from p, L_c draws the classifier's outputs to p and away from g.
    """

    def shown(at: Mapping[str, Array], x: Array) -> tuple[Array, Array]:
        z = features(at, x)
        s = logits(at, z)
        return z, np.exp(log_softmax(s)) if outputs == "probabilities" else s

    w, before = dict(federation.start), {}
    for cohort in federation.cohorts:
        trained = []
        for number in cohort:
            client, previous, received = federation.clients[number], before.get(number), w

            def loss(
                at: Weights, client: Client = client, previous: Any = previous, received: Weights = received
            ) -> Any:
                z, out = shown(at, client.x)
                task = cross_entropies(logits(at, z), client.y).mean()
                if previous is None:
                    return task
                (z_g, out_g), (z_p, out_p) = shown(received, client.x), shown(previous, client.x)
                near_g, near_p = (np.exp(rowwise(z, other) / temperature) for other in (z_g, z_p))
                encoder = -np.log(near_g / (near_g + near_p)).mean()
                near_g, near_p = (np.exp(rowwise(out, other) / temperature) for other in (out_g, out_p))
                return task + mu * (encoder - np.log(near_p / (near_g + near_p)).mean())

            own = dict(w)
            for _ in range(federation.epochs):
                own = stepped(loss, own, federation.lr)
            before[number] = own
            trained.append(own)
        w = mean_of(trained, federation.sizes(cohort))
    return w


# --- FedCME ---------------------------------------------------------------------------------------------------


def matching(cohort: Sequence[int], vectors: Mapping[int, Array], classes: int) -> list[tuple[int, int]]:
    """Pair clients whose evaluation vectors are least alike, those far from the mean first (Section IV.A)."""
    of = {number: vectors.get(number, np.zeros(classes)) for number in sorted(cohort)}

    def cosine(a: Array, b: Array) -> float:
        lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
        return float(a @ b) / lengths if lengths > 0 else 0.0

    middle = np.mean(list(of.values()), axis=0)
    left = sorted(of, key=lambda number: (cosine(of[number], middle), number))
    pairs = []
    while len(left) > 1:
        one = left.pop(0)
        other = min(left, key=lambda number: (cosine(of[one], of[number]), number))
        left.remove(other)
        pairs.append((one, other))
    return pairs


def fedcme(federation: Federation, *, mu: float) -> Weights:
    """FedCME, Algorithms 1 and 2: partners swap classifiers at epoch floor(E/2); features are drawn to global ones."""
    classes, w, vectors = federation.classes, dict(federation.start), {}
    aim: dict[int, Array] = {}
    for cohort in federation.cohorts:
        models = {number: dict(w) for number in cohort}
        sums = {number: np.zeros((classes, 6)) for number in cohort}
        pairs = matching(cohort, vectors, classes)
        for epoch in range(federation.epochs):
            if epoch == federation.epochs // 2 and epoch > 0:
                for one, other in pairs:
                    for name in CLASSIFIER:
                        models[one][name], models[other][name] = models[other][name], models[one][name]
            for number in cohort:
                client = federation.clients[number]
                z = features(models[number], client.x)
                for label in range(classes):
                    sums[number][label] += z[client.y == label].sum(axis=0)

                def loss(at: Weights, client: Client = client, aim: dict[int, Array] = aim) -> Any:
                    z = features(at, client.x)
                    apart = sum(
                        ((z[client.y == label].mean(axis=0) - goal) ** 2).sum()
                        for label, goal in aim.items()
                        if (client.y == label).any()
                    )
                    return cross_entropies(logits(at, z), client.y).mean() + mu * apart

                models[number] = stepped(loss, models[number], federation.lr)
        own: dict[int, dict[int, Array]] = {}
        for number in cohort:
            client = federation.clients[number]
            counts = client.counts(classes)
            means = {
                label: sums[number][label] / (federation.epochs * counts[label]) for label in np.flatnonzero(counts)
            }
            own[number] = {int(label): mean for label, mean in means.items()}
            hit = logits(models[number], features(models[number], client.x)).argmax(axis=1) == client.y
            vectors[number] = np.array(
                [hit[client.y == label].mean() if counts[label] else 0.0 for label in range(classes)]
            )
        renewed = {}
        for label in range(classes):
            # Algorithm 1, lines 30 to 35: a client without the class counts with the global feature that it got
            known = [own[number].get(label, aim.get(label)) for number in cohort]
            held = [value for value in known if value is not None]
            if held:
                renewed[label] = np.mean(held, axis=0)
        aim = renewed
        w = mean_of([models[number] for number in cohort], federation.sizes(cohort))
    return w


# --- FedCD ----------------------------------------------------------------------------------------------------


@dataclass
class _Known:
    """Prototypes (C, M, d) and their counts (C, M); those of count 0 are not known."""

    prototypes: Array
    counts: Array

    def rows(self) -> tuple[Array, Array, Array]:
        """Return the known prototypes (n, d), and each one's class and fine class."""
        c, m = np.nonzero(self.counts)
        return self.prototypes[c, m], c, m


def fedcd(
    federation: Federation,
    *,
    gamma: float,
    lam: float,
    xi: float,
    alpha: float,
    temperature: float = 1.0,
    fine: int = 1,
) -> Weights:
    """FedCD, Eqs. 1 to 15, with M = ``fine``.

    The rebalanced set is read as the card says by default: the mean over a batch's samples, plus the mean of the global
    prototypes by their counts. In round 0 there are none; after it they are the centres of k-means.
    """
    classes, w = federation.classes, dict(federation.start)
    whole: _Known | None = None
    merge = np.repeat(np.eye(classes), fine, axis=0)  # W of Eq. 6
    for t, cohort in enumerate(federation.cohorts):
        mu, trained, sent = 1 - t / federation.rounds, [], []
        for number in cohort:
            client = federation.clients[number]

            def loss(at: Weights, client: Client = client, mu: float = mu, w: Weights = w, whole: Any = whole) -> Any:
                z = features(at, client.x)
                present = np.unique(client.y)
                middles = np.stack([z[client.y == label].mean(axis=0) for label in present])
                bpr = cross_entropies(logits(w, middles) @ merge, present).mean()
                parts = [(z, client.y, fine_classes(z, client.y, whole), np.ones(len(z)))]
                if whole is not None:
                    rows, c, m = whole.rows()
                    parts.append((rows, c, m, whole.counts[c, m]))
                dcl = hpc = gid = 0.0
                for rows, y, own, importance in parts:
                    share = importance / importance.sum()
                    student, teacher = logits(at, rows) @ merge, logits(w, rows.real) @ merge
                    dcl = dcl + (share * cross_entropies(student, y)).sum()
                    gid = gid + (share * decoupled(teacher, student, y, xi)).sum()
                    if whole is not None:
                        near = similarities(rows, _Known(at["prototypes"], whole.counts))
                        psi = np.exp(near / temperature) * (whole.counts > 0)
                        every = np.arange(len(y))
                        positive, of_class = psi[every, y, own], psi[every, y].sum(axis=1)
                        negative = psi.sum(axis=(1, 2)) - of_class
                        below = positive + alpha * (of_class - positive) + (1 - alpha) * negative
                        has = whole.counts[y, own] > 0  # other samples add nothing, and stay in the divisor
                        hpc = hpc - (share * np.where(has, np.log(np.where(has, positive / below, 1.0)), 0.0)).sum()
                return mu * dcl + (1 - mu) * hpc + gamma * bpr + lam * gid

            own = {**w, **({} if whole is None else {"prototypes": whole.prototypes.copy()})}
            for _ in range(federation.epochs):
                own = stepped(loss, own, federation.lr)
            z = features(own, client.x)
            centres = first_prototypes(z, client.y, classes, fine)
            if whole is not None:
                counts = np.zeros((classes, fine), dtype=int)
                np.add.at(counts, (client.y, fine_classes(z, client.y, whole)), 1)
                known = whole.counts.any(axis=1)  # a class that no cohort had starts from k-means, in any round
                rows = np.where(known[:, None, None], own.pop("prototypes"), centres.prototypes)
                centres = _Known(rows, np.where(known[:, None], counts, centres.counts))
            sent.append(centres)
            trained.append(own)
        totals = np.sum([one.counts for one in sent], axis=0)
        pooled = np.sum([one.counts[..., None] * one.prototypes for one in sent], axis=0)
        pooled = pooled / np.maximum(totals, 1)[..., None]
        if whole is not None:
            pooled = np.where(totals[..., None] > 0, pooled, whole.prototypes)
            totals = np.where(totals > 0, totals, whole.counts)
        whole = _Known(pooled, totals)
        sizes = federation.sizes(cohort)
        w = mean_of(trained, sizes)
        rows, c, m = whole.rows()
        for row, j in zip(rows, c * fine + m, strict=True):
            sure = [np.exp(log_softmax(logits(model, row[None])))[0, j] for model in trained]  # Eq. 13
            shares = np.exp(sure) / np.exp(sure).sum()  # Eq. 14
            for name in CLASSIFIER:
                w[name][j] = sum(share * model[name][j] for share, model in zip(shares, trained, strict=True))
    return w


def fine_classes(z: Array, y: Array, whole: _Known | None) -> Array:
    """Return each sample's fine class, Eq. 2: the most similar known prototype of its class; 0 where none is."""
    if whole is None:
        return np.zeros(len(y), dtype=int)
    similar = similarities(z.real, whole)
    return np.where(whole.counts > 0, similar, -2.0)[np.arange(len(y)), y].argmax(axis=1)


def similarities(z: Array, whole: _Known) -> Array:
    """Return the cosine of each row with each prototype (n, C, M), those of count 0 with no meaning."""
    known = np.where(whole.counts[..., None] > 0, whole.prototypes, 1.0)
    return cosines(z, known.reshape(-1, z.shape[1])).reshape(-1, *whole.counts.shape)


def first_prototypes(z: Array, y: Array, classes: int, fine: int) -> _Known:
    """Return the centres of k-means with k = 1 or 2, of each class: of all ways to split it, the least squares.

    The centres come in the order of their first samples.
    """
    known = _Known(np.zeros((classes, fine, z.shape[1])), np.zeros((classes, fine), dtype=int))
    for label in np.unique(y):
        rows = z[y == label]
        ways = [np.zeros(len(rows), dtype=int)]
        if fine == 2 and len(rows) > 1:  # the first sample is of the first centre; the last way is none
            ways = [(way >> np.arange(len(rows))) & 1 for way in range(2, 2 ** len(rows), 2)]

        def squares(way: Array, rows: Array = rows) -> float:
            return float(sum(((rows[way == m] - rows[way == m].mean(axis=0)) ** 2).sum() for m in np.unique(way)))

        way = min(ways, key=squares)
        for m in np.unique(way):
            known.prototypes[label, m], known.counts[label, m] = rows[way == m].mean(axis=0), (way == m).sum()
    return known


def decoupled(teacher: Array, student: Array, y: Array, xi: float) -> Array:
    """Return DKD of each row (Eq. 8): KL of (target, rest), plus xi times KL of the others among themselves."""
    rows, log_t, log_s = np.arange(len(y)), log_softmax(teacher), log_softmax(student)
    p, q = np.exp(log_t[rows, y]), np.exp(log_s[rows, y])
    target = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    others = np.ones(teacher.shape, dtype=bool)
    others[rows, y] = False
    few = teacher.shape[1] - 1
    rest_t, rest_s = (log_softmax(s[others].reshape(-1, few)) for s in (teacher, student))
    return target + xi * (np.exp(rest_t) * (rest_t - rest_s)).sum(axis=1)


# --- FLTrust and IFCA -----------------------------------------------------------------------------------------


def trained_by_task(federation: Federation, start: Weights, client: Client) -> Weights:
    """Return the weights after a client's local steps along the cross-entropy."""
    own = dict(start)
    for _ in range(federation.epochs):
        own = stepped(
            lambda at: cross_entropies(logits(at, features(at, client.x)), client.y).mean(), own, federation.lr
        )
    return own


def class_weighted(federation: Federation) -> Weights:
    """FedAvg on the cross-entropy in which class c counts n / (K n_c), by all clients' samples."""
    counts = np.sum([client.counts(federation.classes) for client in federation.clients], axis=0)
    weights, w = counts.sum() / (federation.classes * counts), dict(federation.start)
    for cohort in federation.cohorts:
        trained = []
        for number in cohort:

            def loss(at: Weights, client: Client = federation.clients[number]) -> Any:
                return (weights[client.y] * cross_entropies(logits(at, features(at, client.x)), client.y)).mean()

            own = dict(w)
            for _ in range(federation.epochs):
                own = stepped(loss, own, federation.lr)
            trained.append(own)
        w = mean_of(trained, federation.sizes(cohort))
    return w


def fltrust(federation: Federation, root: Client) -> Weights:
    """FLTrust, Algorithm 2: trust scores max(0, cos(g_i, g_0)), updates scaled to |g_0|, their mean by the scores."""
    w = dict(federation.start)

    def flat(model: Weights) -> Array:
        return np.concatenate([(model[name] - w[name]).ravel() for name in sorted(w)])

    for cohort in federation.cohorts:
        own = flat(trained_by_task(federation, w, root))
        moves = [flat(trained_by_task(federation, w, federation.clients[number])) for number in cohort]
        scores = [max(0.0, float(g @ own) / float(np.linalg.norm(g) * np.linalg.norm(own))) for g in moves]
        step = sum(score * np.linalg.norm(own) / np.linalg.norm(g) * g for score, g in zip(scores, moves, strict=True))
        step, place, renewed = step / sum(scores), 0, {}
        for name in sorted(w):
            renewed[name] = w[name] + step[place : place + w[name].size].reshape(w[name].shape)
            place += w[name].size
        w = renewed
    return w


def ifca(federation: Federation, models: Sequence[Weights]) -> tuple[list[Weights], list[list[int]]]:
    """IFCA, Algorithm 1 with model averaging, by samples: also which model each client of a round chose."""
    models, chosen = [dict(model) for model in models], []
    for cohort in federation.cohorts:
        trained: list[list[tuple[Weights, int]]] = [[] for _ in models]
        chosen.append([])
        for number in cohort:
            client = federation.clients[number]
            losses = [float(cross_entropies(logits(w, features(w, client.x)), client.y).mean()) for w in models]
            best = int(np.argmin(losses))
            chosen[-1].append(best)
            trained[best].append((trained_by_task(federation, models[best], client), len(client.y)))
        models = [
            mean_of([own for own, _ in some], [n for _, n in some]) if some else model
            for model, some in zip(models, trained, strict=True)
        ]
    return models, chosen


# --- FedGen ---------------------------------------------------------------------------------------------------

GENERATOR = ("hidden.weight", "hidden.bias", "norm.weight", "norm.bias", "out.weight", "out.bias")


def fedgen(
    federation: Federation,
    generator: Weights,
    *,
    alpha: float,
    beta: float,
    eta: float,
    decay: float,
    lr: float,
    weight_decay: float,
    of_server: Callable[[int, Array], Iterable[tuple[Array, Array]]],
    of_client: Callable[[int, int, Array], Iterable[tuple[Array, Array, Array]]],
) -> tuple[Weights, Weights]:
    """FedGen with the authors' latent loss: the global weights and the generator at the end.

    :param generator: its weights at the start; its running statistics begin at 0 and 1.
    :param of_server: the labels and the noise of each of the generator's steps in a round, given the known classes.
    :param of_client: for a round and a client, given the known classes, of each of its steps: labels and noise of
        generated features, and the noise of the features that its own samples are compared with.
    """
    classes, w = federation.classes, dict(federation.start)
    made = {**generator, "norm.mean": np.zeros_like(generator["norm.bias"])}
    made["norm.variance"] = np.ones_like(generator["norm.bias"])
    known = np.zeros(classes, dtype=bool)
    first = {name: np.zeros_like(generator[name]) for name in GENERATOR}
    second = {name: np.zeros_like(generator[name]) for name in GENERATOR}
    steps = 0
    for t, cohort in enumerate(federation.cohorts):
        trained, factor = [], decay**t
        for number in cohort:
            client, own = federation.clients[number], dict(w)
            drawn = list(of_client(t, number, np.flatnonzero(known))) if t else [None] * federation.epochs
            for step in range(federation.epochs):

                def loss(
                    at: Weights,
                    client: Client = client,
                    draw: Any = drawn[step],
                    factor: float = factor,
                    k: Array = known,
                ) -> Any:
                    s = logits(at, features(at, client.x))
                    ce = cross_entropies(s, client.y).mean()
                    if draw is None:
                        return ce
                    y, noise, other = draw
                    fresh = logits(at, generated_features(made, noise, y, classes, train=False))
                    compared = logits(at, generated_features(made, other, client.y, classes, train=False)).real
                    kl = consistency(s, compared, k[client.y])
                    return ce + factor * (alpha * cross_entropies(fresh, y).mean() + beta * kl)

                own = stepped(loss, own, federation.lr)
            trained.append(own)
        counts = np.stack([federation.clients[number].counts(classes) for number in cohort])
        held = counts.sum(axis=0) > 0
        for y, noise in of_server(t, np.flatnonzero(held)):
            steps += 1

            def loss(at: Weights, y: Array = y, noise: Array = noise, trained: Any = trained, n: Array = counts) -> Any:
                rows = generated_features(at, noise, y, classes)
                return consensus([logits(own, rows) for own in trained], y, n) + eta * diversity(noise, rows)

            slopes = gradient(loss, {name: made[name] for name in GENERATOR})
            u = np.concatenate([noise, np.eye(classes)[y]], axis=1) @ made["hidden.weight"].T + made["hidden.bias"]
            for name, slope in slopes.items():
                slope = slope + weight_decay * made[name]
                first[name] = 0.9 * first[name] + 0.1 * slope
                second[name] = 0.999 * second[name] + 0.001 * slope**2
                root = np.sqrt(second[name] / (1 - 0.999**steps)) + 1e-8
                made[name] = made[name] - lr * factor * first[name] / (1 - 0.9**steps) / root
            made["norm.mean"] = 0.9 * made["norm.mean"] + 0.1 * u.mean(axis=0)
            made["norm.variance"] = 0.9 * made["norm.variance"] + 0.1 * u.var(axis=0, ddof=1)
        known |= held
        w = mean_of(trained, federation.sizes(cohort))
    return w, made


def generated_features(
    generator: Mapping[str, Array], noise: Array, y: Array, classes: int, *, train: bool = True
) -> Array:
    """Return G(eps, y): linear, batch normalisation, ReLU, linear, of noise and the label's indicator."""
    hidden = (
        np.concatenate([noise, np.eye(classes)[y]], axis=1) @ generator["hidden.weight"].T + generator["hidden.bias"]
    )
    middle = hidden.mean(axis=0) if train else generator["norm.mean"]
    spread = ((hidden - middle) ** 2).mean(axis=0) if train else generator["norm.variance"]
    hidden = (hidden - middle) / np.sqrt(spread + 1e-5) * generator["norm.weight"] + generator["norm.bias"]
    return np.where(hidden.real > 0, hidden, 0.0) @ generator["out.weight"].T + generator["out.bias"]


def consensus(outputs: Sequence[Array], y: Array, counts: Array) -> Any:
    """Return the clients' cross-entropies of generated features, each by its share of the label's samples."""
    shares = counts / np.maximum(counts.sum(axis=0), 1)
    return sum((shares[k][y] * cross_entropies(s, y)).mean() for k, s in enumerate(outputs))


def diversity(noise: Array, rows: Array) -> Any:
    """Return exp(-mean over pairs of |x_i - x_j| |eps_i - eps_j|^2), both as means over their entries."""
    apart = rows[:, None] - rows[None]
    apart = np.where(apart.real < 0, -apart, apart).mean(axis=2)
    drawn = ((noise[:, None] - noise[None]) ** 2).mean(axis=2)
    return np.exp(-(apart * drawn).mean())


def consistency(s: Array, generated: Array, known: Array) -> Any:
    """Return the mean of KL(prediction of a generated feature of the label, prediction), 0 for unknown labels."""
    log_p, log_q = log_softmax(generated), log_softmax(s)
    return ((np.exp(log_p) * (log_p - log_q)).sum(axis=1) * known).mean()


# --- Equations of single terms --------------------------------------------------------------------------------


def not_true_distillation(local: Array, received: Array, y: Array, temperature: float) -> float:
    """FedNTD: KL of the received model's prediction among the classes that are not true and the local one's."""
    others = np.ones(local.shape, dtype=bool)
    others[np.arange(len(y)), y] = False
    log_q, log_p = (log_softmax(s[others].reshape(len(y), -1) / temperature) for s in (local, received))
    return float((np.exp(log_p) * (log_p - log_q)).sum(axis=1).mean())


def simplex(classes: int) -> Array:
    """FedETF: the products of the rows, C / (C - 1) (I - 1 1' / C)."""
    return classes / (classes - 1) * (np.eye(classes) - 1 / classes)


def first_neighbours(points: Array) -> list[list[int]]:
    """FINCH, Eq. 1: components of the graph in which each point is tied to the most similar one."""
    similar = cosines(points, points)
    np.fill_diagonal(similar, -2)
    groups = [{number, int(similar[number].argmax())} for number in range(len(points))]
    for _ in points:
        for one in groups:
            for other in groups:
                if one & other:
                    one |= other
    return sorted({tuple(sorted(group)) for group in groups})  # type: ignore[return-value]


def margin_contrast(sent: Array, y: Array, prototypes: Array, margin: float) -> float:
    """FedTGP, Eq. 6: -log of exp(-(d_y + margin)) among these and the others' exp(-d_c), d Euclidean."""
    apart = np.sqrt(((sent[:, None] - prototypes[None]) ** 2).sum(axis=2))
    apart[np.arange(len(y)), y] += margin
    return float(cross_entropies(-apart, y).mean())
