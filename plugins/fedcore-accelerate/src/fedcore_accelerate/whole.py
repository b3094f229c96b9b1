"""Clients whose whole work is done as one: weights in, order of samples, steps, losses and uploads.

This is possible where no hook sees a client alone but ``begin_local``, which then has to see the same at all clients,
and ``end_local``, which is called under ``vmap``. One session stands for all clients of a stack: they differ in their
samples and in their previous models only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor

from fedcore import ClientContext, ClientUpdate, Tensors
from fedcore.client import (
    CORE,
    Begin,
    Failed,
    LocalSession,
    begin_local,
    random_stream,
    refuse_edits,
)
from fedcore.engines import ClientRuntime, ClientTask, Outcome, dumps, flatten
from fedcore.models import Layout, tried
from fedcore_accelerate.cohort import Cohort, Frozen, Losses
from fedcore_accelerate.random_stream import draws_refused
from fedcore_accelerate.stacked_step import AnyClient, NotStackable, attributes_refused
from fedcore_accelerate.stacks import Group, Stacked, room, trained_by

OF_ONE_CLIENT = ("local_samples", "gradients", "observe", "pre_upload", "guard_upload")
"""Hooks that are called client by client."""

MOST_TOGETHER = 64 << 20
"""The bytes of models up to which a stack stores them in one file, which stays until none of them is needed."""

Payload = dict[str, Tensors]
"""What a client sends next to its model, by namespace."""


def applies(runtime: ClientRuntime) -> bool:
    """Return whether the clients of a run can be trained as one whole: a matter of its plugins, model and data."""
    setup, working, dataset = runtime.setup, runtime.working, runtime.dataset
    alone = any(map(setup.plugins.implements, OF_ONE_CLIENT)) or setup.breaks
    keeps = setup.layout.personal or setup.layout.buffers - setup.layout.fixed or working.plain.unsaved
    augmented = setup.config.augment and dataset.augmentation
    fits = not (alone or keeps or augmented) and dataset.train.kind == "tensor"
    return fits and not ((working.frozen or setup.plugins.implements("end_local")) and _mixes(runtime))


def _mixes(runtime: ClientRuntime) -> bool:
    """Return whether the model's outputs for a sample depend on the others, as with a BatchNorm without statistics.

    Passes without gradients would take them from several clients, or other ones of the same client.
    """
    model, samples = runtime.working.module, runtime.dataset.train
    with tried(model), random_stream(0, runtime.working.device):
        x = samples.gather(torch.arange(min(3, len(samples)))).to(runtime.working.device)
        pairs = [*zip(model(x), model(x[:1]), strict=True)]
    rounding = [torch.finfo(together.dtype).eps ** 0.5 * together.abs().amax() for together, _ in pairs]
    return not all((many[0] - one[0]).abs().amax() <= most for (many, one), most in zip(pairs, rounding, strict=True))


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
                    first, x, labels, positions = cohort.batch(turn, own, size)
                    outputs = frozen.of(first, own, x, positions)
                    step = groups[where, one.excluded].step(first, x, labels, positions, frozen=outputs)
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
        stack.in_order = self._stack.in_order
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
        store.write_together(number, {client: _encoded(*flatten(state)) for client, state in states.items()})
        return
    for client, state in states.items():
        store.write(client, number, state)


def _encoded(tensors: Tensors, rest: Any) -> tuple[bytes, bytes | memoryview]:
    """Return a state as bytes in two pieces. A single tensor is the second one, without a copy."""
    if len(tensors) != 1 or rest:
        return dumps(tensors, rest), b""
    ((name, tensor),) = tensors.items()
    tensor = tensor.cpu().contiguous()
    content = memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    return _head(name, tensor.shape, tensor.dtype), content


@lru_cache(1)
def _head(name: str, shape: torch.Size, dtype: torch.dtype) -> bytes:
    """Return what ``dumps`` puts before the bytes of a tensor."""
    tensor = torch.empty(shape, dtype=dtype)
    blob = dumps({name: tensor}, {})
    return blob[: len(blob) - tensor.nbytes]


def _begin(one: LocalSession) -> None:
    """Call ``begin_local`` once for all clients of a stack, and prepare their training.

    :raises NotStackable: a hook reads what differs between clients.
    """
    one.contexts[""] = cast("ClientContext", AnyClient(one, ""))
    begin_local(one)
    one.close()  # from here on hooks see clients otherwise
    one.prepare_training()
