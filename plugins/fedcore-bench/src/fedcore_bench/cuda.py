"""The reference on CUDA: one stream, data on the device, each batch size's step captured once."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import Tensor

from fedcore.models import forward_chunk
from fedcore_bench.reference import Task, Trainer, cohort


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
        """Run rounds, each evaluated where the workload says so; returns seconds, the device's work included."""
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
                order = held[torch.randperm(len(held), generator=trainer.stream).to(held.device, non_blocking=True)]
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
