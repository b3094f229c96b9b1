"""FedAvg and SCAFFOLD of five rounds with unequal clients against loops in NumPy's float64, for each task."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

import fedcore
from fedcore import SplitModel
from fedcore_tasks import (
    MultiLabel,
    Regression,
    RegressionHuber,
    RegressionL1,
    Segmentation,
    Survival,
    SurvivalDiscrete,
    TaskFigure,
)
from tests.sentences import raises

PARTS = [range(8), range(8, 30), range(30, 36)]
ROUNDS, STEPS, LR = 5, 2, 0.1
rng = np.random.default_rng(3)
X = rng.normal(size=(48, 4)).astype(np.float32)
IMAGES = rng.normal(size=(48, 1, 5, 6)).astype(np.float32)
SIGNAL = X @ rng.normal(size=(4, 2)) + 0.3 * rng.normal(size=(48, 2))
TIMES = np.round(np.exp(-SIGNAL[:, 0]), 1)  # some are equal


class OnPixels(SplitModel):
    def make_classifier(self, feature_dim):
        return nn.Conv2d(feature_dim, self.num_classes, 1)


class Doubled(nn.Module):
    def forward(self, x):
        return x.double()


def linear(num_classes, input_shape):
    """One linear layer from 0 in float64, on the samples or on each pixel."""
    kind = OnPixels if len(input_shape) == 3 else SplitModel
    model = kind(Doubled(), input_shape[0], num_classes)
    model.classifier = model.make_classifier(input_shape[0])
    nn.init.zeros_(model.classifier.weight)
    nn.init.zeros_(model.classifier.bias)
    return model.double()


def squared(targets, logits):
    return 2 * (logits - targets) / targets.size


def absolute(targets, logits):
    return np.sign(logits - targets) / targets.size


def huber(targets, logits):
    return np.clip(logits - targets, -1, 1) / targets.size


def binary(labels, logits):
    return (1 / (1 + np.exp(-logits)) - labels) / labels.size


def cox(labels, logits):
    (time, event), risk, found = labels.T, logits[:, 0], np.zeros(len(labels))
    for i in np.flatnonzero(event):
        watched = np.exp(risk) * (time >= time[i])
        found += watched / watched.sum()
        found[i] -= 1
    return (found / max(1, event.sum()))[:, None]


def hazards(labels, logits):
    """Logistic hazards of ten intervals, sample by sample and interval by interval."""
    clients = EVENTS[[place for part in PARTS for place in part]]
    ends = np.quantile(clients[clients[:, 1] > 0, 0], np.arange(1, 11) / 10)
    starts, slope = np.array([0, *ends[:-1]]), np.zeros_like(logits)
    for i, (time, event) in enumerate(labels):
        for j, (start, end) in enumerate(zip(starts, ends, strict=True)):
            share = 1 / (1 + np.exp(-logits[i, j]))
            if event and (time > start or j == 0) and time <= end:
                slope[i, j] = share - 1
            elif time > end if event else time >= (start + end) / 2:
                slope[i, j] = share
    return slope / len(labels)


def pixels(masks, logits):
    """Cross-entropy and Dice; logits are (n, C, H, W)."""
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    y = np.moveaxis(np.eye(logits.shape[1])[masks], 3, 1)
    both, all_of = (p * y).sum((0, 2, 3), keepdims=True), (p + y).sum((0, 2, 3), keepdims=True) + 1
    of_p = -(2 * y * all_of - (2 * both + 1)) / all_of**2 / logits.shape[1]
    return (p - y) / masks.size + p * (of_p - (of_p * p).sum(axis=1, keepdims=True))


def standard(y):
    rows = y.reshape(len(y), -1)
    clients = rows[[place for part in PARTS for place in part]]
    return (rows - clients.mean(axis=0)) / clients.std(axis=0)


NUMBERS = 40 + 7 * SIGNAL
LABELS = (SIGNAL > 0.3).astype(int)
EVENTS = np.column_stack([TIMES, rng.random(48) < 0.7])
MASKS = (IMAGES[:, 0] > 0.2).astype(int) + (IMAGES[:, 0] > 1)
CASES = {
    "regression": (X, NUMBERS, standard(NUMBERS), squared),
    "regression of one number": (X, NUMBERS[:, 0], standard(NUMBERS[:, 0]), squared),
    "regression-l1": (X, NUMBERS, standard(NUMBERS), absolute),
    "regression-huber": (X, NUMBERS, standard(NUMBERS), huber),
    "multilabel": (X, LABELS, LABELS, binary),
    "multilabel of one logit": (X, LABELS[:, 0], LABELS[:, :1], binary),
    "survival": (X, EVENTS, EVENTS, cox),
    "survival-discrete": (X, EVENTS, EVENTS, hazards),
    "segmentation": (IMAGES, MASKS, MASKS, pixels),
}


def normalised(x):
    """Images are normalised by the training images' statistics, in float32."""
    return (
        x if x.ndim == 2 else (x - np.float32(x[:36].mean(dtype=np.float64))) / np.float32(x[:36].std(dtype=np.float64))
    )


