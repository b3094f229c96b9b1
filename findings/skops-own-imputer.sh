#!/usr/bin/env bash
# scikit-learn's own SimpleImputer, as skops wrote it, is no file that skops loads by itself.
#
# Seen with skops 0.16.0 and scikit-learn 1.9.1. One would guess: skops is made for scikit-learn, so a fitted step of
# scikit-learn without anything of the user's own loads without naming types. StandardScaler and OneHotEncoder do. A fitted
# SimpleImputer has the dtype of its column, a type that skops does not count among its own, so a pipeline that fills
# empty cells is refused until "numpy.dtype" is named as trusted.
#
# Output seen:
#   StandardScaler []
#   OneHotEncoder []
#   SimpleImputer ['numpy.dtype']
#   loads: UntrustedTypesFoundException
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet "skops==0.16.0" "scikit-learn==1.9.1" "numpy==2.4.6" "scipy==1.17.1"
"$place/env/bin/python" - <<'PY'
import numpy as np
import skops.io
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder, StandardScaler

column = np.array([[1.0], [2.0], [np.nan]])
files = {}
for step, rows in ((StandardScaler(), column), (OneHotEncoder(), column[:2]), (SimpleImputer(strategy="median"), column)):
    files[type(step).__name__] = skops.io.dumps(step.fit(rows))
    print(type(step).__name__, skops.io.get_untrusted_types(data=files[type(step).__name__]))
for name in ("StandardScaler", "OneHotEncoder"):
    skops.io.loads(files[name])
try:
    skops.io.loads(files["SimpleImputer"])
except Exception as error:
    print("loads:", type(error).__name__)
    assert "numpy.dtype" in str(error)
else:
    raise SystemExit("it is loaded: the behaviour has changed")
PY
