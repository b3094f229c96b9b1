"""Clients whose whole work is done as one: weights in, order of samples, steps, losses and uploads.

This is possible where no hook sees a client alone but ``begin_local``, which then has to see the same at all clients,
and ``end_local``, which is called under ``vmap``. One session stands for all clients of a stack: they differ in their
samples and in their previous models only.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate, groupby, islice
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from fedcore import ClientContext, ClientUpdate, Tensors, derive_seed
from fedcore.client import (
    CORE,
    Batch,
    Begin,
    Failed,
    LocalSession,
    LocalWork,
    LossTotals,
    Picked,
    begin_local,
    refuse_edits,
)
from fedcore.engines import ClientRuntime, ClientTask, Outcome, flatten, unflatten
from fedcore.models import Layout, Outputs, forward_chunk
from fedcore_accelerate.random_stream import draws_refused
from fedcore_accelerate.stacked_step import AnyClient, NotStackable, Path, attributes_refused, value_at
from fedcore_accelerate.stacks import Group, Stacked, room, trained_by

OF_ONE_CLIENT = ("local_samples", "gradients", "observe", "pre_upload", "guard_upload")
"""Hooks that are called client by client."""

MOST_TOGETHER = 64 << 20
"""The bytes of models up to which a stack stores them in one file, which stays until none of them is needed."""

Turn = tuple[int, int]
"""A local epoch and the number of a batch in it."""
Payload = dict[str, Tensors]
"""What a client sends next to its model, by namespace."""


def applies(runtime: ClientRuntime) -> bool:
    """Return whether the clients of a run can be trained as one whole: a matter of its plugins, model and data."""
    setup, working, dataset = runtime.setup, runtime.working, runtime.dataset
    alone = any(map(setup.plugins.implements, OF_ONE_CLIENT)) or setup.breaks
    keeps = setup.layout.personal or setup.layout.buffers - setup.layout.fixed or working.unsaved
    augmented = setup.config.augment and dataset.augmentation
    return not (alone or keeps or augmented) and dataset.train.kind == "tensor"


class Whole:
    """Trains stacks of clients as one. The memory of a stack is used by the next one."""

    def __init__(self) -> None:
        self._memory: dict[str, dict[str, Tensor]] = {}
        """By parameter: its ``weight`` in each client's model and its optimizer state by kind, (K, ...) each."""
        self._stack = Stacked({})

    def train(self, tasks: Sequence[ClientTask], begin: Begin) -> list[Outcome] | None:
        """Do the work of tasks; return their outcomes. None: they have to be trained client by client.

        :raises Exception: the steps cannot be taken at once. Nothing has changed.
        """
        runtime: ClientRuntime = begin.runtime
        if len(tasks) == 1 or any(task.kind != "fit_begin" for task in tasks):
            return None
        began, before = time.perf_counter(), dict(runtime.setup.plugins.seconds)
        session = runtime.session(tasks[0], begin.shared, saved={})
        with closing(session) as one, draws_refused(one.working.device), attributes_refused(one.working.module):
            _begin(one)
            cohort = Cohort(tasks, begin, one)
            if not all(cohort.turns) or (one.requests.frozen and len({work.epochs for work in cohort.works}) > 1):
                return None  # clients without a step fail, and epochs without some parameters count from the end
            if any(own.keys() - {CORE} for own in cohort.saved):
                return None  # plugins may read what they have kept of each client
            losses = self._trained(cohort)
            payloads = self._ended(cohort)
            refuse_edits(one)
            frozen = (one.excluded & one.working.layout.trainable).intersection(one.working.layout.shared)
        setup = runtime.setup
        uploads = self._rows(setup.uploads, on_cpu=setup.reads_updates)
        means, ended = losses.means(), list[Outcome | None]()
        for slot, task in enumerate(cohort.tasks):
            if broken := next((name for name, value in means[slot].items() if not math.isfinite(value)), ""):
                problem = f"loss {broken!r} became {means[slot][broken]}"
                ended.append(runtime.failed(task, Failed("diverged", problem)))
            else:
                ended.append(None if payloads[slot] is not None else self._ended_alone(cohort, slot, losses))
        version = None
        if setup.plugins.reads("previous"):
            version = one.round
            kept = uploads if setup.uploads == setup.snapshots else self._rows(setup.snapshots, on_cpu=False)
            _store(cohort, {slot: kept[slot] for slot, done in enumerate(ended) if done is None})
        seconds = (time.perf_counter() - began) / len(tasks)
        spent = {name: (now - before[name]) / len(tasks) for name, now in setup.plugins.seconds.items()}
        outcomes: list[Outcome] = []
        for slot, (task, done) in enumerate(zip(cohort.tasks, ended, strict=True)):
            if isinstance(done, ClientUpdate):
                done = replace(done, seconds=seconds, plugin_seconds=spent)
            elif done is None:
                done = ClientUpdate(
                    client=task.client,
                    model=uploads[slot],
                    samples=cohort.sizes[slot],
                    steps=len(cohort.turns[slot]),
                    lr=one.lr,
                    momentum=one.config.momentum,
                    payload=payloads[slot] or {},
                    metrics={"losses": means[slot]},
                    frozen=frozen,
                    version=version,
                    seconds=seconds,
                    plugin_seconds=spent,
                )
            outcomes.append(done)
        return [outcomes[slot] for slot in cohort.slots]

    def _trained(self, cohort: Cohort) -> Losses:
        """Take all steps of all clients."""
        one, stack, losses = cohort.one, self._begun(cohort), Losses(len(cohort))
        frozen = Frozen(cohort)
        groups: dict[Hashable, Group] = {}
        taken = [0] * len(cohort)
        by_number = one.config.optimizer != "sgd"  # Adam's steps have numbers
        for epoch, turns in groupby(cohort.in_turn(), lambda each: each[0][0]):
            one.begin_epoch(epoch)
            cohort.draw(epoch)
            for turn, slots in turns:
                # A run: neighbours in the stack (slot minus place is the same) whose steps are of one kind.
                sizes = [cohort.turns[slot][turn] for slot in slots]
                kinds = [
                    (slot - k, sizes[k], by_number and taken[slot], slot < cohort.returning)
                    for k, slot in enumerate(slots)
                ]
                for (_, size, *_), run in groupby(zip(kinds, slots, strict=True), lambda pair: pair[0]):
                    own = [slot for _, slot in run]
                    where = own[0], len(own)
                    if (where, one.excluded) not in groups:
                        groups[where, one.excluded] = Group(stack, *where, one, partial(cohort.values_of, own))
                    first, *joined = cohort.batch(turn, own, size)
                    outputs = frozen.of(first, own, *joined)
                    step = groups[where, one.excluded].step(first, *joined, frozen=outputs)
                    losses.add(slice(own[0], own[-1] + 1), *step)
                for slot in slots:
                    taken[slot] += 1
        one.end_epochs()
        return losses

    def _begun(self, cohort: Cohort) -> Stacked:
        """Return the stack with the first weights of all clients and with fresh optimizer state."""
        one, count, trained = cohort.one, len(cohort), trained_by(cohort.one)
        own = {name: p for name, p in one.working.parameters.items() if name in one.working.layout.trainable}
        kinds = {
            name: {"weight": p.detach(), **one.optimizer.state.get(id(p), {})} for name, p in (own | trained).items()
        }
        for name, tensors in kinds.items():
            memory, shape = self._memory.get(name, {}), tensors["weight"].shape  # a plugin's own may change its shape
            if memory.keys() != tensors.keys() or len(memory["weight"]) < count or memory["weight"].shape[1:] != shape:
                self._memory[name] = {kind: room(tensor, count) for kind, tensor in tensors.items()}
        memories = {name: {kind: t[:count] for kind, t in self._memory[name].items()} for name in kinds}
        stack = Stacked({name: memories[name]["weight"] for name in own})
        stack.added = {name: memories[name]["weight"] for name in trained.keys() - own.keys()}
        stack.known, stack.known_at_end = self._stack.known, self._stack.known_at_end
        for name, memory in memories.items():
            first = one.start[name] if name in own else kinds[name]["weight"]
            memory.pop("weight").copy_(first)  # (K, ...) from (...)
        stack.states = {name: memories[name] for name in trained}
        if states := [tensor for of_one in stack.states.values() for tensor in of_one.values()]:
            torch._foreach_zero_(states)
        self._stack = stack
        return stack

    def _ended(self, cohort: Cohort) -> list[Payload | None]:
        """Call ``end_local`` for neighbours with the same number of samples at once.

        :returns: the payloads by slot; None where the hooks have to see the client alone.
        :raises NotStackable: hooks have changed weights: clients keep the model from before.
        """
        payloads: list[Payload | None] = []
        if not cohort.one.plugins.implements("end_local"):
            return [{} for _ in cohort.tasks]
        weights = [*self._stack.weights.values(), *self._stack.added.values()]
        for size, run in groupby(range(len(cohort)), cohort.sizes.__getitem__):
            slots = [*run]
            group = Group(self._stack, slots[0], len(slots), cohort.one, partial(cohort.values_of, slots))
            versions, sent = [tensor._version for tensor in weights], None
            with suppress(Exception):  # as above; the hooks are called again, client by client
                sent = group.end(cohort.one, *cohort.samples_of(slots, size))
            if versions != [tensor._version for tensor in weights]:
                raise NotStackable("end_local changes weights in place")
            if sent is None:
                payloads += [None] * len(slots)
                continue
            if cohort.begin.runtime.setup.reads_updates:
                sent = {name: {key: tensor.cpu() for key, tensor in own.items()} for name, own in sent.items()}
            for k in range(len(slots)):
                payloads.append({name: {key: t[k] for key, t in own.items()} for name, own in sent.items() if own})
        return payloads

    def _ended_alone(self, cohort: Cohort, slot: int, losses: Losses) -> Outcome:
        """End the training of a client whose hooks have to see it alone."""
        task, runtime = cohort.tasks[slot], cohort.begin.runtime
        try:
            with closing(runtime.session(task, cohort.begin.shared)) as session:
                session.start_clock()
                begin_local(session)
                session.prepare_training()
                with torch.no_grad():
                    for name, tensor in self._stack.weights.items():
                        session.working.state[name].copy_(tensor[slot])
                    trained = trained_by(session)
                    for name, tensor in self._stack.added.items():
                        trained[name].copy_(tensor[slot])
                session.steps = len(cohort.turns[slot])
                losses.give(slot, session.losses)
                done: Outcome = runtime.trained(task, session, session.work.epochs)
                return done
        except Exception as error:
            failure: Outcome = runtime.failed(task, error)
            return failure

    def _rows(self, layout: Layout, *, on_cpu: bool) -> list[Tensors]:
        """Return each client's model in a layout. It stands in memory of its own, next to that of the others."""
        joined = layout.join(self._stack.weights, 1)
        if on_cpu:
            joined = {name: tensor.cpu() for name, tensor in joined.items()}
        rows = zip(*(tensor.unbind() for tensor in joined.values()), strict=True)
        return [dict(zip(joined, own, strict=True)) for own in rows]


