"""Whether captured steps, and those of clients in lanes, train as plain ones do on a GPU, for every installed method.

Prints one line of JSON for each.

On a CPU nothing is captured; the two runs are then the same, which tests this script.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
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
AGAIN = 4
"""The further plain runs of a method with a larger difference. They differ as much where it makes much of rounding, as
FedDecorr does and what FedECCR and FedCME choose by a comparison."""


def differences(plugin: str, device: str) -> tuple[float, float, float]:
    """Return the largest difference of the weights from those of a plain run, relative to their magnitude.

    Of a run with captured steps, of one with two clients side by side, and of further plain ones: 0 where none is made.
    """
    plain, captured, lanes = (weights(plugin, device, how) for how in ({"capture": False}, {}, {"lanes": 2}))
    of_captured, of_lanes = difference(captured, plain), difference(lanes, plain)
    again = AGAIN if max(of_captured, of_lanes) > CLOSE else 0
    of_plain = [difference(weights(plugin, device, {"capture": False}), plain) for _ in range(again)]
    return of_captured, of_lanes, max(of_plain, default=0.0)


def weights(plugin: str, device: str, how: Mapping[str, Any]) -> torch.Tensor:
    """Return the weights after a run with these options."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = {} if plugin == "fedavg" else {plugin: {}}
        options = {**RUN, "plugins": chosen, "device": device, **how, "out": Path(folder) / "run"}
        model = fedcore.run(fedcore.RunConfig.create(options)).model
        return torch.cat([tensor.double().flatten() for tensor in model.state_dict().values()])


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference relative to the largest magnitude."""
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
            captured, lanes, plain = differences(plugin, given.device)
            same = max(captured, lanes) <= max(CLOSE, 2 * plain)
            row: dict[str, Any] = {"method": plugin, "difference": captured, "difference in lanes": lanes, "same": same}
            row |= {"difference of plain runs": plain} if plain else {}
        except fedcore.FedcoreError as error:  # some methods need options or another data set
            row = {"method": plugin, "not run": str(error).partition("\n")[0][:200]}
        different |= row.get("same") is False
        print(json.dumps(row), flush=True)
    return int(different)


if __name__ == "__main__":
    raise SystemExit(main())
