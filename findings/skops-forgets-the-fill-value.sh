#!/usr/bin/env bash
# A masked array that skops wrote comes back with another fill value.
#
# Seen with skops 0.16.0. One would guess: a masked array keeps its mask and its fill value. It keeps the mask; the fill
# value is numpy's default again, 1e20, and filled() gives other numbers than before. Nothing is said.
#
# Output seen:
#   before: [1.0, -7.0, 3.0]
#   after: [1.0, 1e+20, 3.0]
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet "skops==0.16.0" "scikit-learn==1.9.1" "numpy==2.4.6" "scipy==1.17.1"
"$place/env/bin/python" - <<'PY'
import numpy as np
import skops.io

before = np.ma.array([1.0, 2.0, 3.0], mask=[False, True, False], fill_value=-7.0)
data = skops.io.dumps(before)
after = skops.io.loads(data, trusted=skops.io.get_untrusted_types(data=data))
print("before:", before.filled().tolist())
print("after:", after.filled().tolist())
assert after.mask.tolist() == before.mask.tolist()
assert after.fill_value == 1e20, "the fill value is kept: the behaviour has changed"
PY
