"""What combined methods compute, against a loop in float64 that knows nothing of plugins."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedcore import SplitModel, generator
from fedcore.data import Dataset, ResidentSamples
from fedcore_testing import (
    Cohorts,
    client_state,
    federate,
    initial_weights,
    partition_of,
    small_config,
    weights,
)

COHORTS = [[0, 1], [1, 2], [0, 2]]
"""Clients come and go, so that states and own layers wait."""
EPOCHS, BATCH, LR, MOMENTUM, DECAY = 2, 4, 0.1, 0.9, 1e-2
HEAD, NORM = "classifier.", "encoder.base.2."


def clusters(data_dir=None) -> Dataset:
    """Three noisy classes with six inputs."""
    stream = np.random.default_rng(0)
    labels = stream.integers(0, 3, 60)
    inputs = torch.tensor(np.eye(3, 6)[labels] + stream.normal(size=(60, 6)), dtype=torch.float32).view(60, 1, 1, 6)
    train, test = (
        ResidentSamples(inputs[part], torch.tensor(labels[part]), [0.0], [1.0]) for part in (slice(40), slice(40, 60))
    )
    return Dataset("clusters", train, test, num_classes=3, input_shape=(1, 1, 6))


def unequal(labels, num_clients, **_):
    return [np.arange(20), np.arange(20, 30), np.arange(30, 40)]


def normalised(num_classes, input_shape):
    layers = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh())
    return SplitModel(layers, 5, num_classes)


class Loop:
    """Federated averaging with the parts that a combination asks for.

    :param keep: the starts of the names that stay on each client.
    :param mu: FedProx's; ``moon`` MOON's, with temperature 0.5; ``pull`` Ditto's lambda; None for a run without.
    :param controls: whether SCAFFOLD's control variates correct the gradients.
    :param beta: the server's momentum.
    :param levels: QSGD's s; the movements of a client share one norm.
    :param virtual: USCC's features per class, on which the classifier learns for two epochs after the last round.
    """

    mu = moon = pull = levels = virtual = None
    controls, beta = False, 0.0

    def __init__(self, start, samples, keep=(), **parts):
        vars(self).update(parts, samples=samples)
        self.model = normalised(3, None).double()
        self.w = {name: value.double() if value.is_floating_point() else value for name, value in start.items()}
        self.named = dict(self.model.named_parameters())
        kept = [name for name in start if name.startswith(tuple(keep))]
        self.shared = [name for name in self.named if name not in kept]
        self.own = [{name: self.w[name] for name in kept} for _ in samples]
        self.previous, self.personal, self.c_own = ([{} for _ in samples] for _ in range(3))
        self.c, self.velocity = ({name: torch.zeros_like(self.w[name]) for name in self.shared} for _ in range(2))

    def features(self, state, x):
        model = copy.deepcopy(self.model)
        model.load_state_dict(state)
        with torch.no_grad():
            return model.eval()(x).features

    def step(self, model, loss, speed):
        named = dict(model.named_parameters())
        gradients = torch.autograd.grad(loss, list(named.values()))
        with torch.no_grad():
            for (name, p), g in zip(named.items(), gradients):
                speed[name] = MOMENTUM * speed.get(name, 0) + g + DECAY * p
                p.sub_(LR * speed[name])

    def train(self, number, k):
        (x, y), start = self.samples[k], {**self.w, **self.own[k]}
        self.model.load_state_dict(start)
        personal = copy.deepcopy(self.model)
        personal.load_state_dict(self.personal[k] or start)
        known = {name: torch.zeros_like(start[name]) for name in self.shared} | self.c_own[k]
        speeds, norm, velocity = ({}, {}), 0.0, 0.0
        for epoch in range(EPOCHS):
            order = torch.randperm(len(y), generator=generator(0, f"shuffle/{epoch}", round=number, client=k))
            for rows in order.split(BATCH):
                z, logits = self.model.train()(x[rows])
                loss = F.cross_entropy(logits, y[rows])
                if self.mu is not None:
                    loss = loss + self.mu / 2 * sum((self.named[n] - start[n]).square().sum() for n in self.shared)
                if self.moon is not None and self.previous[k]:
                    near, far = (self.features(state, x[rows]) for state in (start, self.previous[k]))
                    cosines = torch.stack([F.cosine_similarity(z, near), F.cosine_similarity(z, far)], dim=1)
                    loss = loss - self.moon * (cosines / 0.5).log_softmax(dim=1)[:, 0].mean()
                if self.controls:
                    loss = loss + sum(((self.c[n] - known[n]) * self.named[n]).sum() for n in self.shared)
                self.step(self.model, loss, speeds[0])
                velocity = MOMENTUM * velocity + 1
                norm += velocity
                if self.pull is not None:
                    away = sum((p - start[n]).square().sum() for n, p in personal.named_parameters())
                    risk = F.cross_entropy(personal.train()(x[rows]).logits, y[rows])
                    self.step(personal, risk + self.pull / 2 * away, speeds[1])
        end = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        self.own[k] = {name: end[name] for name in self.own[k]}
        self.previous[k], self.personal[k] = end, copy.deepcopy(personal.state_dict())
        change = {n: (start[n] - end[n]) / (LR * norm) - self.c[n] for n in self.shared}  # of c_i
        self.c_own[k] = {n: known[n] + change[n] for n in self.shared}
        return (end if self.levels is None else {**end, **self.rounded(start, end, number, k)}), change

    def rounded(self, start, end, number, k):
        """Return w + Q(y - w) by name (QSGD, Section 3.1)."""
        moves = torch.cat([(end[n] - start[n]).flatten() for n in self.shared])
        place = moves.abs() / moves.norm() * self.levels
        up = torch.rand(len(moves), generator=generator(0, "qsgd", round=number, client=k)) < place - place.floor()
        sent = (place.floor() + up) * moves.sign() * moves.norm() / self.levels
        parts = sent.split([start[n].numel() for n in self.shared])
        return {n: start[n] + part.view_as(start[n]) for n, part in zip(self.shared, parts)}

    def correct(self):
        """Train the classifier on draws from the Gaussians of the pooled features (FedECCR, Algorithm 2)."""
        features = torch.cat([self.features({**self.w, **self.own[k]}, x) for k, (x, _) in enumerate(self.samples)])
        y, stream, drawn = torch.cat([y for _, y in self.samples]), generator(0, "uscc", round=len(COHORTS)), []
        for c in range(3):
            of_class = features[y == c].numpy()
            values, vectors = np.linalg.eigh(np.cov(of_class.T))
            root = torch.tensor(vectors * np.sqrt(values.clip(0)) @ vectors.T)
            noise = torch.randn(self.virtual, 5, generator=stream, dtype=torch.float64)
            drawn.append(torch.tensor(of_class.mean(0)) + noise @ root)
        labels, head = torch.arange(3).repeat_interleave(self.virtual), copy.deepcopy(self.model.classifier)
        head.load_state_dict({n.removeprefix(HEAD): w for n, w in self.w.items() if n.startswith(HEAD)})
        seed = generator(0, "retrain", round=len(COHORTS)).initial_seed()
        stream, optimizer = torch.Generator().manual_seed(seed), torch.optim.SGD(head.parameters(), lr=0.1)
        for _ in range(2):
            for rows in torch.randperm(len(labels), generator=stream).split(64):
                optimizer.zero_grad()
                F.cross_entropy(head(torch.cat(drawn)[rows]), labels[rows]).backward()
                optimizer.step()
        self.w |= {f"{HEAD}{name}": tensor for name, tensor in head.state_dict().items()}

    def run(self):
        sizes = [len(y) for _, y in self.samples]
        for number, cohort in enumerate(COHORTS):
            total, ended = sum(sizes[k] for k in cohort), {k: self.train(number, k) for k in cohort}
            mean = {n: sum(sizes[k] / total * ended[k][0][n] for k in cohort) for n in self.w}
            mean |= {n: max(ended[k][0][n] for k in cohort) for n, w in self.w.items() if not w.is_floating_point()}
            for n in self.shared:
                self.velocity[n] = self.beta * self.velocity[n] + self.w[n] - mean[n]
                self.c[n] = self.c[n] + sum(sizes[k] / sum(sizes) * ended[k][1][n] for k in cohort)
            self.w = {**self.w, **mean, **{n: self.w[n] - self.velocity[n] for n in self.shared}}
        if self.virtual is not None:
            self.correct()
        return self


PLUGINS = {
    "fedper": {},
    "fedbn": {},
    "fedprox": {"mu": 0.5},
    "moon": {"mu": 1.0, "projection": False},
    "ditto": {"lambda": 1.0},
    "scaffold": {},
    "fedavgm": {"beta": 0.9},
    "qsgd": {},
    "uscc": {"per_class": 40, "epochs": 2, "lr": 0.1},
}
PARTS = {
    "fedprox": {"mu": 0.5},
    "moon": {"moon": 1.0},
    "ditto": {"pull": 1.0},
    "scaffold": {"controls": True},
    "fedavgm": {"beta": 0.9},
    "qsgd": {"levels": 7},
    "uscc": {"virtual": 40},
}


@pytest.mark.parametrize(
    "names",
    [
        ("fedprox", "fedper"),
        ("moon", "fedper", "fedbn"),
        ("scaffold", "fedbn", "fedper"),
        ("moon", "fedprox", "scaffold", "fedavgm"),
        ("ditto", "fedper", "fedprox"),
        ("fedavgm", "ditto", "fedbn", "scaffold"),
        ("scaffold", "qsgd", "fedbn"),
        ("fedbn", "uscc", "moon"),
        ("uscc", "fedavgm", "qsgd"),
    ],
    ids="+".join,
)
def test_a_combined_run_is_the_loop_with_these_parts(tmp_path, names):
    options = {"dataset": clusters, "model": normalised, "partition": unequal, "clients": 3, "rounds": len(COHORTS)}
    options |= {"local_epochs": EPOCHS, "batch_size": BATCH, "lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY}
    plugins = [(name, PLUGINS[name]) for name in names]
    result = federate(tmp_path, *plugins, (Cohorts, {"rounds": COHORTS}), client_test_fraction=0.2, **options)

    train, parts = clusters().train, partition_of(result).train
    samples = [(train.gather(parts[k]).double(), train.labels[parts[k]]) for k in range(3)]
    keep = [start for name, start in (("fedper", HEAD), ("fedbn", NORM)) if name in names]
    given = {option: value for name in names for option, value in PARTS.get(name, {}).items()}
    loop = Loop(initial_weights(small_config(tmp_path, *plugins, **options)), samples, keep, **given).run()

    def equal(found, expected):
        np.testing.assert_allclose(found.double().numpy(), expected.numpy(), atol=1e-5)

    final = weights(result)
    for name in loop.shared:
        equal(final[name], loop.w[name])
    for k in range(3):
        states = client_state(result, k)
        for name, value in loop.own[k].items():
            equal(states["fedcore"][f"personal/{name}"], value)
        if "ditto" in names:
            assert set(states["ditto"]) == set(loop.w)
            for name, value in states["ditto"].items():
                equal(value, loop.personal[k][name])
