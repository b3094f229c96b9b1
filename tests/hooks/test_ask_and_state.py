"""Questions to clients, broadcasts, and states that last from round to round."""

from __future__ import annotations

import torch

from fedcore import Plugin, hookimpl, question
from tests.support import client_state, committed, lines


class Sender(Plugin):
    value = 1.0

    @hookimpl
    def begin_round(self, server):
        total = 0.0
        for answer in server.ask("all", self.n):
            total += float(answer.tensors["n"])
        server.state["total"] = torch.tensor([total])

    @question
    def n(self, client):
        return {"n": torch.tensor([client.n * self.value])}

    @hookimpl
    def broadcast(self, server):
        return {"x": server.state["total"]}

    @hookimpl
    def begin_local(self, client):
        client.state["got"] = client.received["x"]
        client.state["names"] = sorted(client.received)


class OtherSender(Sender):
    value = 10.0


def test_ask_state_broadcast_and_received_have_their_own_namespaces(toy):
    result = toy(Sender, OtherSender, rounds=2)
    for client in (0, 1):
        kept = client_state(result, client)
        assert kept["sender"]["got"].tolist() == [4.0]
        assert kept["othersender"]["got"].tolist() == [40.0]
        assert kept["sender"]["names"] == ["x"]
    counted = lines(result)[0]["bytes"]["by_plugin"]
    assert counted["sender"] == counted["othersender"] == {"down": 2 * 4, "up": 2 * 4}
    assert counted["model"] == {"down": 8 * (2 + 2 + 2), "up": 8 * 2}


def test_ask_for_some(toy):
    class Asker(Plugin):
        @hookimpl
        def begin_round(self, server):
            server.state["some"] = [answer.client for answer in server.ask([1, 0, 1], self.nothing)]
            server.state["cohort"] = [answer.client for answer in server.ask("cohort", self.nothing)]

        @question
        def nothing(self):
            return None

    result = toy(Asker, participation=0.5)
    kept = committed(result).plugins["asker"]
    assert kept["some"] == [0, 1]
    assert kept["cohort"] == lines(result)[0]["cohort"]


def test_state_of_a_client_lasts_and_is_the_clients_own(go):
    class Diary(Plugin):
        @hookimpl
        def begin_local(self, client):
            client.state["rounds"] = [*client.state.get("rounds", []), client.round]
            client.state["sum"] = client.state.get("sum", torch.zeros(1)) + client.id
            client.scratch.setdefault("fresh", []).append(1)
            assert client.scratch["fresh"] == [1], "scratch lasts one round"

    result = go(Diary, rounds=3, participation=0.5)
    cohorts = [record["cohort"] for record in lines(result)]
    for client in range(4):
        rounds = [number for number, cohort in enumerate(cohorts) if client in cohort]
        kept = client_state(result, client).get("diary", {"rounds": [], "sum": torch.zeros(1)})
        assert kept["rounds"] == rounds
        assert kept["sum"].item() == client * len(rounds)
    assert len({tuple(cohort) for cohort in cohorts}) > 1
