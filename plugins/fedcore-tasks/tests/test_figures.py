"""Figures and losses against scikit-learn and torchmetrics, and the concordance index against all pairs."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

import fedcore
from fedcore import DataError
from fedcore_tasks import MultiLabel, Regression, Segmentation, Survival, SurvivalDiscrete, segmentation
from fedcore_tasks.survival import concordance_index
from fedcore_zoo import load_torchvision
from tests.sentences import raises

rng = np.random.default_rng(5)


@pytest.fixture(scope="module")
def tm():
    """torchmetrics, which takes a second to import, and which not every process that collects these tests needs."""
    load_torchvision()  # it imports it, and it may need help
    import torchmetrics.functional

    return torchmetrics.functional


def figures(task, logits, labels):
    return {name: figure.value(figure.count(logits, labels).double()) for name, figure in task.metrics.items()}


@pytest.mark.parametrize("numbers", [1, 3])
def test_regression(tm, numbers):
    y = 50 + np.array([1, 10, 100][:numbers]) * rng.normal(size=(200, numbers))
    task = Regression(Regression.read(y, 200, "y"))
    logits = torch.from_numpy(0.4 * rng.normal(size=(80, numbers)) + (y[:80] - y.mean(axis=0)) / y.std(axis=0))
    labels = Regression.read(y[:80], 80, "y")
    predicted, true = task.predict(logits).numpy().reshape(80, -1), y[:80]
    found = figures(task, logits, labels)
    assert found["rmse"] == pytest.approx(sk.root_mean_squared_error(true, predicted), rel=1e-9)
    assert found["mae"] == pytest.approx(sk.mean_absolute_error(true, predicted), rel=1e-9)
    assert found["r2"] == pytest.approx(sk.r2_score(true, predicted), rel=1e-9)
    both = torch.from_numpy(predicted), torch.from_numpy(true)
    assert found["r2"] == pytest.approx(float(tm.r2_score(*both)), rel=1e-6)
    assert found["mae"] == pytest.approx(float(tm.mean_absolute_error(*both)), rel=1e-6)


def test_r2_of_equal_targets_is_not_defined():
    task = Regression(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    same = torch.full((4,), 2.5, dtype=torch.float64)
    assert math.isnan(figures(task, torch.zeros(4, 1), same)["r2"])


@pytest.mark.parametrize("digits", [1, 9])  # with one digit many scores are equal
def test_multilabel(tm, digits):
    y = (rng.random((150, 4)) < [0.1, 0.3, 0.5, 0.8]).astype(int)
    logits = torch.from_numpy(np.round(rng.normal(size=y.shape) + y, digits))
    labels = MultiLabel.read(y, 150, "y")
    found, predicted = figures(MultiLabel(labels), logits, labels), (logits > 0).int().numpy()
    assert found["macro-f1"] == pytest.approx(sk.f1_score(y, predicted, average="macro"))
    assert found["micro-f1"] == pytest.approx(sk.f1_score(y, predicted, average="micro"))
    areas = sk.roc_auc_score(y, logits.numpy(), average=None)
    assert found["auroc"] == pytest.approx(areas.mean())
    assert [found[f"auroc-{label}"] for label in range(4)] == pytest.approx(areas)
    assert [found[f"positives-{label}"] for label in range(4)] == y.sum(axis=0).tolist()
    true = torch.from_numpy(y)
    shares = logits / 20 + 0.5  # a vectorised sigmoid makes equal scores unequal
    f1 = tm.classification.multilabel_f1_score(shares, true, 4)
    assert found["macro-f1"] == pytest.approx(float(f1), rel=1e-6)
    assert found["auroc"] == pytest.approx(float(tm.classification.multilabel_auroc(shares, true, 4)), rel=1e-6)


def test_labels_that_all_samples_have_are_left_out_of_the_mean_area():
    y = np.array([[1, 0], [1, 1], [1, 0]])
    labels = MultiLabel.read(y, 3, "y")
    found = figures(MultiLabel(labels), torch.tensor([[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]]), labels)
    assert found["auroc"] == found["auroc-1"] == 0.5
    assert math.isnan(found["auroc-0"])


def concordance_by_pairs(risk, time, event):
    """Harrell's index over all ordered pairs, as its definition says."""
    pairs = right = 0.0
    for i, j in itertools.permutations(range(len(risk)), 2):
        if event[i] and (time[i] < time[j] or (time[i] == time[j] and not event[j])):
            pairs += 1
            right += 1 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0
    return right / pairs


@pytest.mark.parametrize("digits", [0, 1, 8])
def test_the_concordance_index_against_all_pairs(digits):
    time = np.round(rng.exponential(size=120) * 5, digits)
    risk, event = np.round(-time / 5 + rng.normal(size=120), digits), rng.random(120) < 0.6
    expected = concordance_by_pairs(risk, time, event)
    assert concordance_index(risk, time, event.astype(float)) == pytest.approx(expected, rel=1e-12)
    labels = Survival.read(np.column_stack([time, event]), 120, "y")
    found = figures(Survival(labels), torch.from_numpy(risk)[:, None], labels)
    assert found == {"c-index": pytest.approx(expected, rel=1e-12)}


