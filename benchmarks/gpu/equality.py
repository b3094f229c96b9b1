"""Whether captured steps train as plain ones do on a GPU, for every installed method: one line of JSON each.

On a CPU nothing is captured; the two runs are then the same, which tests this script.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

import fedcore
from fedcore.base.registry import available

RUN: dict[str, Any] = {
    "dataset": "digits", "model": "simple-cnn", "clients": 4, "participation": 0.5, "rounds": 2, "local_epochs": 4,
    "batch_size": 32, "lr": 0.02, "eval_every": 2, "workers": 0,
}  # fmt: skip
CLOSE = 1e-3
"""Largest relative difference of a weight: atomic additions on a GPU have no fixed order."""


def difference(plugin: str, device: str) -> float:
    """Return the largest difference between the weights of a captured and a plain run, relative to their magnitude."""
    weights = []
    for capture in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            chosen = {} if plugin == "fedavg" else {plugin: {}}
            options = {**RUN, "plugins": chosen, "device": device, "capture": capture, "out": Path(folder) / "run"}
            model = fedcore.run(fedcore.RunConfig.create(options)).model
            weights.append(torch.cat([tensor.double().flatten() for tensor in model.state_dict().values()]))
    one, other = weights
    return float((one - other).abs().max() / other.abs().max())


def main() -> int:
    """Compare all; returns 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="FedAvg and MOON only, and less of them")
    given = parser.parse_args()
    if given.small:
        RUN.update(rounds=1, local_epochs=1, model="mlp")
    different = False
    for plugin in ("fedavg", "moon") if given.small else sorted(available("plugin")):
        try:
            found = difference(plugin, given.device)
            row: dict[str, Any] = {"method": plugin, "difference": found, "same": found <= CLOSE}
        except fedcore.FedcoreError as error:  # some methods need options or another data set
            row = {"method": plugin, "not run": str(error).partition("\n")[0][:200]}
        different |= row.get("same") is False
        print(json.dumps(row), flush=True)
    return int(different)


if __name__ == "__main__":
    raise SystemExit(main())
