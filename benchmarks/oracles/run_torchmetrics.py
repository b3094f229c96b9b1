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

    def differs(value: float, right: float, key: str) -> str:
        """Return the difference's name where there is one."""
        return key if abs(value - right) > 1e-4 else ""

    C.add(M, f"macro F1, scikit-learn over present labels, {said}", "metric_value", f1, metric="macro-f1", **here)
    C.add(
        M,
        f"macro F1, scikit-learn's default, {said}",
        "metric_value",
        f1_all,
        metric="macro-f1",
        differs=differs(f1_all, f1, "predicted classes count"),
        **here,
    )
    C.add(
        M,
        f"macro F1, torchmetrics, {said}",
        "metric_value",
        f1_torch,
        metric="macro-f1",
        tolerance=1e-5,
        differs=differs(f1_torch, f1, "absent classes count"),
        **here,
    )
    C.add(M, f"balanced accuracy, scikit-learn, {said}", "metric_value", recall, metric="balanced-accuracy", **here)
    C.add(
        M,
        f"balanced accuracy, torchmetrics, {said}",
        "metric_value",
        recall_torch,
        metric="balanced-accuracy",
        tolerance=1e-5,
        differs=differs(recall_torch, recall, "absent classes count"),
        **here,
    )
    error = float(tc.MulticlassCalibrationError(k, n_bins=15, norm="l1")(p, y))
    C.add(
        M,
        f"calibration error, 15 bins, {said}",
        "metric_value",
        error,
        metric="calibration-error",
        tolerance=1e-5,
        **here,
    )
    C.add(M, f"AUROC, scikit-learn by class, {said}", "metric_value", area, metric="auroc", tolerance=2e-3, **here)
    C.add(
        M,
        f"AUROC, torchmetrics, {said}",
        "metric_value",
        area_torch,
        metric="auroc",
        tolerance=2e-3,
        differs=differs(area_torch, area, "absent classes count"),
        **here,
    )
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
