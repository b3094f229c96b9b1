"""The limit: one round's SGD steps in plain PyTorch on tensors in memory, as fast as we know how to write them.

On a CPU: one process per core with one thread, channels_last, fused SGD, malloc told to keep its memory and to use huge
pages; clients are handed out one by one. On CUDA: the same steps on resident data, captured as a graph by hand. It
knows nothing of plugins, states, failures or records, checks nothing and keeps nothing.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcore import RunConfig
from fedcore.data import Dataset, Partition, ResidentSamples
from fedcore.models import build_model, forward_chunk


@dataclass
class Task:
    """A workload's tensors and settings."""

    config: RunConfig
    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    holds: list[Tensor]
    weights: list[Tensor]

    @classmethod
    def of(cls, config: RunConfig, dataset: Dataset, partition: Partition) -> Task:
        """Lay out the data for the loop: images with channels last, and copies of indices and weights."""
        train, test = dataset.train, dataset.test
        assert isinstance(train, ResidentSamples)
        assert isinstance(test, ResidentSamples)
        model = make_model(config, dataset.num_classes, dataset.input_shape)
        return cls(
            config,
            train.images.permute(0, 2, 3, 1).contiguous(),
            train.labels,
            test.images.permute(0, 2, 3, 1).contiguous(),
            test.labels,
            [indices.clone() for indices in partition.train],
            [parameter.detach().clone() for parameter in model.parameters()],
        )


def make_model(config: RunConfig, num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    """Return the workload's model."""
    return build_model(
        config.model,
        num_classes=num_classes,
        input_shape=input_shape,
        seed=config.seed,
        projection=config.projection,
    )[0]


class Trainer:
    """Trains clients one after the other on one model, optimizer and set of buffers."""

    def __init__(self, task: Task, device: torch.device, memory_format: torch.memory_format) -> None:
        self.task, self.device, config = task, device, task.config
        self.stream = torch.Generator().manual_seed(config.seed)  # fedcore notes draws from torch's own
        shape = (task.images.shape[3], task.images.shape[1], task.images.shape[2])
        model = make_model(config, int(task.labels.max()) + 1, shape)
        self.model = model.to(device=device, memory_format=memory_format)  # type: ignore[call-overload]
        self.parameters = list(self.model.parameters())
        self.start = [torch.empty_like(p.detach()).copy_(w) for w, p in zip(task.weights, self.parameters, strict=True)]
        self.optimizer = torch.optim.SGD(self.parameters, config.lr, config.momentum, fused=True)
        self.buffers: list[Tensor] = []
        if config.momentum:
            for parameter in self.parameters:
                buffer = torch.zeros_like(parameter)
                self.optimizer.state[parameter]["momentum_buffer"] = buffer
                self.buffers.append(buffer)

    def autocast(self) -> Any:
        """Return the arithmetic of the workload."""
        if self.task.config.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def step(self, rows: Tensor) -> None:
        """Take one optimizer step."""
        x = self.task.images.index_select(0, rows).permute(0, 3, 1, 2)
        with self.autocast():
            loss = F.cross_entropy(self.model(x)[1], self.task.labels[rows])
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    @torch.no_grad()
    def begin(self) -> None:
        """Start a client from the global weights."""
        torch._foreach_copy_(self.parameters, self.start)
        if self.buffers:
            torch._foreach_zero_(self.buffers)

    def train(self, client: int) -> None:
        """Train one client."""
        self.begin()
        self.model.train()
        config, held = self.task.config, self.task.holds[client]
        per_pass = config.batches(len(held))
        steps = config.local_steps or config.local_epochs * per_pass
        for taken in range(0, steps, per_pass):
            batches = held[torch.randperm(len(held), generator=self.stream)].split(config.batch_size)
            for rows in batches[: steps - taken]:
                self.step(rows)

    @torch.no_grad()
    def hits(self, chunk: int) -> int:
        """Return how many of a chunk of test samples the global model gets right."""
        torch._foreach_copy_(self.parameters, self.start)
        self.model.eval()
        size = forward_chunk(self.device)
        part = slice(chunk * size, (chunk + 1) * size)
        x = self.task.test_images[part].permute(0, 3, 1, 2)
        return int((self.model(x)[1].argmax(1) == self.task.test_labels[part]).sum())


def cohort(task: Task, number: int) -> list[int]:
    """Return the clients of a round, the longest first."""
    stream = torch.Generator().manual_seed(number)
    chosen = torch.randperm(len(task.holds), generator=stream)[: task.config.cohort_size].tolist()
    return sorted(chosen, key=lambda client: -len(task.holds[client]))
