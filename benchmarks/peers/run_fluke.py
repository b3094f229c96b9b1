"""fluke: its FedAVG, clients one after the other, all threads on one client.

Favourable: its own FastDataLoader on tensors in memory; no client is evaluated; our evaluation in place of its seven
metrics; ``persistency`` off, so that clients begin with a new momentum buffer, as the others do, and none is kept.
Unfavourable: it draws a progress bar.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import exported
import torch
import torchvision_stub  # noqa: F401 - before fluke
from exported import Job, Stopwatch, first_batch
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
from torch import nn


class Loader(FastDataLoader):
    """Notes when the first batch is drawn."""

    steps: int | None

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch; with ``local_steps`` it is so many batches."""
        first_batch()
        return self._steps(self.steps) if self.steps else super().__iter__()

    def _steps(self, left: int) -> Iterator[Any]:
        while left > 0:
            super().__iter__()  # a new order; the loader is its own iterator
            for _ in range(min(left, math.ceil(self.size / self.batch_size))):
                yield super().__next__()
                left -= 1


class Timed(FedAVG):
    """fluke's FedAvg, timed."""

    watch: Stopwatch

    def _compute_evaluation(self, round: int, eligible: Any) -> None:
        """End a round, with the evaluation that is due."""
        self.watch.round_trained(self.server.model)

    def finalize(self) -> None:
        """Send nobody the last model."""
        FlukeENV().close_cache()


def main() -> None:
    """Run it."""
    job = Job.from_command_line()
    data = exported.load(job.folder)
    settings, classes = data.settings, int(data.labels.max()) + 1
    torch.set_num_threads(job.cores)
    Loader.steps = settings["local_steps"]
    environment = FlukeENV()
    environment.set_seed(settings["seed"])
    environment.set_device("cpu")
    environment.set_inmemory(True)
    loaders = [
        Loader(
            data.images[held],
            data.labels[held],
            num_labels=classes,
            batch_size=settings["batch_size"],
            shuffle=True,
            skip_singleton=False,
        )
        for held in data.holds
    ]
    container = DummyDataContainer(loaders, [None] * len(loaders), None, classes)
    optimizer = {
        "name": "SGD",
        "lr": settings["lr"],
        "momentum": settings["momentum"],
        "weight_decay": settings["weight_decay"],
    }
    client = {
        "batch_size": settings["batch_size"],
        "local_epochs": settings["local_epochs"],
        "loss": nn.CrossEntropyLoss,
        "optimizer": optimizer,
        "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1},
        "persistency": False,
    }
    choices = DDict(client=DDict(**client), server=DDict(weighted=True), model=data.model())
    algorithm = Timed(len(loaders), DataSplitter(container, distribution="iid"), choices)
    Timed.watch = Stopwatch(job)
    Timed.watch.begin()
    algorithm.run(job.rounds, settings["participation"])
    Timed.watch.report()


if __name__ == "__main__":
    main()
