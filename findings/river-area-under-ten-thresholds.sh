#!/usr/bin/env bash
# A stream's area under the ROC curve is 0.08 lower than that of the same scores.
#
# Seen with river 0.26.1. One would guess: ROCAUC with its defaults is within 0.01 of scikit-learn's on 2,000 scores. It
# has ten thresholds, evenly spread from 0 to 1; scores of a rare class lie between the first two or three, and the curve
# has hardly a point there. n_thresholds=1000 comes close.
#
# Output seen:
#   scikit-learn: 0.8377
#   river, ten thresholds: 0.7589
#   river, a thousand: 0.8376
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet "river==0.26.1" "scikit-learn==1.9.1" "numpy==2.4.6" "scipy==1.17.1" "pandas==3.1.1"
"$place/env/bin/python" - <<'PY'
import numpy as np
from river import metrics
from sklearn.metrics import roc_auc_score

draws = np.random.default_rng(0)
labels = draws.random(2000) < 0.1
scores = 1 / (1 + np.exp(-(draws.standard_normal(2000) + 1.5 * labels - 3)))
few, many = metrics.ROCAUC(), metrics.ROCAUC(n_thresholds=1000)
for label, score in zip(labels.tolist(), scores.tolist()):
    few.update(label, score)
    many.update(label, score)
exact = roc_auc_score(labels, scores)
print(f"scikit-learn: {exact:.4f}")
print(f"river, ten thresholds: {few.get():.4f}")
print(f"river, a thousand: {many.get():.4f}")
assert exact - few.get() > 0.05, "the area is near: the behaviour has changed"
assert abs(exact - many.get()) < 0.01
PY