def test_the_concordance_index_of_a_case_by_hand():
    """Events at 1 and 3, censored at 2: the pairs are (1, 2), (1, 3)."""
    assert concordance_index(np.array([2.0, 3.0, 1.0]), np.array([1.0, 2.0, 3.0]), np.array([1, 0, 1])) == 0.5
    assert math.isnan(concordance_index(np.ones(2), np.array([1.0, 1.0]), np.array([1, 1])))


def test_numbers_of_scikit_survival():
    """Version 0.28.0 found these coefficients (Breslow's ties) and this concordance; the loss has its minimum there."""
    draws = np.random.default_rng(11)
    x = draws.normal(size=(300, 3))
    time = np.round(draws.exponential(np.exp(-x[:, 0] + 0.5 * x[:, 1])) * 5, 1)
    event = draws.random(300) < 0.6
    beta = torch.tensor([1.0179633345453565, -0.35248065124784345, 0.05426191316501842], dtype=torch.float64)
    beta.requires_grad_()
    labels = Survival.read(np.column_stack([time, event]), 300, "y")
    logits = torch.from_numpy(x) @ beta[:, None]
    Survival(labels).loss(logits, labels).backward()
    assert beta.grad.abs().max() < 1e-12
    found = concordance_index(logits.detach().numpy()[:, 0].round(1), time, event.astype(float))
    assert found == pytest.approx(0.7446435379336638, rel=1e-12)


def test_the_concordance_index_against_scikit_survival():
    sksurv = pytest.importorskip("sksurv.metrics")
    time, event = np.round(rng.exponential(size=300), 1), rng.random(300) < 0.6
    risk = np.round(rng.normal(size=300), 1)
    expected = sksurv.concordance_index_censored(event, time, risk)[0]
    assert concordance_index(risk, time, event.astype(float)) == pytest.approx(expected, rel=1e-12)


def test_the_partial_likelihood_of_a_case_by_hand():
    """Risks 0, log 2, log 3; events at 1 and 2: log(1 + 2 + 3) + log(2 + 3) - log 2, by two events."""
    labels = Survival.read(np.array([[1, 1], [2, 1], [3, 0]]), 3, "y")
    loss = Survival(labels).loss(torch.tensor([[1.0], [2.0], [3.0]]).log(), labels)
    assert float(loss) == pytest.approx((math.log(6) + math.log(5) - math.log(2)) / 2)
    none = labels * torch.tensor([1.0, 0.0])
    assert float(Survival(labels).loss(torch.ones(3, 1), none)) == 0


def test_the_likelihood_of_logistic_hazards():
    """The paper's: the product over the intervals survived, times the hazard in that of the event."""
    time, event = np.round(rng.exponential(size=200), 2), rng.random(200) < 0.6
    time[:3], event[:3] = [0, time[event].max(), 9], [True, True, False]
    labels = SurvivalDiscrete.read(np.column_stack([time, event]), 200, "y")
    task, logits = SurvivalDiscrete(labels), rng.normal(size=(200, 10))
    ends, shares, likelihood = np.array(task.ends), 1 / (1 + np.exp(-logits)), np.ones(200)
    middles = (np.array([0, *ends[:-1]]) + ends) / 2
    for i in range(200):
        survived = int((ends < time[i]).sum() if event[i] else (middles <= time[i]).sum())
        likelihood[i] = np.prod(1 - shares[i, :survived]) * (shares[i, survived] if event[i] else 1)
    assert np.bincount(np.searchsorted(ends, time[event]), minlength=10).min() > 0
    assert float(task.loss(torch.from_numpy(logits), labels)) == pytest.approx(-np.log(likelihood).mean(), rel=1e-12)
    survival = np.cumprod(1 - shares, axis=1)
    assert task.probabilities(torch.from_numpy(logits)).numpy() == pytest.approx(survival, rel=1e-9)
    risk = -np.log(survival).sum(axis=1)
    assert task.predict(torch.from_numpy(logits)).numpy() == pytest.approx(risk, rel=1e-9)
    expected = concordance_by_pairs(risk, time, event)
    assert figures(task, torch.from_numpy(logits), labels) == {"c-index": pytest.approx(expected, rel=1e-12)}


def test_events_at_one_time_have_intervals():
    """Intervals without length hold no event, and the loss stays finite."""
    labels = SurvivalDiscrete.read(np.column_stack([np.full(6, 2.0), np.ones(6)]), 6, "y")
    task, logits = SurvivalDiscrete(labels), torch.zeros(6, 10, requires_grad=True)
    task.loss(logits, labels).backward()
    assert task.ends == [2.0] * 10
    assert torch.isfinite(logits.grad).all()


