"""Outcomes reach the round in the order of its tasks, each task has one, and others are told and dropped."""

from __future__ import annotations

import itertools

import pytest

from fedcore.client.messages import ClientFailure, ClientResult, ClientTask
from fedcore.server.dispatch_order import in_order

TASKS = [ClientTask(f"t{number}", "fit_begin", client=number, round=0) for number in range(3)]


def pairs(*numbers):
    return [(TASKS[number], ClientResult(TASKS[number].id)) for number in numbers]


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_any_order_of_arrival_gives_the_order_of_dispatch(order):
    found = list(in_order(TASKS, pairs(*order)))
    assert [(task.id, outcome.task_id) for task, outcome in found] == [(task.id, task.id) for task in TASKS]


def test_an_outcome_is_given_on_as_soon_as_its_turn_has_come():
    arrived = iter(pairs(1, 0, 2))
    found = in_order(TASKS, arrived)
    assert next(found)[0].id == "t0"
    assert next(found)[0].id == "t1"
    assert next(arrived)[0].id == "t2", "nothing was read ahead"


def test_a_second_outcome_and_one_that_nobody_asked_for_are_dropped_and_told():
    told = []
    other = ClientTask("else", "fit_begin", client=9, round=0)
    arriving = [*pairs(0, 2, 0, 2), (other, ClientResult("else")), *pairs(1)]
    found = list(in_order(TASKS, arriving, lambda *what: told.append(what)))
    assert [task.id for task, _ in found] == ["t0", "t1", "t2"]
    assert [(client, kind) for client, kind, _ in told] == [(0, "repeated"), (2, "repeated"), (9, "unasked")]


def test_a_task_without_an_outcome_is_a_failure_and_later_ones_stay():
    found = list(in_order(TASKS, pairs(2, 0)))
    assert [task.id for task, _ in found] == ["t0", "t1", "t2"]
    missing = found[1][1]
    assert isinstance(missing, ClientFailure)
    assert (missing.kind, missing.task_id) == ("unreachable", "t1")
    assert isinstance(found[2][1], ClientResult)