def _store(cohort: Cohort, previous: Mapping[int, Tensors]) -> None:
    """Store the models that clients keep until their next training, by slot."""
    store, number = cohort.begin.runtime.store, cohort.one.round
    states = {cohort.tasks[slot].client: {CORE: flatten({"previous": model})[0]} for slot, model in previous.items()}
    if previous and sum(tensor.nbytes for model in previous.values() for tensor in model.values()) <= MOST_TOGETHER:
        store.write_together(number, states)
        return
    for client, state in states.items():
        store.write(client, number, state)


def _begin(one: LocalSession) -> None:
    """Call ``begin_local`` once for all clients of a stack, and prepare their training.

    :raises NotStackable: a hook reads what differs between clients.
    """
    one.contexts[""] = cast("ClientContext", AnyClient(one, ""))
    begin_local(one)
    one.close()  # from here on hooks see clients otherwise
    one.prepare_training()


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
        """Return the labels (K, n) of neighbours, and their inputs in turn, (K, m, ...) each."""
        rows = self._rows[self._starts[slots[0]] : self._starts[slots[-1] + 1]]
        labels = self._samples.labels.index_select(0, rows).view(len(slots), size)
        most = max(self.one.config.batch_size, forward_chunk(rows.device) // len(slots))
        parts = rows.view(len(slots), size).split(most, dim=1)
        return labels, (self._samples.gather(part.flatten()).unflatten(0, part.shape) for part in parts)


class Frozen:
    """The outputs of frozen models on the batches of a stack. They are computed once per sample if all are used."""

    def __init__(self, cohort: Cohort) -> None:
        self._cohort, self._models = cohort, cohort.one.working.frozen
        self._again = all(work.sees_all_samples and work.epochs > 1 for work in cohort.works)
        self._known: dict[str, Outputs] = {}
        """By model: its outputs on the samples of all clients, (N, ...)."""

    def of(
        self, first: Batch, slots: Sequence[int], x: Tensor, labels: Tensor, positions: Tensor
    ) -> Callable[[str], Outputs]:
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
                for known, part in zip(self._known[name], computed, strict=True):
                    known[places] = part
            return Outputs(*(part[places] for part in self._known[name]))

        return outputs

    def _computed(self, name: str, slots: Sequence[int], x: Tensor) -> Outputs:
        module = self._models[name].module
        with torch.no_grad():
            if name == "global":  # the same for all
                return Outputs(*(part.unflatten(0, x.shape[:2]) for part in module(x.flatten(0, 1))))
            weights = self._cohort.previous(slots)
            return Outputs(*vmap(lambda own, inputs: tuple(functional_call(module, own, (inputs,))))(weights, x))


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
