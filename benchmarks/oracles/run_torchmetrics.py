"""torchmetrics and scikit-learn on logits of samples, with absent classes too."""

from __future__ import annotations

import math
import warnings

import numpy as np
import torch
from cases import Fixture
from sklearn import metrics as sk
from torchmetrics import classification as tc

warnings.simplefilter("ignore")
C = Fixture(
    "torchmetrics",
    "torchmetrics, scikit-learn",
    "torchmetrics",
    source="run of the library on these samples",
    also=["scikit-learn"],
)
MEAN = "convention (fedcore: the classes that the samples have)"
C.difference(
    "absent classes count",
    "decision",
    "torchmetrics' macro mean takes a class in that is only predicted, or that no sample has, as 0; fedcore's is over "
    "the classes that the samples have.",
    follows=MEAN,
    where="torchmetrics/classification: MulticlassF1Score, MulticlassAccuracy, MulticlassAUROC",
    option="--metric torchmetrics:MulticlassF1Score and its like",
)
C.difference(
    "predicted classes count",
    "decision",
    "scikit-learn's default averages over the labels that are true or predicted; fedcore's over those that the samples "
    "have.",
    follows=MEAN,
    where="sklearn.metrics.f1_score",
    option="none; f1_score(..., labels=numpy.unique(y)) is fedcore's number",
)
C.difference(
    "AUROC of one class",
    "decision",
    "torchmetrics returns 0 with a warning where all samples have one class; fedcore's AUROC is not defined there.",
    follows="fedcore (the area has no value)",
    where="torchmetrics/classification: MulticlassAUROC",
)
M = "metrics"


def data(seed: int, n: int, k: int, absent: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and labels."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(k, (n,), generator=generator)
    for one in absent:
        y[y == one] = (one + 1) % k
    z = torch.randn(n, k, generator=generator, dtype=torch.float64) * 1.5
    z[torch.arange(n), y] += 1.0
    return (z * 100).round() / 100, y


for said, n, k, absent in (
    ("all classes", 200, 5, ()),
    ("one class absent", 200, 5, (2,)),
    ("two absent", 60, 10, (0, 9)),
):
    z, y = data(n + k, n, k, absent)
    p, top, here = z.softmax(1), z.argmax(1), {"logits": z, "labels": y}
    f1 = sk.f1_score(y, top, labels=np.unique(y), average="macro")
    f1_all, f1_torch = sk.f1_score(y, top, average="macro"), float(tc.MulticlassF1Score(k, average="macro")(p, y))
    recall, recall_torch = sk.balanced_accuracy_score(y, top), float(tc.MulticlassAccuracy(k, average="macro")(p, y))
    area = float(np.mean([sk.roc_auc_score((y == c).numpy(), p[:, c]) for c in np.unique(y)]))
    area_torch = float(tc.MulticlassAUROC(k, average="macro")(p, y))

    error = float(tc.MulticlassCalibrationError(k, n_bins=15, norm="l1")(p, y))
    absent_count, predicted_count = "absent classes count", "predicted classes count"
    for name, metric, value, tolerance, right, key in (
        ("macro F1, scikit-learn over present labels", "macro-f1", f1, 1e-6, f1, ""),
        ("macro F1, scikit-learn's default", "macro-f1", f1_all, 1e-6, f1, predicted_count),
        ("macro F1, torchmetrics", "macro-f1", f1_torch, 1e-5, f1, absent_count),
        ("balanced accuracy, scikit-learn", "balanced-accuracy", recall, 1e-6, recall, ""),
        ("balanced accuracy, torchmetrics", "balanced-accuracy", recall_torch, 1e-5, recall, absent_count),
        ("calibration error, 15 bins", "calibration-error", error, 1e-5, error, ""),
        ("AUROC, scikit-learn by class", "auroc", area, 2e-3, area, ""),
        ("AUROC, torchmetrics", "auroc", area_torch, 2e-3, area, absent_count),
    ):
        differs = key if abs(value - right) > 1e-4 else ""
        C.add(M, f"{name}, {said}", "metric_value", value, metric=metric, tolerance=tolerance, differs=differs, **here)
z, _ = data(1, 50, 3, ())
y = torch.ones(50, dtype=torch.long)
C.add(
    M,
    "AUROC, samples of one class: not defined",
    "metric_value",
    math.nan,
    metric="auroc",
    logits=z,
    labels=y,
    source="definition",
)
value = float(tc.MulticlassAUROC(3)(z.softmax(1), y))
C.add(
    M,
    "AUROC, samples of one class, torchmetrics",
    "metric_value",
    value,
    metric="auroc",
    logits=z,
    labels=y,
    differs="AUROC of one class",
)
C.write()
