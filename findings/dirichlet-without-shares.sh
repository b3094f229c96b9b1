#!/usr/bin/env bash
# A strongly skewed partition has clients whose shares are not numbers, with the random interface that most codes use.
#
# Seen with numpy 2.4.6. One would guess: numpy.random.dirichlet of a small alpha gives shares that add up to 1, nearly
# all of them one client's. Its gamma draws underflow: where all of them are 0, each share is 0 / 0. With ten clients it
# is one draw in 2,000 at alpha 0.001 and half of them at 0.0001, without a warning. default_rng() is not concerned.
# Partitions of papers cast cumulative shares to int, which makes some number of them.
#
# Output seen:
#   alpha 0.001: 0.0005 of the draws
#   alpha 0.0001: 0.506 of the draws
#   default_rng, alpha 0.0001: 0.0 of the draws
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet "numpy==2.4.6"
"$place/env/bin/python" - <<'PY'
import numpy as np

seen = {}
for alpha in (1e-3, 1e-4):
    np.random.seed(0)
    draws = np.array([np.random.dirichlet([alpha] * 10) for _ in range(2000)])
    seen[alpha] = float(np.isnan(draws).any(axis=1).mean())
    print(f"alpha {alpha:g}: {seen[alpha]} of the draws")
newer = np.random.default_rng(0).dirichlet([1e-4] * 10, 2000)
print("default_rng, alpha 0.0001:", float(np.isnan(newer).any(axis=1).mean()), "of the draws")
assert seen[1e-4] > 0.3, "the shares are numbers: the behaviour has changed"
assert np.isfinite(newer).all()
PY
