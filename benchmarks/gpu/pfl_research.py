"""pfl-research on this machine's device, on the workload of its CIFAR-10 benchmark: rounds per second, as JSON.

It is ``benchmarks/peers/run_pfl.py`` in one process, which takes the GPU where torch sees one. pfl must be importable.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PEERS = Path(__file__).resolve().parents[1] / "peers"
sys.path.insert(0, str(PEERS))


def main() -> int:
    """Export the workload, run pfl and print its rounds per second."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cpu hides the GPU from it")
    parser.add_argument("--small", action="store_true", help="two rounds of the workload tiny")
    given = parser.parse_args()
    if importlib.util.find_spec("pfl") is None:
        print(json.dumps({"not run": "pfl is not installed; benchmarks/peers/requirements/pfl.txt pins it"}))
        return 0

    import export
    import exported
    import table

    from fedcore_bench.workloads import AGAINST_REFERENCE

    name, rounds = ("tiny", 2 + table.WARM_UP) if given.small else ("pfl-cifar10", 100 + table.WARM_UP)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        export.export(AGAINST_REFERENCE[name], place)
        environment = {**os.environ, exported.STARTED: repr(time.monotonic()),
                       f"{exported.STARTED}_FILE": str(place / "first_batch")}  # fmt: skip
        if given.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        command = [sys.executable, str(PEERS / "run_pfl.py"), folder, "--rounds", str(rounds), "--cores", "1"]
        ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603
        if ended.returncode:
            return ended.returncode
        found = table.parse(ended.stdout, rounds)
    seconds = statistics.median(found["seconds"])
    row = {"workload": name, "rounds per second": 1 / seconds, "s per round": seconds, "accuracy": found["accuracy"]}
    print(json.dumps(row))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
