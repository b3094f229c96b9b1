#!/usr/bin/env bash
# A bootstrap interval of seeds that all gave the same accuracy is not a number.
#
# Seen with scipy 1.17.1. One would guess: both bounds are that accuracy. The default method, BCa, divides by the
# third moment of the leave-one-out means, which is 0, so both bounds are not a number; a DegenerateDataWarning says so.
# method="percentile" gives the accuracy. Small test sets and converged methods give equal accuracies.
#
# Output seen:
#   BCa: nan nan
#   percentile: 0.8 0.8
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet "scipy==1.17.1" "numpy==2.4.6"
"$place/env/bin/python" - <<'PY'
import warnings

import numpy as np
from scipy.stats import bootstrap

warnings.simplefilter("ignore")
seeds = (np.full(5, 0.8),)
bounds = bootstrap(seeds, np.mean).confidence_interval
plain = bootstrap(seeds, np.mean, method="percentile").confidence_interval
print("BCa:", bounds.low, bounds.high)
print("percentile:", plain.low, plain.high)
assert np.isnan(bounds.low), "the bounds are numbers: the behaviour has changed"
assert np.isclose(plain.low, 0.8)
PY
