"""What a round costs in a federation over Flower, beside the local engine on the same model, data and steps.

Server, SuperLink and three clients on this machine, over loopback with TLS and node keys. Every client trains one step
on eight images, so that a round is nearly all overhead. The local engine runs the same rounds right after it.

    .venv-flower/bin/python benchmarks/engines/federation.py --rounds 7

Seconds are the rounds' own, from ``metrics.jsonl``, without the first round; evaluation, at the clients, stands apart.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from fedcore import RunConfig, run
from fedcore_flower.keys import make_keys

SHAPES = {"small": (1, 40, 47), "large": (1, 440, 444)}
"""Images with which ``mlp`` for two classes has 249,154 and 25,014,594 parameters."""

NAMES = ["alder", "birch", "cedar"]
IMAGES = 8
FEDCORE = [sys.executable, "-m", "fedcore"]


def write_images(path: Path, shape: tuple[int, ...], count: int) -> Path:
    """Write random images of two classes, some for a test."""
    numbers = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for part, size in (("train", count), ("test", 4)):
        arrays[f"x_{part}"] = numbers.random((size, *shape), dtype=np.float32)
        arrays[f"y_{part}"] = np.arange(size) % 2
    np.savez(path, **arrays)
    return path


def federated(folder: Path, shape: tuple[int, ...], options: list[str]) -> list[dict[str, Any]]:
    """Return the times of a federation's rounds."""
    keys = folder / "keys"
    make_keys(keys, ["localhost"], NAMES)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = write_images(folder / "own.npz", shape, IMAGES)
    clients = []
    try:
        for name in NAMES:
            command = ["federate", "client", "--server", f"127.0.0.1:{port}", "--ca", keys / "ca.crt"]
            command += ["--key", keys / f"{name}.key", "--data", f"npz:{own}", "--state", folder / name]
            command += ["--device", "cpu", "--quiet"]
            line = [*FEDCORE, *map(str, command)]
            clients.append(subprocess.Popen(line, stderr=subprocess.DEVNULL))  # noqa: S603 - our own words
        command = ["federate", "server", "--host", "127.0.0.1", "--port", port, "--keys", keys, "--out", folder / "run"]
        command += ["--dataset", f"npz:{own}", "--quiet", *options]
        subprocess.run([*FEDCORE, *map(str, command)], check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - our own words
    finally:
        for client in clients:
            client.terminate()
        for client in clients:
            client.wait()
    return times(folder / "run")


def times(directory: Path) -> list[dict[str, Any]]:
    """Return the times of a run's rounds but for the first."""
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert not any(record["failures"] for record in records)
    return [record["time"] for record in records if "round" in record][1:]


def median(rounds: list[dict[str, Any]], part: str) -> float:
    """Return the median seconds of a part."""
    return statistics.median(each[part] for each in rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, action="append", help="default both")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    for size in given.size or SHAPES:
        options = {"model": "mlp", "rounds": given.rounds, "local_epochs": 1, "batch_size": IMAGES, "device": "cpu"}
        flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        with tempfile.TemporaryDirectory(prefix="fedcore-overhead-") as name:
            folder, began = Path(name), time.perf_counter()
            far = federated(folder, SHAPES[size], flags)
            seconds = time.perf_counter() - began
            everybody = write_images(folder / "all.npz", SHAPES[size], IMAGES * len(NAMES))
            here = {"dataset": f"npz:{everybody}", "clients": len(NAMES), "partition": "iid", "workers": 2}
            result = run(RunConfig.create({**options, **here, "out": folder / "local"}))
            near = times(folder / "local")
            found = {
                "parameters": sum(parameter.numel() for parameter in result.model.parameters()),
                "load": os.getloadavg()[0],
                "federation": {part: median(far, part) for part in ("round", "evaluation", "client_seconds")},
                "least_and_greatest": [min(t["round"] for t in far), max(t["round"] for t in far)],
                "seconds_in_all": seconds,
                "local": {part: median(near, part) for part in ("round", "evaluation", "client_seconds")},
                "ratio_of_rounds": median(far, "round") / median(near, "round"),
            }
            print(json.dumps(found, indent=1), flush=True)


if __name__ == "__main__":
    main()
