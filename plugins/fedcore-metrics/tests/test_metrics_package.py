"""The metrics against scikit-learn and torchmetrics, on all classes and on some."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import ClassVar

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import (
    balanced_accuracy_score,
    brier_score_loss,
    cohen_kappa_score,
    f1_score,
    roc_auc_score,
    roc_curve,
)

import fedcore
from fedcore import ConfigError, Metric, PluginContractError, UnknownNameError
from fedcore_metrics import AUROC, BalancedAccuracy, BrierScore, CalibrationError, CalibrationSlope, MacroF1
from fedcore_testing import PersonalClassifier, model_bytes, small_config
from tests.sentences import raises

ALL = (MacroF1, BalancedAccuracy, AUROC, CalibrationError, BrierScore, CalibrationSlope)
NAMES = ["macro-f1", "balanced-accuracy", "auroc", "ece", "brier", "calibration-slope"]


def drawn(classes, samples, scale=4.0, seed=0):
    """Return logits that are right more often than not, and labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (samples,), generator=generator)
    sure = torch.rand(samples, 1, generator=generator) * torch.eye(classes)[labels]
    return scale * (torch.randn(samples, classes, generator=generator) / 2 + sure), labels


def value(metric, logits, labels):
    return metric.value(metric.count(logits, labels).double())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("classes", "samples"), [(2, 300), (10, 360), (100, 5000)])
@pytest.mark.parametrize("scale", [1.0, 4.0, 12.0])
def test_all_classes_against_scikit_learn(classes, samples, scale):
    logits, labels = drawn(classes, samples, scale)
    shares, predicted = logits.double().softmax(dim=1).numpy(), logits.argmax(dim=1)
    assert value(MacroF1(classes), logits, labels) == pytest.approx(f1_score(labels, predicted, average="macro"))
    assert value(BalancedAccuracy(classes), logits, labels) == pytest.approx(balanced_accuracy_score(labels, predicted))
    scores = shares[:, 1] if classes == 2 else shares
    exact = roc_auc_score(labels, scores, multi_class="ovr", average="macro")
    assert abs(value(AUROC(classes), logits, labels) - exact) < 2e-3
    bins = np.minimum((15 * shares.max(axis=1)).astype(int), 14)
    right = (predicted == labels).numpy()
    gaps = [abs((shares.max(axis=1) - right)[bins == number].sum()) for number in range(15)]
    assert value(CalibrationError(classes), logits, labels) == pytest.approx(sum(gaps) / samples)


def slopes_of(shares, labels):
    odds = np.log(shares / (1 - shares))
    fits = (LogisticRegression(C=np.inf, tol=1e-8).fit(odds[:, [c]], labels == c) for c in range(odds.shape[1]))
    return [fit.coef_[0, 0] for fit in fits]


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_brier_score_and_calibration_slope_against_scikit_learn(classes, scale):
    logits, labels = drawn(classes, 3000, scale)
    shares = logits.double().softmax(dim=1).numpy()
    of_second = shares[:, 1]
    if classes == 2:
        brier = brier_score_loss(labels, of_second)
    else:
        brier = sum(brier_score_loss(labels == c, shares[:, c]) for c in range(classes))
    assert value(BrierScore(classes), logits, labels) == pytest.approx(brier)
    slopes = slopes_of(shares, labels)
    assert value(CalibrationSlope(classes), logits, labels) == pytest.approx(np.mean(slopes), rel=2e-3)
    too_sure = value(CalibrationSlope(classes), 3 * logits, labels)
    if classes == 2:  # there the log-odds are three times as large
        assert too_sure == pytest.approx(np.mean(slopes) / 3, rel=5e-3)
    assert too_sure < value(CalibrationSlope(classes), logits, labels)


def test_a_class_that_is_hardly_predicted_has_a_slope():
    """All its log-odds are far below 0, so that the intercept is large: steps overshot, and the metric was nan."""
    logits, labels = drawn(3, 2000)
    logits[:, 0] -= 8
    expected = np.mean(slopes_of(logits.double().softmax(dim=1).numpy(), labels))
    assert value(CalibrationSlope(3), logits, labels) == pytest.approx(expected, rel=5e-3)


def test_a_score_that_parts_two_classes_has_no_slope():
    logits = torch.tensor([[0.0, 2.0], [0.0, 1.0], [0.0, -1.0], [0.0, -3.0]])
    assert math.isnan(value(CalibrationSlope(2), logits, torch.tensor([1, 1, 0, 0])))
    assert math.isnan(value(CalibrationSlope(2), logits, torch.tensor([1, 1, 1, 1])))


