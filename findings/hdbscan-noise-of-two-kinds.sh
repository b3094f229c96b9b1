#!/usr/bin/env bash
# A client whose update is infinite is no noise for a clustering that finds noise.
#
# Seen with scikit-learn 1.9.1. One would guess: HDBSCAN, which labels noise -1, labels the update with infinite entries
# -1. It labels it -2 (and one with entries that are not numbers -3). A server that leaves out the clients of label -1
# keeps it, and the mean is infinite.
#
# Output seen:
#   label of the infinite update: -2
#   clusters of the others: 3
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet "scikit-learn==1.9.1" "numpy==2.4.6" "scipy==1.17.1"
"$place/env/bin/python" - <<'PY'
import numpy as np
from sklearn.cluster import HDBSCAN

draws = np.random.default_rng(0)
updates = np.concatenate([draws.normal(middle, 0.1, (10, 4)) for middle in (0, 5, 10)])
updates[0] = np.inf
labels = HDBSCAN(min_cluster_size=3, copy=True).fit_predict(updates)
print("label of the infinite update:", labels[0])
print("clusters of the others:", len(set(labels[1:].tolist())))
assert labels[0] == -2, "it is noise as other noise: the behaviour has changed"
assert len(set(labels[1:].tolist())) == 3
PY
