#!/usr/bin/env bash
# A client's own random stream is the run's, for client 0.
#
# Seen with numpy 2.4.6. One would guess: default_rng([seed, client]) is another stream for each client, and none of them
# is default_rng(seed). A seed of fewer than four numbers is filled up with zeros, so (7), (7, 0), (7, 0, 0) are one
# stream: client 0 of a run draws what the run drew, and client 0 in round 0 what client 0 draws.
# A spawned seed, SeedSequence(7).spawn(1), differs.
#
# Output seen:
#   the run and client 0: same
#   the run and client 1: not the same
#   the run and its first child: not the same
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet "numpy==2.4.6"
"$place/env/bin/python" - <<'PY'
import numpy as np


def stream(seed):
    return np.random.default_rng(seed).random(4).tolist()


run = stream(7)
same = {"client 0": stream([7, 0]) == run, "client 1": stream([7, 1]) == run}
same["its first child"] = stream(np.random.SeedSequence(7).spawn(1)[0]) == run
for words, answer in same.items():
    print(f"the run and {words}: {'same' if answer else 'not the same'}")
assert same["client 0"], "client 0 has a stream of its own: the behaviour has changed"
assert not same["client 1"]
assert not same["its first child"]
PY
