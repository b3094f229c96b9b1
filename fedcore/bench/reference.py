"""The limit: one round's SGD steps in plain PyTorch on tensors in memory, as fast as we know how to write them.

On a CPU: one process per core with one thread, channels_last, fused SGD, malloc told to keep its memory and to use huge
pages; clients are handed out one by one. On CUDA: the same steps on resident data, captured as a graph by hand. It
knows nothing of plugins, states, failures or records, checks nothing and keeps nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F

from fedcore.config import RunConfig
from fedcore.data import Dataset, Partition, ResidentSamples
from fedcore.engines.local import ALLOCATOR, cores
from fedcore.models import build_model
from fedcore.placement import forward_chunk


class Reference(Protocol):
    """Runs rounds of FedAvg."""

    def rounds(self, count: int) -> float:
        """Run rounds, each evaluated where the workload says so; returns seconds."""

    def close(self) -> None:
        """Free everything."""


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
        """Lay the data out as the loop wants them."""
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

    def tensors(self) -> Iterator[Tensor]:
        """Iterate over all tensors."""
        yield from (self.images, self.labels, self.test_images, self.test_labels, *self.holds, *self.weights)


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
        torch.manual_seed(config.seed)
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
        held = self.task.holds[client]
        for _ in range(self.task.config.local_epochs):
            for rows in held[torch.randperm(len(held))].split(self.task.config.batch_size):
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


class CpuReference:
    """One process per core."""

    def __init__(self, task: Task, workers: int | None = None) -> None:
        self.task, self.number = task, 0
        for tensor in task.tensors():
            tensor.share_memory_()
        count = workers or cores()
        self._sums = [[torch.zeros_like(w).share_memory_() for w in task.weights] for _ in range(count)]
        context = mp.get_context("spawn")
        self._next = context.Value("i", 0)
        self._pipes: list[Connection] = []
        self._processes = []
        with _environment({**ALLOCATOR, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}):
            for sums in self._sums:
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(task, sums, theirs, self._next), daemon=True)
                process.start()
                self._pipes.append(ours)
                self._processes.append(process)
        self._ask(("ready",))

    def rounds(self, count: int) -> float:
        """Run rounds; returns seconds."""
        began = time.perf_counter()
        for _ in range(count):
            self._ask(("train", cohort(self.task, self.number)))
            for index, weight in enumerate(self.task.weights):
                torch.add(self._sums[0][index], 0, out=weight)
                for sums in self._sums[1:]:
                    weight.add_(sums[index])
            self.number += 1
            if self.number % self.task.config.eval_every == 0:
                self.accuracy = sum(self._ask(("evaluate",))) / len(self.task.test_labels)
        return time.perf_counter() - began

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join()

    def _ask(self, message: tuple[Any, ...]) -> list[Any]:
        self._next.value = 0
        for pipe in self._pipes:
            pipe.send(message)
        return [pipe.recv() for pipe in self._pipes]


def _serve(task: Task, sums: list[Tensor], pipe: Connection, shared_next: Any) -> None:
    torch.set_num_threads(1)
    trainer = Trainer(task, torch.device("cpu"), torch.channels_last)

    def handed_out(count: int) -> Iterator[int]:
        while True:
            with shared_next.get_lock():
                number = shared_next.value
                shared_next.value += 1
            if number >= count:
                return
            yield number

    while True:
        try:
            kind, *rest = pipe.recv()
        except EOFError:
            return
        found = 0
        with torch.no_grad():
            torch._foreach_copy_(trainer.start, task.weights)
        if kind == "train":
            clients: Sequence[int] = rest[0]
            total = sum(len(task.holds[client]) for client in clients)
            torch._foreach_zero_(sums)
            for number in handed_out(len(clients)):
                trainer.train(clients[number])
                with torch.no_grad():
                    torch._foreach_add_(sums, trainer.parameters, alpha=len(task.holds[clients[number]]) / total)
        elif kind == "evaluate":
            chunks = -(-len(task.test_labels) // forward_chunk(trainer.device))
            found = sum(trainer.hits(chunk) for chunk in handed_out(chunks))
        pipe.send(found)


class CudaReference:
    """One stream, data on the device, each batch size's step captured once."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self.number = 0
        self.task = replace(
            task,
            images=task.images.to(device),
            labels=task.labels.to(device),
            test_images=task.test_images.to(device),
            test_labels=task.test_labels.to(device),
            holds=[held.to(device) for held in task.holds],
        )
        layout = torch.channels_last if task.config.precision == "bf16" else torch.contiguous_format
        self.trainer = Trainer(self.task, device, layout)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._sums = [torch.zeros_like(parameter) for parameter in self.trainer.parameters]

    def rounds(self, count: int) -> float:
        """Run rounds; returns seconds, the device's work included."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            self._round()
            self.number += 1
            if self.number % self.task.config.eval_every == 0:
                chunks = -(-len(self.task.test_labels) // forward_chunk(self.trainer.device))
                self.accuracy = sum(self.trainer.hits(c) for c in range(chunks)) / len(self.task.test_labels)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def close(self) -> None:
        """Give the graphs up."""
        self._graphs.clear()

    def _round(self) -> None:
        clients, trainer = cohort(self.task, self.number), self.trainer
        total = sum(len(self.task.holds[client]) for client in clients)
        torch._foreach_zero_(self._sums)
        trainer.model.train()
        for client in clients:
            held = self.task.holds[client]
            trainer.begin()
            for _ in range(self.task.config.local_epochs):
                order = held[torch.randperm(len(held)).to(held.device, non_blocking=True)]
                for rows in order.split(self.task.config.batch_size):
                    graph, own = self._graph(len(rows))
                    own.copy_(rows)
                    graph.replay()
            with torch.no_grad():
                torch._foreach_add_(self._sums, trainer.parameters, alpha=len(held) / total)
        torch._foreach_copy_(trainer.start, self._sums)

    def _graph(self, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        if size not in self._graphs:
            kept = [tensor.detach().clone() for tensor in (*self.trainer.parameters, *self.trainer.buffers)]
            rows = torch.arange(size, device=self.task.labels.device)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.trainer.step(rows)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.trainer.step(rows)
            with torch.no_grad():
                torch._foreach_copy_([*self.trainer.parameters, *self.trainer.buffers], kept)
            self._graphs[size] = graph, rows
        return self._graphs[size]


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
