"""Choose the memory format of images and convolutions by measurement instead of a fixed rule."""

from __future__ import annotations

import copy
import time
from typing import Literal

import torch
from torch.nn import functional as F

from fedcore.base.config import RunConfig
from fedcore.data import Dataset, ResidentSamples
from fedcore.models import SplitModel
from fedcore.models.placement import Placement, convolves

Format = Literal["contiguous", "channels_last"]
FORMATS: tuple[Format, ...] = ("contiguous", "channels_last")
WARM_UP, TURNS, STEPS = 2, 5, 3


def tuned(config: RunConfig, model: SplitModel, dataset: Dataset) -> RunConfig:
    """Return the configuration with the memory format in which training steps are faster on this machine.

    A format that the user chose stays. ``auto`` stays, too, if the model or the data set leaves no choice.
    """
    if config.memory_format != "auto" or not convolves(model) or not isinstance(dataset.train, ResidentSamples):
        return config
    seconds = measure(config, model, dataset)
    return config.model_copy(update={"memory_format": min(FORMATS, key=lambda name: seconds[name])})


def measure(config: RunConfig, model: SplitModel, dataset: Dataset) -> dict[Format, float]:
    """Return the minimum seconds of a few training steps in each format, measured in turns."""
    timers = {name: _Steps(config.model_copy(update={"memory_format": name}), model, dataset) for name in FORMATS}
    for steps in timers.values():
        steps.take(WARM_UP)
    found = dict.fromkeys(FORMATS, float("inf"))
    for _ in range(TURNS):
        for name, steps in timers.items():
            found[name] = min(found[name], steps.take(STEPS))
    return found


class _Steps:
    """Training steps of a copy of the model on one batch."""

    def __init__(self, config: RunConfig, model: SplitModel, dataset: Dataset) -> None:
        placement = Placement.of(config, model)
        self._device = placement.device
        self._model = placement.model(copy.deepcopy(model)).train()
        rows = torch.arange(min(config.batch_size, len(dataset.train)))
        x = dataset.train.gather(rows).to(placement.device)
        self._x = x.contiguous(memory_format=placement.memory_format)
        self._y = dataset.train.labels[rows].to(placement.device)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-6, momentum=config.momentum)

    def take(self, count: int) -> float:
        """Take steps; return their seconds."""
        began = time.perf_counter()
        for _ in range(count):
            self._optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(self._model(self._x)[1], self._y).backward()
            self._optimizer.step()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - began
