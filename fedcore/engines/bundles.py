"""Short tasks that go to a worker in one message: a switch between processes costs as much as a client of one step.

A bundle is a task whose JSON holds other tasks, and its result holds their outcomes in the same order. Only tasks that
belong to no session and carry no tensors are bundled. How many are is a question of time: results do not depend on it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fedcore.base.tensors import SEPARATOR
from fedcore.base.types import Tensors
from fedcore.client.messages import (
    BUNDLE,
    ClientResult,
    ClientTask,
    Outcome,
    pack_outcome,
    pack_task,
    unpack_outcome,
    unpack_task,
)

BUNDLE_SECONDS = 0.02
"""How long a worker's processor is to be busy with one bundle."""
ASSIGNED_AT_ONCE = 0.8
"""Share of the remaining tasks that is assigned at once: each message costs, and the rest evens out unequal groups."""
PROCESSOR_SECONDS = "processor_seconds"
"""What a worker notes in a task's result; on a busy machine the clock would make short tasks look long."""


class Pace:
    """How long tasks of each kind take, as their results say."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def note(self, task: ClientTask, outcome: Outcome) -> None:
        """Take the time of a finished task into account."""
        if isinstance(outcome, ClientResult) and PROCESSOR_SECONDS in outcome.meta:
            seconds = float(outcome.meta[PROCESSOR_SECONDS])
            self._seconds[task.kind] = 0.9 * self._seconds.get(task.kind, seconds) + 0.1 * seconds

    def bundle_size(self, kind: str) -> int:
        """Return how many tasks of a kind take BUNDLE_SECONDS; 1 where it is not known."""
        return max(1, int(BUNDLE_SECONDS / max(self._seconds.get(kind, BUNDLE_SECONDS), 1e-6)))


def bundled(tasks: Iterable[ClientTask], pace: Pace, workers: int) -> Iterator[list[ClientTask]]:
    """Group tasks: all workers get equally many, and fewer each time, so that they end together.

    Tasks come with the longest first. Assigned to the groups in turn, they make about the same work of each.
    """
    waiting = list(tasks)
    left = len(waiting)
    for _, run in itertools.groupby(waiting, _alike):
        alike = list(run)
        begin = 0
        while begin < len(alike):
            each = min(pace.bundle_size(alike[begin].kind), math.ceil(ASSIGNED_AT_ONCE * left / workers))
            assigned = alike[begin : begin + each * workers]
            yield from (group for first in range(workers) if (group := assigned[first::workers]))
            begin += len(assigned)
            left -= len(assigned)


def _alike(task: ClientTask) -> tuple[str, ...]:
    """Return what tasks of one bundle have in common; a task that cannot be in one has it with no other."""
    plain = task.session is None and isinstance(task.tensors, dict) and not task.tensors
    return (task.kind, task.shared or "") if plain else (task.id,)


def join_tasks(tasks: Sequence[ClientTask]) -> ClientTask:
    """Return a bundle that holds its tasks, in ``meta["tasks"]``; :func:`pack_bundle` packs them when it is sent."""
    first = tasks[0]
    return ClientTask(
        id=f"bundle-{first.id}",
        kind=BUNDLE,
        client=first.client,
        round=first.round,
        shared=first.shared,
        meta={"tasks": tasks},
    )


def pack_bundle(bundle: ClientTask) -> tuple[Tensors, dict[str, Any]]:
    """Split a bundle into tensors, of which it has none, and JSON."""
    tensors, meta = pack_task(bundle)
    return tensors, {**meta, "meta": {"tasks": [pack_task(task)[1] for task in bundle.meta["tasks"]]}}


def split_tasks(bundle: ClientTask) -> list[ClientTask]:
    """Return the tasks of a bundle that was sent."""
    return [unpack_task({}, meta) for meta in bundle.meta["tasks"]]


def join_outcomes(bundle: ClientTask, outcomes: Iterable[Outcome]) -> ClientResult:
    """Return the result of a bundle from the outcomes of its tasks."""
    packed = [pack_outcome(outcome) for outcome in outcomes]
    tensors = {
        f"{number}{SEPARATOR}{name}": tensor
        for number, (_, own, _) in enumerate(packed)
        for name, tensor in own.items()
    }
    return ClientResult(bundle.id, tensors, {"outcomes": [[kind, meta] for kind, _, meta in packed]})


def split_outcomes(result: ClientResult) -> list[Outcome]:
    """Return the outcomes of a bundle's tasks."""
    packed = result.meta["outcomes"]
    tensors: list[Tensors] = [{} for _ in packed]
    for numbered, tensor in result.tensors.items():
        number, _, name = numbered.partition(SEPARATOR)
        tensors[int(number)][name] = tensor
    return [unpack_outcome(kind, own, meta) for own, (kind, meta) in zip(tensors, packed, strict=True)]
