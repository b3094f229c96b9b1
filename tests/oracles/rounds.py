"""The small federation on which a plugin's run is compared with NumPy's whole rounds, some of the clients in each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedcore.data import Dataset, ResidentSamples
from fedcore_testing import Cohorts, client_arrays, hidden_tanh, weights
from tests.oracles import papers

COHORTS = [[0, 1, 2, 3], [0, 2], [1, 2, 3], [0, 3], [0, 1, 2]]
LATE = [[1, 3], [0, 2], [1, 2, 3], [0, 3], [0, 1, 2]]
"""Class 0 comes in the second round only."""
EPOCHS, LR, CLASSES = 2, 0.4, 3
# Each client's samples of classes 0, 1 and 2: skewed, and client 1 lacks a class, client 3 two.
HELD = ((6, 2, 1), (0, 7, 3), (3, 3, 8), (0, 5, 0))


def samples(data_dir: Path | None = None) -> Dataset:
    """Return 38 samples of five numbers, client by client."""
    draws = np.random.default_rng(7)
    labels = np.concatenate([np.repeat(np.arange(CLASSES), counts) for counts in HELD])
    middles = draws.standard_normal((CLASSES, 5))
    x = np.round(middles[labels] + draws.standard_normal((len(labels), 5)), 2).astype(np.float32)
    own = ResidentSamples(torch.from_numpy(x).view(-1, 1, 1, 5), torch.from_numpy(labels), [0.0], [1.0])
    return Dataset("papers", own, own, num_classes=CLASSES, input_shape=(1, 1, 5))


def by_client(labels: Any, num_clients: int, **_: Any) -> list[Any]:
    """Give each client its samples."""
    return list(np.split(np.arange(len(labels)), np.cumsum([sum(counts) for counts in HELD])[:-1]))


def in_turn(labels: Any, num_clients: int, **_: Any) -> list[Any]:
    """Give each client every n-th sample."""
    return [np.arange(len(labels))[client::num_clients] for client in range(num_clients)]


def projected(num_classes: int, input_shape: tuple[int, ...]) -> Any:
    """Return ``hidden_tanh`` as a model that has its projection head, so that FedCD does not put one of 256 on it."""
    model = hidden_tanh(num_classes, input_shape)
    model.projection_width = 256
    return model


OPTIONS: dict[str, Any] = {
    "dataset": samples,
    "partition": by_client,
    "model": projected,
    "clients": len(HELD),
    "rounds": len(COHORTS),
    "local_epochs": EPOCHS,
    "batch_size": 100,
    "lr": LR,
    "momentum": 0.0,
    "weight_decay": 0.0,
}
DRAWN = (Cohorts, {"rounds": COHORTS})


def federation_of(
    result: Any, start: Mapping[str, torch.Tensor], cohorts: Any = COHORTS, epochs: int = EPOCHS
) -> papers.Federation:
    """Return the run's federation in NumPy."""
    clients = [papers.Client(x, y.argmax(axis=1)) for x, y in client_arrays(result)]
    return papers.Federation(clients, cohorts, in_numpy(start), epochs, LR, CLASSES)


RENAMED = {
    "classifier.fine.": "classifier.",  # FedCD's fine classifier
    "classifier.head.": "classifier.",  # FedCP
    "classifier.personal.": "P.",
    "classifier.policy.layers.0.": "policy.",
    "classifier.policy.layers.1.": "norm.",
    "encoder.base.1.parametrizations.weight.original": "encoder.base.1.weight",  # LoRA
    "encoder.base.1.parametrizations.weight.0.": "",
}


def in_numpy(tensors: Mapping[str, torch.Tensor]) -> papers.Weights:
    """Return weights in NumPy, under the names of :mod:`tests.oracles.papers`."""
    found = {}
    for name, tensor in tensors.items():
        for theirs, ours in RENAMED.items():
            name = name.replace(theirs, ours)
        found[name] = tensor.double().numpy()
    return found


def assert_near(got: papers.Weights, wanted: papers.Weights, start: papers.Weights) -> None:
    """Assert that float32's weights are float64's, next to how far the rounds moved them."""
    assert set(got) >= set(wanted)
    moved = max(float(np.abs(wanted[name] - start[name]).max()) for name in wanted)
    assert moved > 0.01, "nothing moved: the comparison shows nothing"
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, atol=2e-5 * moved, rtol=0, err_msg=name)


def assert_close(result: Any, wanted: papers.Weights, start: papers.Weights) -> None:
    """Assert that a run ended in these weights."""
    assert_near(in_numpy(weights(result)), wanted, start)


def recorded(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[Any]:
    """Return a list that holds what a function was given and returned, call by call: (arguments, result)."""
    found: list[Any] = []
    function = getattr(module, name)

    def recording(*given: Any, **named: Any) -> Any:
        result = function(*given, **named)
        found.append((given, result))
        return result

    monkeypatch.setattr(module, name, recording)
    return found
