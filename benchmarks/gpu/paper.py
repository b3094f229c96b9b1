"""Methods at the scale of the CIFAR-10 papers (MOON's protocol, which FedProc, FedECCR and FedCD take over), in turn.

A line of JSON per evaluated round, so that a cut leaves the accuracy so far. Without --data-dir nothing is run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fedcore

PROTOCOL: dict[str, Any] = {
    "dataset": "cifar10", "model": "simple-cnn", "projection": True, "augment": True, "partition": "dirichlet",
    "alpha": 0.5, "clients": 10, "rounds": 100, "local_epochs": 10, "batch_size": 64, "lr": 0.01, "momentum": 0.9,
    "weight_decay": 1e-5, "eval_every": 5,
}  # fmt: skip
SMALL: dict[str, Any] = {"dataset": "digits", "model": "mlp", "augment": False, "projection": False, "rounds": 1,
                         "local_epochs": 1, "eval_every": 1}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {"fedavg": {}, "fedproc": {}, "fedeccr": {}, "fedcd": {}, "moon": {"mu": 5}}


def train(method: str, options: dict[str, Any]) -> None:
    """Train with one method; prints a line per evaluated round."""
    began = time.perf_counter()

    def notify(event: str, details: Mapping[str, Any]) -> None:
        if event == "round" and details["metrics"]:
            accuracy = details["metrics"]["global"]["accuracy"]
            seconds = time.perf_counter() - began
            row = {"method": method, "round": details["round"] + 1, "accuracy": accuracy, "seconds": seconds}
            print(json.dumps(row), flush=True)

    plugins = {} if method == "fedavg" else {method: METHODS[method]}
    with tempfile.TemporaryDirectory() as folder:
        fedcore.run(
            fedcore.RunConfig.create({**options, "plugins": plugins, "out": Path(folder) / "run"}), notify=notify
        )


def main() -> None:
    """Train with all methods, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--small", action="store_true", help="one round of FedAvg on digits")
    given = parser.parse_args()
    if given.small:
        train("fedavg", {**PROTOCOL, **SMALL, "device": given.device, "workers": 0})
    elif given.data_dir is None:
        print(json.dumps({"not run": "no --data-dir with CIFAR-10 was given"}))
    else:
        for method in METHODS:
            train(method, {**PROTOCOL, "device": given.device, "data_dir": given.data_dir})


if __name__ == "__main__":
    main()
