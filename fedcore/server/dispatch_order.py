"""Outcomes in the order in which their tasks were dispatched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from fedcore.client.messages import ClientFailure, ClientTask, Outcome


def in_order(
    tasks: list[ClientTask],
    outcomes: Iterable[tuple[ClientTask, Outcome]],
    ignore: Callable[[int, str, str], None] = lambda client, kind, message: None,
) -> Iterator[tuple[ClientTask, Outcome]]:
    """Yield exactly one outcome of every task, in the order of the tasks; early outcomes are held back.

    A second outcome of a task is dropped, as is an outcome of an unknown task; a task without an outcome is a failure.

    :param ignore: called with client, kind and message of each dropped outcome.
    """
    position = {task.id: index for index, task in enumerate(tasks)}
    waiting: dict[int, Outcome] = {}
    turn = 0
    for task, outcome in outcomes:
        index = position.get(task.id)
        if index is None:
            ignore(task.client, "unasked", f"an outcome of task {task.id!r}, which was not awaited")
        elif index < turn or index in waiting:
            ignore(tasks[index].client, "repeated", f"a second outcome of task {task.id!r}; the first one counts")
        else:
            waiting[index] = outcome
        while turn in waiting:
            yield tasks[turn], waiting.pop(turn)
            turn += 1
    for index in range(turn, len(tasks)):
        missing = ClientFailure(tasks[index].id, "unreachable", "the engine ended without an outcome for it")
        yield tasks[index], waiting.get(index, missing)
