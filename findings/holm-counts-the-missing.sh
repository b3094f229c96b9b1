#!/usr/bin/env bash
# Holm's correction counts a p-value that is not a number: nothing is significant because one comparison failed.
#
# Seen with statsmodels 0.15.0. One would guess: a p-value that is not a number stays so, and the others are corrected
# as if it were not there. With "holm" it is counted, so 0.02 and 0.03 are no longer significant at 0.05; with "fdr_bh"
# all corrected values are not a number. Nothing is said. A method whose runs diverged has such a p-value.
#
# Output seen:
#   three p-values: [0.03, 0.04, 0.04], significant: [True, True, True]
#   and one that is missing: [0.04, 0.06, nan, 0.06], significant: [True, False, False, False]
#   Benjamini and Hochberg: [nan, nan, nan, nan]
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet "statsmodels==0.15.0" "numpy==2.4.6" "scipy==1.17.1" "pandas==3.1.1"
"$place/env/bin/python" - <<'PY'
import numpy as np
from statsmodels.stats.multitest import multipletests

whole, some = [0.01, 0.02, 0.03], [0.01, 0.02, np.nan, 0.03]
for words, values in (("three p-values", whole), ("and one that is missing", some)):
    significant, corrected = multipletests(values, method="holm")[:2]
    print(f"{words}: {corrected.round(4).tolist()}, significant: {significant.tolist()}")
by_rate = multipletests(some, method="fdr_bh")[1]
print("Benjamini and Hochberg:", by_rate.tolist())
assert significant.tolist() == [True, False, False, False], "a missing p-value is not counted: the behaviour has changed"
assert np.isnan(by_rate).all()
PY
