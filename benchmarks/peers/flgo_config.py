"""The workload as FLGo's "direct" benchmark wants it; FLGo copies this file into the task that it makes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import exported
import torch
from exported import ClientData
from torch import Tensor, nn
from torch.nn import functional as F

workload = exported.load(Path(sys.argv[1]))
train_data = [workload.client(number) for number in range(len(workload.holds))]
test_data = range(len(workload.test_labels))  # positions only: ``eval`` has the samples
val_data = None


class DataLoader:
    """A client's batches, an epoch per iteration."""

    def __init__(self, dataset: Any, batch_size: int, **_: Any) -> None:
        self.dataset, self.batch_size = dataset, batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        assert isinstance(self.dataset, ClientData)
        return self.dataset.batches(self.batch_size)


def get_model() -> nn.Module:
    """Return the network with the initial weights."""
    return workload.model()


def data_to_device(batch_data: Any, device: torch.device) -> Any:
    """Return a batch as it is: it is on the CPU."""
    return batch_data


def eval(model: nn.Module, data_loader: DataLoader, device: torch.device) -> dict[str, float]:
    """Return the metrics of the test set."""
    return {"accuracy": workload.accuracy(model)}


def compute_loss(model: nn.Module, batch_data: tuple[Tensor, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return the training loss of a batch."""
    return {"loss": F.cross_entropy(model(batch_data[0]), batch_data[1])}