@pytest.mark.parametrize("classes", [2, 4])
def test_the_roc_curve_against_scikit_learn(classes):
    logits, labels = drawn(classes, 2000)
    metric = AUROC(classes)
    points = metric.curve(metric.count(logits, labels).double())
    shares, grid = logits.double().softmax(dim=1).numpy(), np.linspace(0, 1, 101)
    exact = []
    for c in [1] if classes == 2 else range(classes):
        false, true, _ = roc_curve(labels == c, shares[:, c])
        exact.append(np.interp(grid, false, true))
    assert points["x"] == pytest.approx(grid)
    assert np.abs(np.mean(exact, axis=0) - points["y"]).max() < 0.01
    assert np.trapezoid(points["y"], grid) == pytest.approx(value(metric, logits, labels), abs=5e-3)
    assert metric.curve(torch.zeros(metric.shape)) == {}


def test_the_reliability_diagram_has_accuracy_and_confidence_of_each_bin():
    logits, labels = drawn(3, 500)
    metric = CalibrationError(3)
    points = metric.curve(metric.count(logits, labels).double())
    confidence, predicted = logits.double().softmax(dim=1).max(dim=1)
    inside = (confidence >= 10 / 15) & (confidence < 11 / 15)
    assert points["x"][10] == pytest.approx(float(confidence[inside].mean()))
    assert points["y"][10] == pytest.approx(float((predicted == labels)[inside].double().mean()))
    assert math.isnan(points["y"][2]), "no confidence is below a third"


def test_classes_without_samples_are_left_out():
    logits, labels = drawn(6, 400)
    present = labels < 4  # classes 4 and 5 are predicted, and have no samples
    logits, labels = logits[present], labels[present]
    predicted, shares = logits.argmax(dim=1), logits.double().softmax(dim=1).numpy()
    assert (predicted >= 4).any()
    assert value(MacroF1(6), logits, labels) == pytest.approx(
        f1_score(labels, predicted, average="macro", labels=range(4))
    )
    recall = [(predicted == label)[labels == label].double().mean() for label in range(4)]
    assert value(BalancedAccuracy(6), logits, labels) == pytest.approx(np.mean(recall))
    areas = [roc_auc_score(labels == label, shares[:, label]) for label in range(4)]
    assert value(AUROC(6), logits, labels) == pytest.approx(np.mean(areas), abs=2e-3)


def test_one_sample():
    logits, label = torch.tensor([[0.0, 2.0, 0.0]]), torch.tensor([1])
    confidence = float(logits.softmax(dim=1).max())
    assert [value(metric(3), logits, label) for metric in ALL[:2]] == [1.0, 1.0]
    assert math.isnan(value(AUROC(3), logits, label)), "one class has no order"
    assert value(CalibrationError(3), logits, label) == pytest.approx(1 - confidence)
    assert math.isnan(value(CalibrationSlope(3), logits, label))


@pytest.mark.parametrize("metric", ALL)
def test_counts_add_up_over_any_split(metric):
    logits, labels = drawn(5, 200)
    made = metric(5)
    parts = sum(made.count(logits[part], labels[part]) for part in torch.arange(200).split(23))
    torch.testing.assert_close(parts, made.count(logits, labels))
    assert made.value(parts.double()) == pytest.approx(value(made, logits, labels))


@pytest.mark.parametrize("metric", ALL)
def test_no_counts_and_no_logits_make_a_metric_raise(metric):
    made = metric(3)
    for counts in (torch.zeros(made.shape), -torch.ones(made.shape), torch.ones(made.shape) * 1e38):
        assert isinstance(made.value(counts.double()), float | None)
    for content in (math.nan, math.inf, -math.inf, 1e30):
        counts = made.count(torch.full((4, 3), content), torch.tensor([0, 1, 2, 2]))
        assert isinstance(made.value(counts.double()), float | None)


def test_extreme_logits_keep_their_order():
    """Probabilities above 1 - 1e-8 are told apart."""
    labels = torch.arange(100) % 2
    logits = torch.stack([torch.zeros(100), 18 + 0.6 * (labels == 1)], dim=1)
    assert value(AUROC(2), logits, labels) == 1.0
    assert value(AUROC(2), 100 * logits, labels) == 0.5, "the shares of both are 1"


def test_a_run(tmp_path):
    """All of them in a run with clients of few classes; workers change no bit, and neither do the metrics."""
    options = {"client_test_fraction": 0.2, "partition": "classes", "rounds": 1, "alpha": 0.1}
    runs = [
        fedcore.run(small_config(tmp_path, PersonalClassifier, **options, **more), progress=False)
        for more in ({"metrics": NAMES}, {"metrics": NAMES, "workers": 2}, {})
    ]
    assert runs[0].metrics == runs[1].metrics
    assert model_bytes(runs[0]) == model_bytes(runs[2])
    assert set(NAMES) <= set(runs[0].metrics["personal"])
    assert 0.5 < runs[0].metrics["personal"]["auroc_mean"] <= 1
    result = fedcore.run(small_config(tmp_path, rounds=1, metrics=NAMES), progress=False)
    digits = fedcore.data.load_dataset("digits", None).test
    labels, rows = digits.labels.numpy(), digits.gather(torch.arange(len(digits)))
    with torch.inference_mode():
        shares = result.model(rows)[1].softmax(dim=1).numpy()
    row = result.metrics["global"]
    assert row["macro-f1"] == pytest.approx(f1_score(labels, shares.argmax(axis=1), average="macro"))
    assert row["balanced-accuracy"] == pytest.approx(balanced_accuracy_score(labels, shares.argmax(axis=1)))
    assert row["auroc"] == pytest.approx(roc_auc_score(labels, shares, multi_class="ovr"), abs=2e-3)
    assert result.evaluate(digits)["ece"] == row["ece"]


