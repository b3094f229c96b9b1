#!/usr/bin/env bash
# The mean of a column has other bits each time that it is asked for.
#
# Seen with duckdb 2.0.1, two threads. One would guess: the same query on the same table gives the same bits. Threads
# take parts of the table in any order and add up doubles, so twenty queries give up to twenty values that differ in their
# last digits. With one thread there is one value. A test that compares two tables of results bit by bit fails at times.
#
# Output seen (the first number varies):
#   two threads: 17 values of the mean in 20 queries
#   one thread: 1
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet "duckdb==2.0.1" "numpy==2.4.6" "pandas==3.1.1"
"$place/env/bin/python" - <<'PY'
import duckdb
import numpy as np
import pandas as pd

values = pd.DataFrame({"v": np.random.default_rng(0).standard_normal(5_000_000)})
base = duckdb.connect()
base.execute("create table results as select * from values")
seen = {}
for threads in (2, 1):
    base.execute(f"set threads = {threads}")
    seen[threads] = len({base.execute("select avg(v) from results").fetchone()[0] for _ in range(20)})
print(f"two threads: {seen[2]} values of the mean in 20 queries")
print(f"one thread: {seen[1]}")
assert seen[2] > 1, "the mean has one value: the behaviour has changed (or the machine has one core)"
assert seen[1] == 1
PY
