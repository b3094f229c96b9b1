"""The clients of a stack: their samples in turn, their previous models, the outputs of frozen models, their losses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from fedcore import Tensors, derive_seed
from fedcore.client import CORE, Batch, Begin, LocalSession, LocalWork, LossTotals, Picked
from fedcore.engines import ClientTask, unflatten
from fedcore.models import Outputs, forward_chunk
from fedcore_accelerate.stacked_step import Path, value_at
from fedcore_functional import as_parameters

Turn = tuple[int, int]
"""A local epoch and the number of a batch in it."""


class Cohort:
    """The clients of a stack, by their slots 0..K-1. Those with a previous model come first.

    :param one: the session that stands for all in what they have in common.
    :ivar tasks: the clients' tasks.
    :ivar slots: the slot of each task, in the order of the argument.
    :ivar saved: what each has kept.
    :ivar returning: the number of clients with a previous model.
    :ivar sizes: the number of samples of each.
    :ivar works: the work of each.
    :ivar turns: of each, the epochs and numbers of its batches with their sizes.
    """

    def __init__(self, tasks: Sequence[ClientTask], begin: Begin, one: LocalSession) -> None:
        self.begin, self.one = begin, one
        runtime = begin.runtime
        saved = [runtime.store.read(task.client, task.version) for task in tasks]
        reads = runtime.setup.plugins.reads("previous")
        models = [unflatten(own.get(CORE, {})).get("previous", {}) if reads else {} for own in saved]
        order = sorted(range(len(tasks)), key=lambda k: not models[k])
        self.slots = sorted(range(len(tasks)), key=order.__getitem__)
        self.tasks, self.saved = tasks, saved = [tasks[k] for k in order], [saved[k] for k in order]
        self.returning = sum(map(bool, models))
        previous = _stacked([models[k] for k in order[: self.returning]], one.working.device)
        self._previous = vmap(runtime.setup.snapshots.named)(previous) if previous else {}
        self._samples, held = runtime.dataset.train, runtime.partition.train
        clients = torch.tensor([task.client for task in tasks])
        begins, ends = held.offsets[clients], held.offsets[clients + 1]
        self.sizes = (ends - begins).tolist()
        self._starts = [0, *accumulate(self.sizes)]
        moved = (begins - torch.tensor(self._starts[:-1])).repeat_interleave(ends - begins)
        rows = held.positions.index_select(0, torch.arange(self._starts[-1]) + moved)
        self._rows = rows.long().to(one.working.device)
        known: dict[Hashable, tuple[LocalWork, dict[Turn, int]]] = {}
        self.works: list[LocalWork] = []
        self.turns: list[dict[Turn, int]] = []
        for task, size in zip(tasks, self.sizes, strict=True):
            kind = size, *task.meta.items()
            if kind not in known:
                work = LocalWork.of(one.config, size, one.working.smallest_batch, task.meta)
                known[kind] = work, _turns(work, size, one.config.batch_size)
            self.works.append(known[kind][0])
            self.turns.append(known[kind][1])

    def __len__(self) -> int:
        return len(self.tasks)

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
        for task, size in zip(self.tasks, self.sizes, strict=True):
            seed = derive_seed(self.one.config.seed, f"shuffle/{epoch}", round=task.round, client=task.client)
            orders.append(torch.randperm(size, generator=stream.manual_seed(seed)))
        device = self._rows.device
        self._order = torch.cat(orders).to(device)
        starts = torch.tensor(self._starts[:-1], device=device)
        drawn = self._order + starts.repeat_interleave(torch.tensor(self.sizes, device=device))
        self._drawn = self._rows.index_select(0, drawn)

    def batch(self, turn: Turn, slots: Sequence[int], size: int) -> tuple[Batch, Tensor, Tensor, Tensor]:
        """Return the first one's batch of a turn; the inputs and labels (K, B, ...) and the positions (K, B) of all."""
        begin = turn[1] * self.one.config.batch_size
        firsts = torch.tensor([self._starts[slot] + begin for slot in slots], device=self._rows.device)
        places = (firsts.unsqueeze(1) + torch.arange(size, device=firsts.device)).flatten()
        rows, positions = self._drawn.index_select(0, places), self._order.index_select(0, places)
        labels = self._samples.labels.index_select(0, rows)
        x = self._samples.gather(rows).unflatten(0, (len(slots), size))
        first = Batch(self.one, *turn, Picked(positions[:size], rows[:size], labels[:size], None))
        vars(first)["x"] = x[0]  # else the first view of the step gathers it again
        return first, x, labels.unflatten(0, (len(slots), size)), positions.view(-1, size)

    def values_of(self, slots: Sequence[int], path: Path) -> list[Any]:
        """Return what hooks read of some clients, client by client; a single value if it is the same for all."""
        if path.kind == "n":
            return [self.sizes[slot] for slot in slots]
        if path.kind == "class_counts":
            labels, classes = self._samples.labels.index_select(0, self._rows), self.one.working.setup.task.num_classes
            own = [labels[self._starts[slot] : self._starts[slot + 1]] for slot in slots]
            return [torch.bincount(part, minlength=classes) for part in own]
        if path.kind == "module" and path.owner == "previous" and slots[0] < self.returning:
            return [{name: tensor[slot] for name, tensor in self._previous.items()} for slot in slots]
        return [value_at(self.one, path)]

    def previous(self, slots: Sequence[int]) -> Tensors:
        """Return the previous models of neighbours, (K, ...) each."""
        return {name: tensor[slots[0] : slots[-1] + 1] for name, tensor in self._previous.items()}

    def places(self, slots: Sequence[int], positions: Tensor) -> Tensor:
        """Return the places of samples among all clients', from their positions (K, B) in the clients' samples."""
        starts = torch.tensor([self._starts[slot] for slot in slots], device=positions.device)
        return positions + starts.unsqueeze(1)

    def samples_of(self, slots: Sequence[int], size: int) -> tuple[Tensor, Iterator[Tensor]]:
        """Return the labels (K, n, ...) of neighbours, and their inputs in turn, (K, m, ...) each."""
        rows = self._rows[self._starts[slots[0]] : self._starts[slots[-1] + 1]]
        labels = self._samples.labels.index_select(0, rows).unflatten(0, (len(slots), size))
        most = max(self.one.config.batch_size, forward_chunk(rows.device) // len(slots))
        parts = rows.view(len(slots), size).split(most, dim=1)
        return labels, (self._samples.gather(part.flatten()).unflatten(0, part.shape) for part in parts)


class Frozen:
    """The outputs of frozen models on the batches of a stack.

    They are computed once per sample if the first epoch has all samples and is not the only one.
    """

    def __init__(self, cohort: Cohort) -> None:
        self._cohort, self._models = cohort, cohort.one.working.frozen
        self._again = all(
            work.epochs > 1 and sum(count for (epoch, _), count in turns.items() if epoch == 0) == size
            for work, turns, size in zip(cohort.works, cohort.turns, cohort.sizes, strict=True)
        )
        self._known: dict[str, Outputs] = {}
        """By model: its outputs on the samples of all clients, (N, ...)."""
        self._missing: dict[str, int] = {}
        """By model: the samples without outputs. Hooks may have left the model out in steps of the first epoch."""

    def of(self, first: Batch, slots: Sequence[int], x: Tensor, positions: Tensor) -> Callable[[str], Outputs]:
        """Return what gives a frozen model's outputs on a batch of neighbours, (K, B, ...).

        :param x: the inputs (K, B, ...).
        :param positions: in the clients' samples, (K, B).
        """
        cohort = self._cohort
        if "previous" in self._models:
            self._models["previous"].present = slots[0] < cohort.returning

        def outputs(name: str) -> Outputs:
            if not self._again:
                return self._computed(name, slots, x)
            places = cohort.places(slots, positions)
            if first.epoch == 0:
                computed = self._computed(name, slots, x)
                if name not in self._known:
                    rooms = (part.new_empty(sum(cohort.sizes), *part.shape[2:]) for part in computed)
                    self._known[name] = Outputs(*rooms)
                    self._missing[name] = sum(cohort.sizes[: cohort.returning if name == "previous" else None])
                for known, part in zip(self._known[name], computed, strict=True):
                    known[places] = part
                self._missing[name] -= places.numel()
                return computed
            if self._missing.get(name, 1):
                return self._computed(name, slots, x)
            return Outputs(*(part[places] for part in self._known[name]))

        return outputs

    def _computed(self, name: str, slots: Sequence[int], x: Tensor) -> Outputs:
        module = self._models[name].module
        with torch.no_grad():
            if name == "global":  # the same for all
                return Outputs(*(part.unflatten(0, x.shape[:2]) for part in module(x.flatten(0, 1))))
            names = [name for name, _ in module.named_parameters()]

            def of_client(own: dict[str, Tensor], inputs: Tensor) -> tuple[Tensor, ...]:
                as_parameters(own, names)
                return tuple(functional_call(module, own, (inputs,)))

            return Outputs(*vmap(of_client)(self._cohort.previous(slots), x))


class Losses:
    """Sums of losses by name and client."""

    def __init__(self, clients: int) -> None:
        self._clients = clients
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, list[int]] = {}

    def add(self, where: slice, losses: Mapping[str, Tensor], counts: Mapping[str, int]) -> None:
        """Add the sums of losses of a step by name, (K,) each, of clients at these slots, with their numbers."""
        for name, values in losses.items():
            if name not in self._sums:
                kind = torch.promote_types(values.dtype, torch.float32)
                self._sums[name] = values.new_zeros(self._clients, dtype=kind)
                self._counts[name] = [0] * self._clients
            self._sums[name][where].add_(values)
            self._counts[name][where] = [count + counts[name] for count in self._counts[name][where]]

    def give(self, slot: int, losses: LossTotals) -> None:
        """Add a client's sums to those of its session."""
        for name, counts in self._counts.items():
            if counts[slot]:
                losses.add(name, self._sums[name][slot], counts[slot])

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


def _stacked(models: Sequence[Tensors], device: torch.device) -> Tensors:
    """Return the tensors of models of one kind, (K, ...) each; empty without models."""
    return {name: torch.stack([model[name] for model in models]).to(device) for name in models[0]} if models else {}
