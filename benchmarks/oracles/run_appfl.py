"""APPFL's aggregators over four rounds."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from appfl.algorithm.aggregator import (
    FedAdagradAggregator,
    FedAdamAggregator,
    FedAvgAggregator,
    FedAvgMAggregator,
    FedYogiAggregator,
)
from cases import Fixture, numbers
from omegaconf import OmegaConf
from torch import nn

warnings.simplefilter("ignore")
C = Fixture("appfl", "APPFL", "appfl", source="run of the library's aggregators on these models")
start, sizes = np.array([1.0, -2.0, 0.5, 3.0]), {"a": 10, "b": 30, "c": 20}
rounds = np.round(start + numbers(0, 4, 3, 4, scale=0.3), 4)
shares = np.array(list(sizes.values())) / 60
means = np.einsum("k,rkd->rd", shares, rounds)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start))


def run(kind: Any, **options: float) -> torch.Tensor:
    """Return the model after each round."""
    made = kind(Model(), OmegaConf.create({"client_weights_mode": "sample_size", "optimize_memory": True, **options}))
    made.client_sample_size = sizes
    return torch.stack(
        [made.aggregate({k: {"w": torch.tensor(y)} for k, y in zip(sizes, then)})["w"].clone() for then in rounds]
    )


for number, value in enumerate(run(FedAvgAggregator)):
    C.add(
        "weighted mean",
        f"FedAvg by samples, round {number + 1}",
        "weighted_mean",
        value,
        models=rounds[number],
        shares=list(sizes.values()),
    )
common = {"start": start, "means": means, "tolerance": 1e-9}
C.add(
    "FedAvgM",
    "beta .9, 4 rounds",
    "server_rounds",
    run(FedAvgMAggregator, server_momentum_param_1=0.9),
    plugin="fedavgm",
    options={"beta": 0.9},
    **common,
)
own = {
    "server_learning_rate": 0.1,
    "server_adapt_param": 1e-3,
    "server_momentum_param_1": 0.9,
    "server_momentum_param_2": 0.99,
}
options = {"lr": 0.1, "tau": 1e-3, "beta1": 0.9}
for said, kind, more in (
    ("adam", FedAdamAggregator, {"beta2": 0.99}),
    ("yogi", FedYogiAggregator, {"beta2": 0.99}),
    ("adagrad", FedAdagradAggregator, {}),
):
    C.add(
        "FedOpt",
        f"{said}, 4 rounds: v_-1 = tau^2, no correction",
        "server_rounds",
        run(kind, **own),
        plugin=f"fed{said}",
        options={**options, **more},
        **common,
    )
C.write()
