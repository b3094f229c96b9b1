"""The server's scope and a round: which clients a question reaches, what is recorded, what is freed, in which order."""

from __future__ import annotations

import itertools

import pytest
import torch

from fedcore import Plugin, question
from fedcore.client.messages import ClientFailure, ClientTask, Reply, SharedPayload
from fedcore.client.setup import Setup
from fedcore.client.store import RemoteClientStore
from fedcore.runs.resolve import resolve_config, resolve_partition
from fedcore.server.context import ScopeContext
from fedcore.server.scope import MESSAGE_LENGTH, Federation, Round, ServerScope, in_order
from fedcore.server.state import ServerState
from fedcore_testing.federation import small_config


class Someone(Plugin):
    """Can be asked."""

    @question
    def here(self):
        return None


class Silent:
    """An engine that notes what is shared, and answers every task but client 1's."""

    workers = 1

    def __init__(self) -> None:
        self.shared: dict[str, SharedPayload] = {}

    def share(self, key, payload):
        self.shared[key] = payload

    def unshare(self, key):
        del self.shared[key]

    def run(self, tasks, window=None):
        for task in reversed(tasks):
            if task.client == 1:
                yield task, ClientFailure("raised", "x" * 2 * MESSAGE_LENGTH)
            else:
                yield task, Reply({"x": torch.tensor([task.client])})


@pytest.fixture
def federation(tmp_path):
    options = {"rounds": 2, "lr_schedule": "cosine", "clients": 4, "system": {"availability": 0.5}}
    config, dataset = resolve_config(small_config(tmp_path, Someone, **options))
    setup, partition = Setup.build(config, dataset), resolve_partition(config, dataset)
    return Federation(setup, dataset, partition, Silent(), RemoteClientStore(tmp_path / "clients"))


@pytest.fixture
def committed(federation):
    return ServerState(model=federation.setup.model.state_dict(), round=2)


def test_outside_of_a_round_every_client_is_asked_and_the_scope_frees_what_it_shared(federation, committed):
    with ServerScope(federation, committed, 2, "post_train") as scope:
        answers = list(ScopeContext(scope, "someone").ask("all", federation.setup.plugins["someone"].here))
        assert list(federation.engine.shared) == ["ask-2-post_train-1"]
    assert [answer.client for answer in answers] == [0, 2, 3]  # in ascending order, though answered in descending
    assert [(failure["client"], failure["kind"]) for failure in scope.failures] == [(1, "raised")]
    assert len(scope.failures[0]["message"]) == MESSAGE_LENGTH + len(" ...")
    assert federation.engine.shared == {}


def test_a_round_asks_the_reachable_clients_and_records_the_others(federation, committed):
    with Round(federation, committed, 2, "begin_round") as current:
        here = [client for client in range(4) if federation.system.reachable(2, client)]
        assert 0 < len(here) < 4
        answers = [
            answer.client
            for answer in ScopeContext(current, "someone").ask("all", federation.setup.plugins["someone"].here)
        ]
    assert answers == [client for client in here if client != 1]
    away = [failure["client"] for failure in current.failures if failure["kind"] == "unavailable"]
    assert away == [client for client in range(4) if client not in here]


def test_a_scope_has_no_cohort_and_leaves_the_committed_state_alone(federation, committed):
    scope = ServerScope(federation, committed, 1, "report")
    seen = ScopeContext(scope).scoped("someone")
    assert (seen.round, list(seen.cohort), list(seen.accepted), seen.frozen) == (1, [], [], frozenset())
    seen.state["x"] = 1
    assert committed.plugins == {}
    assert scope.states.snapshot() == {"someone": {"x": 1}}


@pytest.mark.parametrize(
    ("phase", "shares"), [("round", [1, 0.5, 0]), ("evaluation", [1, 1, 0.5]), ("post_train", [1, 1, 0.5])]
)
def test_the_learning_rate_is_the_rounds_and_after_it_still_the_last_rounds(federation, committed, phase, shares):
    """A cosine over two rounds; before round 0 the model is evaluated, too."""
    rates = [ServerScope(federation, committed, number, phase).lr for number in range(3)]
    assert rates == pytest.approx([share * federation.config.lr for share in shares])


TASKS = [ClientTask(f"t{number}", "fit_begin", client=number, round=0) for number in range(3)]


def pairs(*numbers):
    return [(TASKS[number], Reply({"number": number})) for number in numbers]


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_any_order_of_arrival_gives_the_order_of_dispatch(order):
    found = list(in_order(TASKS, pairs(*order)))
    assert [(task, outcome.tensors["number"]) for task, outcome in found] == [(task, n) for n, task in enumerate(TASKS)]


def test_an_outcome_is_given_on_as_soon_as_its_turn_has_come():
    arrived = iter(pairs(1, 0, 2))
    found = in_order(TASKS, arrived)
    assert next(found)[0].id == "t0"
    assert next(found)[0].id == "t1"
    assert next(arrived)[0].id == "t2", "nothing was read ahead"


def test_a_second_outcome_and_one_that_nobody_asked_for_are_dropped_and_told():
    told = []
    other = ClientTask("else", "fit_begin", client=9, round=0)
    arriving = [*pairs(0, 2, 0, 2), (other, Reply({})), *pairs(1)]
    found = list(in_order(TASKS, arriving, lambda *what: told.append(what)))
    assert [task.id for task, _ in found] == ["t0", "t1", "t2"]
    assert [(client, kind) for client, kind, _ in told] == [(0, "repeated"), (2, "repeated"), (9, "unasked")]


def test_a_task_without_an_outcome_is_a_failure_and_later_ones_stay():
    found = list(in_order(TASKS, pairs(2, 0)))
    assert [task.id for task, _ in found] == ["t0", "t1", "t2"]
    missing = found[1][1]
    assert isinstance(missing, ClientFailure)
    assert missing.kind == "unreachable"
    assert isinstance(found[2][1], Reply)
