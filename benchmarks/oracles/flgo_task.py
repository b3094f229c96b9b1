"""The small federation as FLGo's "direct" benchmark wants it; FLGo copies this file into the task that it makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import whole
from torch import Tensor, nn
from torch.nn import functional as F


class Samples:
    """A client's samples."""

    def __init__(self, client: int) -> None:
        self.x, self.y = whole.samples(client)

    def __len__(self) -> int:
        return len(self.y)


train_data = [Samples(client) for client in range(len(whole.parts))]
test_data = range(2)
val_data = None


class DataLoader:
    """One full batch."""

    def __init__(self, dataset: Any, batch_size: int, **_: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if isinstance(self.dataset, Samples):
            yield self.dataset.x, self.dataset.y


def get_model() -> nn.Module:
    return whole.model()


def data_to_device(batch_data: Any, device: torch.device) -> Any:
    return batch_data


def eval(model: nn.Module, data_loader: DataLoader, device: torch.device) -> dict[str, float]:
    losses = [float(F.cross_entropy(model(x), y)) for x, y in data_loader]
    return {"loss": sum(losses), "accuracy": 0.0}


def compute_loss(model: nn.Module, batch_data: tuple[Tensor, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {"loss": F.cross_entropy(model(batch_data[0]), batch_data[1])}
