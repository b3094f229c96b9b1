"""What every runner shares: the exported workload, the plain training loop, evaluation and the stopwatch.

It runs in the peers' environments, so it imports only NumPy, PyTorch and the standard library.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import numpy as np
import torch
from processes import field_mib
from torch import Tensor, nn
from torch.nn import functional as F

FILE = "workload.npz"
STARTED = "PEERS_STARTED"
"""Environment variable: the monotonic clock when the process was started."""
FORWARD_BATCH = 1000


@dataclass(frozen=True)
class Exported:
    """A workload: its tensors, who holds what, the initial weights and the settings of RunConfig by name."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    holds: list[Tensor]
    weights: dict[str, Tensor]
    settings: dict[str, Any]

    def save(self, folder: Path) -> None:
        """Write one uncompressed npz file."""
        arrays = {
            "images": self.images,
            "labels": self.labels,
            "test_images": self.test_images,
            "test_labels": self.test_labels,
            "holds": torch.cat(self.holds),
            "sizes": torch.tensor([len(held) for held in self.holds]),
            **{f"weight:{name}": weight for name, weight in self.weights.items()},
        }
        settings = np.array(json.dumps(self.settings))
        np.savez(folder / FILE, settings=settings, **{name: a.numpy() for name, a in arrays.items()})

    @classmethod
    def load(cls, folder: Path) -> Exported:
        """Read what :meth:`save` wrote."""
        with np.load(folder / FILE) as file:
            settings = json.loads(str(file["settings"]))
            arrays = {name: torch.from_numpy(file[name]) for name in file.files if name != "settings"}
        return cls(
            *(arrays[name] for name in ("images", "labels", "test_images", "test_labels")),
            list(arrays["holds"].split(arrays["sizes"].tolist())),
            {name.partition(":")[2]: a for name, a in arrays.items() if name.startswith("weight:")},
            settings,
        )

    def model(self) -> nn.Sequential:
        """Return the network with the initial weights."""
        return models.build(self.weights)

    def client(self, number: int) -> ClientData:
        """Return one client's samples."""
        return ClientData(self, number)

    def optimizer(self, model: nn.Module) -> torch.optim.SGD:
        """Return local SGD, PyTorch's default implementation of it."""
        return torch.optim.SGD(model.parameters(), lr=self.settings["lr"], momentum=self.settings["momentum"])

    def train(self, model: nn.Module, number: int) -> None:
        """Train a client's local epochs in place, with a new momentum buffer."""
        data, optimizer = self.client(number), self.optimizer(model)
        model.train()
        for _ in range(self.settings["local_epochs"]):
            for x, y in data.batches(self.settings["batch_size"]):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """Return the share of the test samples that a model gets right."""
        model.eval()
        pairs = zip(self.test_images.split(FORWARD_BATCH), self.test_labels.split(FORWARD_BATCH), strict=True)
        return sum(int((model(x).argmax(1) == y).sum()) for x, y in pairs) / len(self.test_labels)


@dataclass(frozen=True)
class ClientData:
    """One client's samples."""

    exported: Exported
    number: int

    def __len__(self) -> int:
        return len(self.exported.holds[self.number])

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield one epoch's batches in a new random order, the short last one too: one gather, then slices.

        With ``local_steps`` so many batches are an epoch: from several passes, or from a part of one.
        """
        first_batch()
        held = self.exported.holds[self.number]
        left = self.exported.settings.get("local_steps") or math.ceil(len(held) / size)
        while left > 0:
            rows = held[torch.randperm(len(held))][: left * size]
            yield from zip(self.exported.images[rows].split(size), self.exported.labels[rows].split(size), strict=True)
            left -= math.ceil(len(rows) / size)


@dataclass(frozen=True)
class Job:
    """What a runner is asked for.

    :param rounds: all of them, the warm-up included.
    :param cores: processors to use.
    :param stack: fedcore's option.
    """

    folder: Path
    rounds: int
    cores: int
    stack: str = "1"

    @classmethod
    def from_command_line(cls) -> Job:
        """Read ``FOLDER --rounds N --cores N``."""
        parser = argparse.ArgumentParser()
        parser.add_argument("folder", type=Path)
        parser.add_argument("--rounds", type=int, required=True)
        parser.add_argument("--cores", type=int, required=True)
        parser.add_argument("--stack", default="1")
        return cls(**vars(parser.parse_args()))

    def evaluates(self, number: int) -> bool:
        """Say whether the global model is evaluated after a round, 1 being the first."""
        return number == self.rounds or number % load(self.folder).settings["eval_every"] == 0


@functools.cache
def load(folder: Path) -> Exported:
    """Return the exported workload, read once per process."""
    return Exported.load(folder)


@functools.cache
def worker_model(folder: Path) -> nn.Sequential:
    """Return a network that a process loads one client's weights after the other into."""
    return load(folder).model()


@functools.cache
def first_batch() -> None:
    """Note the time, unless this process or another one has done so already."""
    # Exclusive creation: of several processes the first one's time stands.
    try:
        with open(os.environ[STARTED + "_FILE"], "x") as file:
            file.write(repr(time.monotonic()))
    except FileExistsError:
        pass


class Stopwatch:
    """When rounds end, and the last accuracy."""

    def __init__(self, job: Job) -> None:
        self.job, self.accuracy = job, float("nan")
        self.ends: list[float] = []

    def begin(self) -> None:
        """Start the first round."""
        self.ends.append(time.monotonic())

    @property
    def number(self) -> int:
        """The current round, 1 being the first."""
        return len(self.ends)

    def round_trained(self, model: nn.Module) -> None:
        """End a round after evaluating the global model, if that is due."""
        if self.job.evaluates(self.number):
            self.round_evaluated(load(self.job.folder).accuracy(model))
        else:
            self.round_ended()

    def round_evaluated(self, accuracy: float) -> None:
        """End a round that was evaluated."""
        self.accuracy = accuracy
        self.round_ended()

    def round_ended(self) -> None:
        """End a round."""
        self.ends.append(time.monotonic())

    def report(self, *, first_batch: float | None = None) -> None:
        """Print the JSON line.

        :param first_batch: when it began, where no runner's ``batches`` noted it.
        """
        if first_batch is None:
            first_batch = float(Path(os.environ[STARTED + "_FILE"]).read_text())
        line = {
            "seconds": [after - before for before, after in zip(self.ends, self.ends[1:])],
            "start_up": first_batch - float(os.environ[STARTED]),
            "accuracy": self.accuracy,
            "peak_rss_mib": _peak_rss_mib(),
        }
        print(json.dumps(line), flush=True)


def _peak_rss_mib() -> float:
    """Return the most memory that this process has had."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    # Linux's ru_maxrss begins with that of the process that started this one, which has exported the workload.
    return field_mib("self/status", "VmHWM")
