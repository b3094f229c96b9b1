"""The reference on a CPU: one process per core with one thread, clients handed out one by one."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
import torch.multiprocessing as mp
from torch import Tensor

from fedcore.engines import cores
from fedcore.models import forward_chunk
from fedcore_bench.reference import Task, Trainer, cohort
from fedcore_workers import TEMPLATE


class CpuReference:
    """One process per core."""

    def __init__(self, task: Task, workers: int | None = None) -> None:
        self.task, self.number = task, 0
        data = (task.images, task.labels, task.test_images, task.test_labels)
        for tensor in (*data, *task.holds, *task.weights):
            tensor.share_memory_()
        count = workers or cores()
        self._sums = [[torch.zeros_like(w).share_memory_() for w in task.weights] for _ in range(count)]
        context = mp.get_context("spawn")
        self._next = context.Value("i", 0)
        self._pipes: list[Connection] = []
        self._processes = []
        with mock.patch.dict(os.environ, TEMPLATE):
            for sums in self._sums:
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(task, sums, theirs, self._next), daemon=True)
                process.start()
                self._pipes.append(ours)
                self._processes.append(process)
        self._ask(("ready",))

    def rounds(self, count: int) -> float:
        """Run rounds, each evaluated where the workload says so; returns seconds."""
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
        hits = 0
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
            hits = sum(trainer.hits(chunk) for chunk in handed_out(chunks))
        pipe.send(hits)
