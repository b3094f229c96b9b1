"""Clients whose whole work is done as one: weights in, order of samples, steps, losses and uploads.

This is possible where no hook sees a client alone and clients keep nothing. One session then stands for all clients of
a stack: they differ in their samples only.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import accumulate, groupby, islice
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fedcore import ClientUpdate, Tensors, derive_seed
from fedcore.client import (
    Batch,
    Begin,
    Failed,
    LocalSession,
    LocalWork,
    Picked,
    begin_local,
    refuse_edits,
)
from fedcore.engines import ClientRuntime, ClientTask, Outcome
from fedcore_accelerate.stacked_step import Path, value_at
from fedcore_accelerate.stacks import Group, Stacked

OF_ONE_CLIENT = (
    *("begin_local", "local_samples", "gradients", "observe"),
    *("end_local", "pre_upload", "guard_upload"),
)
"""Hooks that are called client by client."""

Turn = tuple[int, int]
"""A local epoch and the number of a batch in it."""


def applies(runtime: ClientRuntime) -> bool:
    """Return whether the clients of a run can be trained as one whole: a matter of its plugins, model and data."""
    setup, working, dataset = runtime.setup, runtime.working, runtime.dataset
    alone = any(map(setup.plugins.implements, OF_ONE_CLIENT)) or setup.breaks or working.frozen
    keeps = setup.layout.personal or setup.layout.buffers - setup.layout.fixed or working.unsaved
    augmented = setup.config.augment and dataset.augmentation
    return not (alone or keeps or augmented) and dataset.train.kind == "tensor"


class Whole:
    """Trains stacks of clients that no hook sees alone. The memory of a stack is used by the next one."""

    def __init__(self) -> None:
        self._memory: dict[str, dict[str, Tensor]] = {}
        """By parameter: its ``weight`` in each client's model and its optimizer state by kind, (K, ...) each."""
        self._stack = Stacked({})

    def train(self, tasks: Sequence[ClientTask], begin: Begin) -> list[Outcome] | None:
        """Do the work of tasks; return their outcomes. None: they have to be trained client by client.

        :raises Exception: the steps cannot be taken at once. Nothing has changed.
        """
        runtime: ClientRuntime = begin.runtime
        if len(tasks) == 1 or any(task.kind != "fit_begin" or task.version is not None for task in tasks):
            return None
        began, before = time.perf_counter(), dict(runtime.setup.plugins.seconds)
        with closing(runtime.session(tasks[0], begin.shared)) as one:
            begin_local(one)
            one.prepare_training()
            cohort = Cohort(tasks, begin, one)
            if not all(cohort.turns):
                return None  # clients without a step fail
            losses = self._trained(cohort)
            refuse_edits(one)
        uploads = _uploads(runtime, self._stack)
        seconds = (time.perf_counter() - began) / len(tasks)
        spent = {name: (now - before[name]) / len(tasks) for name, now in runtime.setup.plugins.seconds.items()}
        return [
            _outcome(
                runtime,
                task,
                ClientUpdate(
                    client=task.client,
                    model=upload,
                    samples=samples,
                    steps=len(turns),
                    lr=one.lr,
                    momentum=one.config.momentum,
                    metrics={"losses": means},
                    seconds=seconds,
                    plugin_seconds=spent,
                ),
            )
            for task, upload, samples, turns, means in zip(
                tasks, uploads, cohort.sizes, cohort.turns, losses.means(), strict=True
            )
        ]

    def _trained(self, cohort: Cohort) -> Losses:
        """Take all steps of all clients."""
        one, stack, losses = cohort.one, self._begun(cohort), Losses(len(cohort))
        groups: dict[tuple[int, int], Group] = {}
        taken = [0] * len(cohort)
        by_number = one.config.optimizer != "sgd"  # Adam's steps have numbers
        for epoch, turns in groupby(cohort.in_turn(), lambda each: each[0][0]):
            one.begin_epoch(epoch)
            cohort.draw(epoch)
            for turn, slots in turns:
                # A run: neighbours in the stack (slot minus place is the same) whose steps are of one kind.
                sizes = [cohort.turns[slot][turn] for slot in slots]
                kinds = [(slot - k, sizes[k], by_number and taken[slot]) for k, slot in enumerate(slots)]
                for (_, size, _), run in groupby(zip(kinds, slots, strict=True), lambda pair: pair[0]):
                    own = [slot for _, slot in run]
                    where = own[0], len(own)
                    if where not in groups:
                        groups[where] = Group(stack, *where, one, partial(cohort.values_of, own))
                    losses.add(slice(own[0], own[-1] + 1), groups[where].step(*cohort.batch(turn, own, size)))
                for slot in slots:
                    taken[slot] += 1
        one.end_epochs()
        return losses

    def _begun(self, cohort: Cohort) -> Stacked:
        """Return the stack with the first weights of all clients and with fresh optimizer state."""
        one, count = cohort.one, len(cohort)
        if not self._memory or len(next(iter(self._memory.values()))["weight"]) < count:
            for name, p in one.working.trained.items():
                kinds = {"weight": p.detach(), **one.optimizer.state[id(p)]}
                self._memory[name] = {kind: _room(tensor, count) for kind, tensor in kinds.items()}
        known = self._stack.known
        self._stack = Stacked({name: own["weight"][:count] for name, own in self._memory.items()})
        self._stack.known = known
        for name, own in self._memory.items():
            self._stack.states[name] = {kind: tensor[:count] for kind, tensor in own.items() if kind != "weight"}
            self._stack.weights[name].copy_(one.start[name])  # (K, ...) from (...)
        if states := [tensor for own in self._stack.states.values() for tensor in own.values()]:
            torch._foreach_zero_(states)
        return self._stack


