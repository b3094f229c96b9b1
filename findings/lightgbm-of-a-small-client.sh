#!/usr/bin/env bash
# A client with twenty samples trains a model that predicts one number.
#
# Seen with lightgbm 4.7.0. One would guess: the default classifier learns something from 20 samples whose label is the
# sign of a feature. A leaf needs min_child_samples=20 samples, so no tree is split: every prediction is the share of the
# label. It says so with verbose output alone. min_child_samples=1 predicts all of them.
#
# Output seen:
#   defaults: predictions [0.55], accuracy 0.55
#   min_child_samples=1: accuracy 1.0
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet "lightgbm==4.7.0" "scikit-learn==1.9.1" "numpy==2.4.6" "scipy==1.17.1"
"$place/env/bin/python" - <<'PY'
import warnings

import numpy as np
from lightgbm import LGBMClassifier

warnings.simplefilter("ignore")
x = np.random.default_rng(0).standard_normal((20, 3))
y = (x[:, 0] > 0).astype(int)
plain = LGBMClassifier(verbose=-1).fit(x, y)
small = LGBMClassifier(verbose=-1, min_child_samples=1).fit(x, y)
predicted = np.unique(plain.predict_proba(x)[:, 1].round(4))
print(f"defaults: predictions {predicted.tolist()}, accuracy {plain.score(x, y)}")
print(f"min_child_samples=1: accuracy {small.score(x, y)}")
assert len(predicted) == 1, "the model learns: the behaviour has changed"
assert small.score(x, y) > 0.9
PY
