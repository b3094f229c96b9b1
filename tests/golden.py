"""Hashes of runs that together call every hook: the same before and after a change that must not change results.

    python tests/golden.py write before.json      # at the commit before, on this machine
    python tests/golden.py compare before.json    # at the commit after, on the same machine

Hashes differ between processor types, so they are not kept in the repository. Uses public names only, so that the
script runs unchanged on both commits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import fedcore

BASE: dict[str, Any] = {
    "dataset": "digits",
    "model": "mlp",
    "clients": 6,
    "participation": 0.5,
    "alpha": 0.5,
    "client_test_fraction": 0.2,
    "rounds": 3,
    "local_epochs": 2,
    "batch_size": 32,
    "lr": 0.02,
    "lr_decay": 0.99,
    "momentum": 0.9,
    "seed": 7,
    "workers": 0,
    "device": "cpu",
}

RUNS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedproc": {"plugins": ["fedproc"]},
    "fedeccr": {"plugins": ["fedeccr"]},
    "fedcd": {"plugins": ["fedcd"]},
    "fdcl": {"plugins": ["fdcl"]},
    "fedcme": {"plugins": ["fedcme"], "participation": 1.0},
    "moon + uscc": {"plugins": ["moon", "uscc"]},
    "scaffold": {"plugins": ["scaffold"]},
    "feddyn": {"plugins": ["feddyn"]},
    "ditto": {"plugins": ["ditto"]},
    "fedper": {"plugins": ["fedper"]},
    "dp": {"plugins": [{"dp": {"seed_noise": True}}]},
    "simulated system": {
        "plugins": ["fedprox"],
        "participation": 1.0,
        "system": ["dropout=0.2", "slow=0.5", "stragglers=0.5", "availability=0.8"],
        "min_clients": 0,
    },
    "simple-cnn, exchange beside a proximal term, 2 workers": {
        "plugins": ["fedcme", "fedprox"],
        "model": "simple-cnn",
        "workers": 2,
    },
    "1 worker": {"plugins": ["moon"], "workers": 1},
    "2 workers": {"plugins": ["moon"], "workers": 2},
}

KILLED = """
import os, signal, sys, fedcore

def kill(event, details):
    if event == "round" and details["round"] == 1:
        os.kill(os.getpid(), signal.SIGKILL)

fedcore.run(fedcore.RunConfig.model_validate_json(sys.argv[1]), notify=kill)
"""


def hashes() -> dict[str, dict[str, str]]:
    """Run everything; return by run the hashes of its model, of its records and of its final figures."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, options) in enumerate(RUNS.items()):
            print(name, file=sys.stderr, flush=True)
            config = fedcore.RunConfig(**{**BASE, **options}, out=Path(folder) / str(number))
            found[name] = hashed(fedcore.run(config))
        for name in ("fedeccr", "scaffold", "fedcme"):
            print(f"{name}, killed and resumed", file=sys.stderr, flush=True)
            config = fedcore.RunConfig(**{**BASE, **RUNS[name]}, out=Path(folder) / f"killed-{name}")
            command = [sys.executable, "-P", "-c", KILLED, config.model_dump_json()]
            ended = subprocess.run(command, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
            assert ended.returncode == -signal.SIGKILL, f"{name} was not killed"
            found[f"{name}, killed and resumed"] = hashed(fedcore.resume(config.out))
    return found


def hashed(result: fedcore.RunResult) -> dict[str, str]:
    """Return the hashes of one finished run."""
    model = hashlib.sha256()
    for name, tensor in result.model.state_dict().items():
        model.update(name.encode())
        model.update(tensor.contiguous().numpy().tobytes())
    lines = (result.directory / "metrics.jsonl").read_text().splitlines()
    records = [
        {key: value for key, value in json.loads(line).items() if key not in ("time", "crc32")} for line in lines
    ]
    return {"model": model.hexdigest(), "records": digest(records), "metrics": digest(result.summary["metrics"])}


def digest(values: Any) -> str:
    """Return the hash of JSON values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def main() -> int:
    """Write the hashes, or compare them with those in a file; exit code 1 where they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "compare"))
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    found = hashes()
    if given.what == "write":
        given.file.write_text(json.dumps(found, indent=1))
        return 0
    before = json.loads(given.file.read_text())
    differ = [
        f"{name}: {part}"
        for name, parts in before.items()
        for part, value in parts.items()
        if found.get(name, {}).get(part) != value
    ]
    print("\n".join(differ) or f"all {len(before)} runs have the same bits")
    return bool(differ)


if __name__ == "__main__":
    raise SystemExit(main())