class Cohort:
    """The clients of a stack, by their slots 0..K-1.

    :param one: the session of the first one, which stands for all in what they have in common.
    :ivar sizes: the number of samples of each.
    :ivar turns: of each, the epochs and numbers of its batches with their sizes.
    """

    def __init__(self, tasks: Sequence[ClientTask], begin: Begin, one: LocalSession) -> None:
        self._tasks, self._begin, self.one = tasks, begin, one
        runtime = begin.runtime
        self._samples, held = runtime.dataset.train, runtime.partition.train
        clients = torch.tensor([task.client for task in tasks])
        begins, ends = held.offsets[clients], held.offsets[clients + 1]
        self.sizes = (ends - begins).tolist()
        self._starts = [0, *accumulate(self.sizes)]
        moved = (begins - torch.tensor(self._starts[:-1])).repeat_interleave(ends - begins)
        rows = held.positions.index_select(0, torch.arange(self._starts[-1]) + moved)
        self._rows = rows.long().to(one.working.device)
        known: dict[tuple[int, ...], dict[Turn, int]] = {}
        self.turns: list[dict[Turn, int]] = []
        for task, size in zip(tasks, self.sizes, strict=True):
            work = LocalWork.of(one.config, size, one.working.smallest_batch, task.meta)
            key = size, work.epochs, work.most_steps or 0
            if key not in known:
                known[key] = _turns(work, size, one.config.batch_size)
            self.turns.append(known[key])

    def __len__(self) -> int:
        return len(self._tasks)

    def in_turn(self) -> list[tuple[Turn, list[int]]]:
        """Return all turns in order, with the slots of the clients that have a batch in it."""
        slots: dict[Turn, list[int]] = defaultdict(list)
        for slot, own in enumerate(self.turns):
            for turn in own:
                slots[turn].append(slot)
        return sorted(slots.items())

    def draw(self, epoch: int) -> None:
        """Draw the clients' orders of samples in a local epoch."""
        stream, orders = torch.Generator(), []
        for task, size in zip(self._tasks, self.sizes, strict=True):
            seed = derive_seed(self.one.config.seed, f"shuffle/{epoch}", round=task.round, client=task.client)
            orders.append(torch.randperm(size, generator=stream.manual_seed(seed)))
        device = self._rows.device
        self._order = torch.cat(orders).to(device)
        starts = torch.tensor(self._starts[:-1], device=device)
        drawn = self._order + starts.repeat_interleave(torch.tensor(self.sizes, device=device))
        self._drawn = self._rows.index_select(0, drawn)

    def batch(self, turn: Turn, slots: Sequence[int], size: int) -> tuple[Batch, Tensor, Tensor, Tensor]:
        """Return the first one's batch of a turn; the inputs (K, B, ...), labels and positions (K, B) of all."""
        begin = turn[1] * self.one.config.batch_size
        firsts = torch.tensor([self._starts[slot] + begin for slot in slots], device=self._rows.device)
        places = (firsts.unsqueeze(1) + torch.arange(size, device=firsts.device)).flatten()
        rows, positions = self._drawn.index_select(0, places), self._order.index_select(0, places)
        labels = self._samples.labels.index_select(0, rows)
        x = self._samples.gather(rows).unflatten(0, (len(slots), size))
        first = Batch(self.one, *turn, Picked(positions[:size], rows[:size], labels[:size], None))
        vars(first)["x"] = x[0]  # else the first view of the step gathers it again
        return first, x, labels.view(-1, size), positions.view(-1, size)

    def values_of(self, slots: Sequence[int], path: Path) -> list[Any]:
        """Return what hooks read of some clients, client by client."""
        if path.kind == "n":
            return [self.sizes[slot] for slot in slots]
        if path.kind == "class_counts":
            labels, classes = self._samples.labels.index_select(0, self._rows), self.one.working.setup.task.num_classes
            own = [labels[self._starts[slot] : self._starts[slot + 1]] for slot in slots]
            return [torch.bincount(part, minlength=classes) for part in own]
        return [value_at(self.one, path)] * len(slots)


