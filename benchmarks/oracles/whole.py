"""A small federation on which a library runs whole rounds: samples, who holds them, and the weights at the start."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from cases import Fixture, numbers
from torch import nn

SIZES, ROUNDS, EPOCHS, LR = (9, 10, 14, 5), 4, 3, 0.3
labels = [int(one) for one in np.random.default_rng(0).integers(0, 3, sum(SIZES))]
x = np.round(numbers(1, sum(SIZES), 5) + numbers(2, 3, 5)[labels], 3)
parts = [[int(one) for one in part] for part in np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])]
weights = [numbers(3, 6, 5, scale=0.4), numbers(4, 6, scale=0.1), numbers(5, 3, 6, scale=0.4), numbers(6, 3, scale=0.1)]
inputs: dict[str, Any] = {
    "x": x, "labels": labels, "parts": parts, "weights": weights, "rounds": ROUNDS, "epochs": EPOCHS, "lr": LR,
}  # fmt: skip
"""What a case of ``whole_run`` holds. All clients take full batches of SGD, so that an epoch is a step."""


COHORTS = [[0, 1, 2, 3], [0, 2], [1, 2, 3], [0, 3]]
"""The clients of each round, where some take part."""


def add(
    fixture: Fixture,
    name: str,
    value: Any,
    plugins: dict[str, Any],
    *,
    cohorts: list[list[int]] | None = COHORTS,
    options: dict[str, Any] | None = None,
    differs: str = "",
    **more: Any,
) -> None:
    """Add a whole run as a case; ``cohorts`` None: all clients in each of :data:`ROUNDS` rounds."""
    drawn = {} if cohorts is None else {"cohorts": cohorts, "rounds": len(cohorts)}
    given = {**inputs, **drawn, "plugins": plugins, "options": options or {}, **more}
    fixture.add("whole run", name, "whole_run", value, tolerance=2e-6, relative=1e-5, differs=differs, **given)


def model() -> nn.Sequential:
    """Return the network of 5, 6 and 3 units with tanh, and the weights at the start."""
    network = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    with torch.no_grad():
        for parameter, value in zip(network.parameters(), weights):
            parameter.copy_(torch.tensor(value))
    return network


def samples(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a client's inputs and labels."""
    rows = parts[client]
    return torch.tensor(x[rows], dtype=torch.float32), torch.tensor([labels[row] for row in rows])


def final(trained: nn.Module) -> list[torch.Tensor]:
    """Return the weights, flat."""
    return torch.cat([parameter.detach().double().flatten() for parameter in trained.parameters()])
