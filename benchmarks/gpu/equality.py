"""Whether captured steps, and those of clients in lanes, train as plain ones do on a GPU, for every installed method.

Prints one line of JSON for each.

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


def differences(plugin: str, device: str) -> tuple[float, float]:
    """Return the largest difference of the weights from those of a plain run, relative to their magnitude.

    Of a run with captured steps, and of one with two clients side by side.
    """
    weights = []
    for how in ({"capture": False}, {}, {"lanes": 2}):
        with tempfile.TemporaryDirectory() as folder:
            chosen = {} if plugin == "fedavg" else {plugin: {}}
            options = {**RUN, "plugins": chosen, "device": device, **how, "out": Path(folder) / "run"}
            model = fedcore.run(fedcore.RunConfig.create(options)).model
            weights.append(torch.cat([tensor.double().flatten() for tensor in model.state_dict().values()]))
    plain, captured, lanes = weights
    one, other = (float((found - plain).abs().max() / plain.abs().max()) for found in (captured, lanes))
    return one, other


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
            one, other = differences(plugin, given.device)
            same = max(one, other) <= CLOSE
            row: dict[str, Any] = {"method": plugin, "difference": one, "difference in lanes": other, "same": same}
        except fedcore.FedcoreError as error:  # some methods need options or another data set
            row = {"method": plugin, "not run": str(error).partition("\n")[0][:200]}
        different |= row.get("same") is False
        print(json.dumps(row), flush=True)
    return int(different)


if __name__ == "__main__":
    raise SystemExit(main())
