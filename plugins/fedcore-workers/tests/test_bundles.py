"""Tasks that share a message: which do, what comes back, and what a dead worker costs."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
import torch

from fedcore import Plugin, hookimpl
from fedcore.engines import ClientTask
from fedcore.engines import groups_of as together
from fedcore_workers import engine
from fedcore_workers.engine import BUNDLE_SECONDS, MESSAGE_SECONDS, Bundle, bundled
from tests import support

PLAIN = [
    ClientTask(f"fit-{client}", "fit_begin", client, 0, shared="round-0", meta={"steps": 2}) for client in range(40)
]


def grouped(tasks, seconds=None, workers=2, kind="fit_begin"):
    """Return the tasks that share a message; ``seconds`` is what one of a kind takes."""
    found = bundled(tasks, workers, {} if seconds is None else {kind: seconds})
    return [list(task.tasks) if isinstance(task, Bundle) else [task] for task in found]


def sizes(tasks, *given, **named):
    groups = grouped(tasks, *given, **named)
    assert sorted((task.id for group in groups for task in group), key=order_of(tasks)) == [task.id for task in tasks]
    return list(map(len, groups))


def order_of(tasks):
    return {task.id: number for number, task in enumerate(tasks)}.__getitem__


def test_tasks_of_unknown_or_long_duration_go_alone():
    assert sizes(PLAIN) == [1] * 40
    assert sizes(PLAIN, BUNDLE_SECONDS) == [1] * 40
    assert sizes(PLAIN, BUNDLE_SECONDS / 10, kind="evaluate") == [1] * 40


def test_short_tasks_share_bundles_that_shrink_towards_the_end():
    found = sizes(PLAIN, BUNDLE_SECONDS / 5.5)
    assert found[:4] == [5] * 4
    assert found == sorted(found, reverse=True)
    assert found[-1] == 1


def test_few_very_short_tasks_take_few_messages():
    assert sizes(PLAIN, MESSAGE_SECONDS / 2.5) == [18, 18, 2, 2]
    assert sizes(PLAIN, MESSAGE_SECONDS / 3.5) == [20, 20]  # the 2 left of each would take less than a message
    assert sizes(PLAIN, 1e-6) == [20, 20]
    assert sizes(PLAIN[:1], 1e-6) == [1]
    assert sizes(PLAIN, 1e-6, workers=64) == [1] * 40


def test_workers_are_dealt_tasks_in_turn_so_that_the_long_ones_are_shared_out():
    groups = grouped(PLAIN, BUNDLE_SECONDS / 5.5)
    assert [task.client for task in groups[0]] == [0, 2, 4, 6, 8]
    assert [task.client for task in groups[1]] == [1, 3, 5, 7, 9]
    work = [40 - task.client for task in PLAIN]  # seconds, the longest first
    done = [sum(work[task.client] for group in groups[worker::2] for task in group) for worker in range(2)]
    assert max(done) - min(done) <= max(work) / 2


@pytest.mark.parametrize(
    "other",
    [
        {"session": "0-1"},
        {"shared": "round-1"},
        {"kind": "evaluate"},
        {"tensors": {"x": torch.ones(1)}},
        {"compute": dict},
    ],
    ids=lambda other: next(iter(other)),
)
def test_only_tasks_alike_share_a_bundle(other):
    tasks = [*PLAIN[:10], replace(PLAIN[10], **other), *PLAIN[11:]]
    groups = grouped(tasks, 1e-6, workers=1)
    assert [tasks[10]] in groups
    assert max(map(len, groups)) > 1


class EndsAWorker(Plugin):
    @hookimpl
    def begin_local(self, client):
        if client.round == 2 and client.id == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_at_a_bundle_costs_only_the_client_that_ends_it(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(engine, "BUNDLE_SECONDS", 1e3)
    monkeypatch.setattr(engine, "bundled", lambda *given: seen.extend(bundled(*given)) or bundled(*given))
    options = {"rounds": 3, "clients": 8, "participation": 1.0, "local_epochs": 1, "batch_size": 256}
    found = support.run(tmp_path, EndsAWorker, workers=1, **options)
    assert any(isinstance(task, Bundle) and len(task.tasks) > 1 for task in seen)
    failures = [record["failures"] for record in support.lines(found)]
    assert [[(each["client"], each["kind"]) for each in failed] for failed in failures] == [
        [],
        [],
        [(3, "worker_lost")],
    ]


def test_trainings_that_a_runner_takes_together_are_neighbours_whatever_the_workers_take():
    fits = PLAIN[:7]
    asked = [replace(task, id=f"evaluate-{task.client}", kind="evaluate") for task in PLAIN[7:9]]
    joined = list(together([*fits, *asked], 3))
    assert [[task.client for task in tasks] for tasks in joined] == [[0, 1, 2], [3, 4, 5], [6], [7], [8]]
    own = [fits[0], replace(fits[1], tensors={"of its own": torch.ones(1)}), fits[2]]
    assert list(together(own, 3)) == [[task] for task in own]
    assert list(together(fits, 1)) == [[task] for task in fits]