def by_hand(x, targets, gradient, *, controls):
    """Return weight (C, d) and bias (C,) after the rounds."""
    x = normalised(x).astype(np.float64)
    classes = 3 if targets.ndim == 3 else {cox: 1, hazards: 10}.get(gradient, targets.shape[1])
    others = (0, *range(2, x.ndim))
    w, b = np.zeros((classes, x.shape[1])), np.zeros(classes)
    shares = np.array([len(part) for part in PARTS]) / 36
    own, common = [(np.zeros_like(w), np.zeros_like(b)) for _ in PARTS], (np.zeros_like(w), np.zeros_like(b))
    for _ in range(ROUNDS):
        ends = []
        for client, part in enumerate(PARTS):
            v, c, rows = w.copy(), b.copy(), [*part]
            fix = [common[k] - own[client][k] if controls else 0 for k in range(2)]
            for _ in range(STEPS):
                logits = np.einsum("cd,nd...->nc...", v, x[rows]) + c.reshape(1, -1, *[1] * (x.ndim - 2))
                slope = gradient(targets[rows], logits)
                v = v - LR * (np.tensordot(slope, x[rows], axes=[others, others]) + fix[0])
                c = c - LR * (slope.sum(axis=others) + fix[1])
            ends.append((v, c))
            if controls:
                moved = [(start - end) / (STEPS * LR) for start, end in zip((w, b), (v, c), strict=True)]
                own[client] = tuple(step - f for step, f in zip(moved, fix, strict=True))
        w, b = (sum(share * end[k] for share, end in zip(shares, ends, strict=True)) for k in range(2))
        common = tuple(sum(share * c[k] for share, c in zip(shares, own, strict=True)) for k in range(2))
    return w, b


def trained(case, **options):
    x, y, *_ = CASES[case]
    settings = {"rounds": ROUNDS, "local_epochs": STEPS, "batch_size": 1000, "lr": LR, "momentum": 0.0}
    settings |= {"weight_decay": 0.0, "workers": 0, "eval_every": ROUNDS, "task": case.split()[0], "device": "cpu"}
    data = (x[:36], y[:36], x[36:], y[36:])
    return fedcore.run(model=linear, dataset=data, partition=PARTS, progress=False, **settings | options)


@pytest.fixture(params=CASES)
def case(request):
    return request.param


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_five_rounds(case, method):
    x, _, targets, gradient = CASES[case]
    result = trained(case, plugins=[] if method == "fedavg" else [method])
    weight, bias = by_hand(x, targets, gradient, controls=method == "scaffold")
    state = {name: tensor.numpy() for name, tensor in result.model.state_dict().items()}
    assert np.abs(weight).max() > 0.02
    np.testing.assert_allclose(state["classifier.weight"].reshape(weight.shape), weight, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(state["classifier.bias"], bias, rtol=1e-9, atol=1e-12)


def test_the_figures_of_a_result_are_those_of_its_predictions(case):
    """Predictions come in the units of the labels, and the summary, ``evaluate`` and ``predict`` agree."""
    x, y, *_ = CASES[case]
    result = trained(case, client_test_fraction=0.0)
    again = result.evaluate(x[36:], y[36:])
    assert again == result.metrics["global"]
    predicted = result.predict(x[36:])
    if case.startswith("survival"):
        assert predicted.shape == (12,)
        if case == "survival-discrete":
            assert (np.diff(result.predict_proba(x[36:]), axis=1) < 0).all()
        return
    assert predicted.shape == y[36:].shape
    if case.startswith("regression"):
        errors = predicted - y[36:]
        assert again["rmse"] == pytest.approx(np.sqrt((errors**2).mean(axis=0)).mean(), rel=1e-9)
        assert again["mae"] == pytest.approx(np.abs(errors).mean(), rel=1e-9)
        assert abs(predicted.mean() - 40) < 10
        with raises(fedcore.ConfigError, f"'{result.config.task}'", "result.predict"):
            result.predict_proba(x[36:])
    else:
        shares = result.predict_proba(x[36:])
        assert 0 <= shares.min() <= shares.max() <= 1


def test_targets_are_standardised_by_the_training_parts_alone():
    """Held-out samples have no part in the statistics."""
    result = trained("regression of one number", client_test_fraction=0.3)
    train = json.loads((result.directory / "partition.json").read_text())["train"]
    kept = NUMBERS[[place for part in train for place in part], 0]
    assert len(kept) < 36
    assert (result.task.mean, result.task.std) == ([pytest.approx(kept.mean())], [pytest.approx(kept.std())])


def test_intervals_are_of_the_training_parts_alone():
    result = trained("survival-discrete", client_test_fraction=0.3)
    train = json.loads((result.directory / "partition.json").read_text())["train"]
    kept = EVENTS[[place for part in train for place in part]]
    assert result.task.ends == pytest.approx(np.quantile(kept[kept[:, 1] > 0, 0], np.arange(1, 11) / 10))
    assert result.task.ends[-1] < EVENTS[EVENTS[:, 1] > 0, 0].max()


@pytest.mark.parametrize(
    "cls", [Regression, RegressionL1, RegressionHuber, MultiLabel, Survival, SurvivalDiscrete, Segmentation]
)
def test_counts_of_chunks_add_up(cls):
    """The figures of all samples are those of their parts together, whatever the parts are."""
    generator = torch.Generator().manual_seed(1)
    y = {"multilabel": LABELS, "segmentation": MASKS}.get(cls.name, EVENTS if issubclass(cls, Survival) else NUMBERS)
    labels = cls.read(y, 48, "y")
    task = cls(labels)
    logits = torch.randn(48, task.width(labels), *task.grid, generator=generator)
    for name, figure in task.metrics.items():
        assert isinstance(figure, TaskFigure)
        parts = [figure.count(logits[rows], labels[rows]).double() for rows in torch.arange(48).split([1, 30, 17])]
        assert all(part.shape[1:] == figure.shape[1:] for part in parts)
        joined = torch.cat(parts) if figure.by_row else sum(parts)
        assert figure.value(joined) == pytest.approx(
            figure.value(figure.count(logits, labels).double()), nan_ok=True
        ), name