def test_a_structured_array_is_read_whatever_its_order():
    y = np.array([(True, 3.0), (False, 1.5)], dtype=[("event", bool), ("time", float)])
    assert Survival.read(y, 2, "y").tolist() == [[3.0, 1.0], [1.5, 0.0]]
    assert Survival.read(y[["time", "event"]], 2, "y").tolist() == [[3.0, 1.0], [1.5, 0.0]]
    assert Survival.suits(y)


def test_segmentation():
    masks = rng.integers(0, 3, size=(6, 7, 5))
    logits = torch.from_numpy(rng.normal(size=(6, 4, 7, 5)) + 2 * np.moveaxis(np.eye(4)[masks], 3, 1))
    labels = Segmentation.read(masks, 6, "y")
    task = Segmentation(torch.cat([labels, labels + 1]))
    found, predicted = figures(task, logits, labels), logits.argmax(dim=1).numpy().ravel()
    # Class 3 is in no mask, but it is predicted.
    dice = sk.f1_score(masks.ravel(), predicted, average=None, labels=range(4))
    iou = sk.jaccard_score(masks.ravel(), predicted, average=None, labels=range(4))
    assert [found[f"dice-{one}"] for one in range(4)] == pytest.approx(dice)
    assert [found[f"iou-{one}"] for one in range(4)] == pytest.approx(iou)
    assert (found["dice"], found["iou"]) == (pytest.approx(dice.mean()), pytest.approx(iou.mean()))


def test_ignored_pixels_have_no_part_in_loss_and_figures():
    """Whatever the model says of pixels of 255 or -1; a mask of no others has a finite loss."""
    masks, logits = rng.integers(0, 3, size=(4, 5, 5)), torch.from_numpy(rng.normal(size=(4, 3, 5, 5)))
    hidden = rng.random(masks.shape) < 0.3
    masks[hidden] = 255
    labels = Segmentation.read(masks, 4, "y")
    assert torch.equal(labels, Segmentation.read(np.where(hidden, -1.0, masks), 4, "y"))
    task, other = Segmentation(labels), torch.where(torch.from_numpy(hidden)[:, None], 9 * logits.flip(1), logits)
    assert len(task.metrics) == 2 + 2 * 3
    assert task.loss(other, labels) == pytest.approx(float(task.loss(logits, labels)))
    assert figures(task, other, labels) == figures(task, logits, labels)
    true, predicted = masks[~hidden], logits.argmax(dim=1).numpy()[~hidden]
    assert figures(task, logits, labels)["dice"] == pytest.approx(sk.f1_score(true, predicted, average="macro"))
    assert torch.isfinite(task.loss(logits, torch.full_like(labels, -1)))


def test_all_figures_of_masks_are_of_one_count(monkeypatch, tmp_path):
    """A network that is evaluated on one batch counts its overlaps once."""
    monkeypatch.chdir(tmp_path)
    x, masks = rng.normal(size=(20, 6, 6)).astype(np.float32), rng.integers(0, 3, size=(20, 6, 6))
    counted, overlaps = [], segmentation._overlaps
    monkeypatch.setattr(segmentation, "_overlaps", lambda *both: counted.append(len(both[1])) or overlaps(*both))
    result = fedcore.run(dataset=(x, masks, x, masks), clients=2, rounds=1, workers=0, progress=False)
    counted.clear()
    assert len(result.task.metrics) == 8
    assert result.evaluate(x, masks)["iou-2"] == pytest.approx(result.metrics["global"]["iou-2"])
    assert counted == [20]


@pytest.mark.parametrize(
    ("task", "y", "named"),
    [
        (Regression, np.array(["a", "b"]), ("'regression'", 2, "<U1")),
        (Regression, np.array([1.0, np.nan]), ("sample 1",)),
        (Regression, np.zeros((2, 2, 2)), ("'regression'", "(2, 2, 2)")),
        (MultiLabel, np.array([[0, 2], [1, 1]]), ("'multilabel'", "(n, C)")),
        (Survival, np.array([[1.0, 2.0], [1.0, 0.0]]), ("'survival'", "(time, event)")),
        (Survival, np.array([[-1.0, 1.0], [1.0, 0.0]]), ("'survival'", "(time, event)")),
        (Survival, np.array([1.0, 2.0]), ("'survival'", "(time, event)")),
        (Segmentation, np.zeros((2, 3)), ("'segmentation'", "(2, 3)")),
        (Segmentation, -2 * np.ones((2, 3, 3), dtype=int), ("'segmentation'", "int64", "(2, 3, 3)", -2)),
        (Segmentation, np.full((2, 3, 3), 0.5), ("'segmentation'", "float64", 0.5)),
        (Segmentation, 255 * np.eye(3, dtype=np.uint8)[None].repeat(2, 0), ("masks", 0, 255, "write 1")),
    ],
)
def test_labels_of_another_kind_are_refused(task, y, named):
    with raises(DataError, "y: ", *named):
        task.read(y, 2, "y")