class Losses:
    """Sums of losses by name and client."""

    def __init__(self, clients: int) -> None:
        self._clients = clients
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, list[int]] = {}

    def add(self, where: slice, losses: Mapping[str, Tensor]) -> None:
        """Add the losses of a step by name, (K,) each, of clients at these slots."""
        for name, values in losses.items():
            if name not in self._sums:
                kind = torch.promote_types(values.dtype, torch.float32)
                self._sums[name] = values.new_zeros(self._clients, dtype=kind)
                self._counts[name] = [0] * self._clients
            self._sums[name][where].add_(values)
            self._counts[name][where] = [count + 1 for count in self._counts[name][where]]

    def means(self) -> list[dict[str, float]]:
        """Return each client's mean losses by name; waits for the device once per name."""
        totals = {name: own.tolist() for name, own in self._sums.items()}
        return [
            {name: totals[name][slot] / own[slot] for name, own in self._counts.items() if own[slot]}
            for slot in range(self._clients)
        ]


def _turns(work: LocalWork, samples: int, batch_size: int) -> dict[Turn, int]:
    """Return the epochs and numbers of a client's batches, with the batches' sizes."""
    sizes = [min(batch_size, samples - begin) for begin in range(0, samples, batch_size)]
    every = ((epoch, number, size) for epoch in range(work.epochs) for number, size in enumerate(sizes))
    trained = (each for each in every if each[2] >= work.smallest_batch)
    return {(epoch, number): size for epoch, number, size in islice(trained, work.most_steps)}


def _room(tensor: Tensor, count: int) -> Tensor:
    """Return room for so many tensors, (K, ...). Each keeps its memory format: a kernel's last bits depend on it."""
    return tensor.new_empty_strided((count, *tensor.shape), (tensor.numel(), *tensor.stride()))


def _uploads(runtime: ClientRuntime, stack: Stacked) -> list[Tensors]:
    """Return what each client sends of its model. It stands in memory of its own, next to that of the others."""
    joined = vmap(runtime.setup.uploads.join)(stack.weights)
    if runtime.setup.reads_updates:
        joined = {name: tensor.cpu() for name, tensor in joined.items()}
    rows = zip(*(tensor.unbind() for tensor in joined.values()), strict=True)
    return [dict(zip(joined, own, strict=True)) for own in rows]


def _outcome(runtime: ClientRuntime, task: ClientTask, update: ClientUpdate) -> Outcome:
    """Return a client's update, or its failure if a loss is not finite."""
    for name, value in update.metrics["losses"].items():
        if not math.isfinite(value):
            return runtime.failed(task, Failed("diverged", f"loss {name!r} became {value}"))
    return update
