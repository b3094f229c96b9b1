"""Short tasks that go to a worker of the local engine in one message.

A switch between processes costs as much as a client of one step. How many tasks are bundled is a question of time:
results do not depend on it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fedcore.client.messages import ClientTask

BUNDLE_SECONDS = 0.02
"""How long a worker's processor is to be busy with one bundle."""
ASSIGNED_AT_ONCE = 0.8
"""Share of the remaining tasks that is assigned at once: each message costs, and the rest evens out unequal groups."""


@dataclass(frozen=True)
class Bundle(ClientTask):
    """Tasks that share a message; they belong to no session and carry no tensors. Its outcome is the list of theirs."""

    tasks: tuple[ClientTask, ...] = ()


def bundled(tasks: list[ClientTask], workers: int, seconds: Mapping[str, float]) -> Iterator[ClientTask]:
    """Join short tasks; all workers get equally many, and fewer each time, so that they end together.

    Tasks come with the longest first. Assigned to the bundles in turn, they make about the same work of each.

    :param seconds: how long a task takes, by kind, where that is known.
    """
    left = len(tasks)
    for (kind, *_), run in itertools.groupby(tasks, _alike):
        alike = list(run)
        at_once = max(1, int(BUNDLE_SECONDS / max(seconds.get(kind, BUNDLE_SECONDS), 1e-6)))
        while alike:
            each = min(at_once, math.ceil(ASSIGNED_AT_ONCE * left / workers))
            assigned, alike = alike[: each * workers], alike[each * workers :]
            left -= len(assigned)
            for group in (assigned[number::workers] for number in range(min(workers, len(assigned)))):
                first, id = group[0], f"bundle-{group[0].id}"
                bundle = Bundle(id, first.kind, first.client, first.round, shared=first.shared, tasks=tuple(group))
                yield first if len(group) == 1 else bundle


def _alike(task: ClientTask) -> tuple[str, str | None, str]:
    """Return what tasks of one bundle have in common; a task that cannot be in one has it with no other."""
    plain = task.session is None and task.compute is None and not task.tensors
    return task.kind, task.shared, "" if plain else task.id