class Right(Metric):
    """The share of right predictions; with ``Wrong`` it is counted once."""

    shared = "right-or-wrong"
    seen: ClassVar[list[tuple[type, int]]] = []

    def count(self, logits, labels):
        self.seen.append((type(self), len(labels)))
        right = (logits.argmax(dim=1) == labels).sum()
        return torch.stack([right, len(labels) - right])

    def value(self, counts):
        return float(counts[0] / counts.sum())


class Wrong(Right):
    def value(self, counts):
        return float(counts[1] / counts.sum())


class Halved(Right):
    def count(self, logits, labels):
        return super().count(logits, labels) / torch.tensor(2.0, dtype=torch.float64)


def test_metrics_of_the_same_counts_are_counted_once(tmp_path):
    Right.seen.clear()
    row = fedcore.run(small_config(tmp_path, rounds=1), metrics=[Right, Wrong], progress=False).metrics["global"]
    assert row["Right"] == pytest.approx(row["accuracy"])
    assert row["Wrong"] == pytest.approx(1 - row["accuracy"])
    assert len({kind for kind, samples in Right.seen if samples > 2}) == 1


def test_other_counts_under_the_same_name_are_refused(tmp_path):
    with raises(PluginContractError, "Halved", "shared='right-or-wrong'"):
        fedcore.run(small_config(tmp_path, rounds=1), metrics=[Right, Halved], progress=False)


@pytest.fixture(scope="module")
def torchmetrics():
    if find_spec("torchmetrics") is None:
        pytest.skip("torchmetrics is not installed")
    from fedcore_metrics import of_torchmetrics  # first: alone, torchmetrics fails where torchvision does not fit torch

    return of_torchmetrics.torchmetrics


def test_metrics_of_torchmetrics(torchmetrics, tmp_path):
    from fedcore_metrics.of_torchmetrics import OfTorchmetrics, by_name

    logits, labels = drawn(10, 360)
    kappa = by_name("MulticlassCohenKappa")(10)
    parts = sum(kappa.count(logits[part], labels[part]) for part in torch.arange(360).split(50))
    assert kappa.value(parts) == pytest.approx(cohen_kappa_score(labels, logits.argmax(dim=1)), abs=1e-6)
    assert by_name("MulticlassHammingDistance")(10).lower_is_better
    assert kappa.lower_is_better is False
    neither = type("Neither", (torchmetrics.classification.MulticlassAccuracy,), {"higher_is_better": None})
    assert OfTorchmetrics(neither(10), 10).lower_is_better is None
    name = "torchmetrics:MulticlassCohenKappa"
    one, two = (
        fedcore.run(small_config(tmp_path, rounds=1, metrics=name, workers=workers), progress=False)
        for workers in (0, 1)
    )
    assert one.metrics == two.metrics
    assert 0 < one.metrics["global"]["MulticlassCohenKappa"] < one.accuracy


def test_what_is_no_sum_or_no_number_is_refused(torchmetrics):
    from fedcore_metrics.of_torchmetrics import OfTorchmetrics, by_name

    for name, says in (  # with more, which torchmetrics and Python say
        ("ConfusionMatrix", "does not compute one number .*function of your own"),
        ("StatScores", "does not compute one number"),
        ("FBetaScore", "cannot be made without options .*'beta'.*function of your own"),
    ):
        with pytest.raises(ConfigError, match=says):
            by_name(f"Multiclass{name}")(10)
    with raises(ConfigError, "MulticlassAUROC", "'preds'"):
        by_name("MulticlassAUROC")(10)
    with raises(UnknownNameError, "'MulticlassF1Score'"):
        by_name("MulticlassF1")
    logits, labels = drawn(10, 2000)
    binned = OfTorchmetrics(torchmetrics.classification.MulticlassAUROC(10, thresholds=200), 10)
    exact = roc_auc_score(labels, logits.softmax(dim=1), multi_class="ovr")
    assert value(binned, logits, labels) == pytest.approx(exact, abs=0.01)


def test_own_definitions_agree_with_torchmetrics(torchmetrics):
    logits, labels = drawn(10, 2000)
    reference = torchmetrics.classification.MulticlassCalibrationError(10, n_bins=15)
    assert value(CalibrationError(10), logits, labels) == pytest.approx(float(reference(logits, labels)), abs=1e-6)
