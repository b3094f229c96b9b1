"""The server's scope and a round: which clients a question reaches, what is recorded, what is freed."""

from __future__ import annotations

import pytest
import torch

from fedcore.client.messages import ClientFailure, ClientResult
from fedcore.runs.resolve import resolve, resolve_partition
from fedcore.server.context import RoundContext, ScopeContext
from fedcore.server.federation import Federation
from fedcore.server.scope import MESSAGE_LENGTH, Round, ServerScope
from fedcore.server.state import ServerState
from fedcore.storage.client_store import RemoteClientStore
from fedcore.testing.federation import small_config


class Silent:
    """An engine that notes what is shared, and answers every task but client 1's."""

    workers = 1

    def __init__(self) -> None:
        self.shared: dict[str, dict[str, torch.Tensor]] = {}

    def share(self, key, tensors, meta):
        self.shared[key] = tensors

    def unshare(self, key):
        del self.shared[key]

    def run(self, tasks, window=None):
        for task in reversed(tasks):
            if task.client == 1:
                yield task, ClientFailure(task.id, "raised", "x" * 2 * MESSAGE_LENGTH)
            else:
                yield task, ClientResult(task.id, {"x": torch.tensor([task.client])}, {})


@pytest.fixture
def federation(tmp_path):
    run = resolve(small_config(tmp_path, clients=4, system={"availability": 0.5}))
    setup = run.set_up()
    partition = resolve_partition(setup.config, run.dataset)
    return Federation(setup, run.dataset, partition, Silent(), RemoteClientStore(tmp_path / "clients"))


@pytest.fixture
def committed(federation):
    return ServerState(model=federation.setup.model.state_dict(), round=2)


def test_outside_of_a_round_every_client_is_asked_and_the_scope_frees_what_it_shared(federation, committed):
    with ServerScope(federation, committed, 2, "post_train") as scope:
        answers = list(ScopeContext(scope, "someone").ask("x", clients="all"))
        assert list(federation.engine.shared) == ["ask-2-post_train-1"]
    assert [answer.client for answer in answers] == [0, 2, 3]  # in ascending order, though answered in descending
    assert [(failure["client"], failure["kind"]) for failure in scope.failures] == [(1, "raised")]
    assert len(scope.failures[0]["message"]) == MESSAGE_LENGTH + len(" ...")
    assert federation.engine.shared == {}


def test_a_round_asks_the_reachable_clients_and_records_the_others(federation, committed):
    with Round(federation, committed, 2, "begin_round") as current:
        here = [client for client in range(4) if federation.simulator.reachable(2, client)]
        assert 0 < len(here) < 4
        answers = [answer.client for answer in RoundContext(current, "someone").ask("x", clients="all")]
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
