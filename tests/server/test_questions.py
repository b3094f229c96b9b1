"""Questions: methods of a plugin that ``server.ask`` puts to clients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedcore import Plugin, hookimpl, question
from fedcore.base.errors import PluginCallError, PluginContractError, RoundFailedError
from fedcore.hooks.plugins import PluginSet
from fedcore.runs.rounds import lost
from fedcore_testing import committed, federate, name_of, records
from tests.sentences import raises


class Asks(Plugin):
    """Asks every client, which answers nothing."""

    @hookimpl
    def begin_round(self, server):
        server.state["there"] = [answer.client for answer in server.ask("all", self.mood) if not answer.tensors]

    @question
    def mood(self):
        return None

    def weather(self, client):
        return None


class ReadsMood(Asks):
    @hookimpl
    def begin_round(self, server):
        for answer in server.ask("all", self.mood):
            server.state[f"{answer.client}"] = answer.tensors["mood"]


class AsksForWeather(Asks):
    @hookimpl
    def begin_round(self, server):
        list(server.ask("all", self.weather))


def test_none_is_an_empty_answer(tmp_path):
    federate(tmp_path, Asks)
    with raises(PluginContractError, "'mood'"):
        federate(tmp_path, ReadsMood)


def test_the_server_refuses_a_method_that_is_not_marked(tmp_path):
    with raises(PluginContractError):
        federate(tmp_path, AsksForWeather)


def test_a_client_refuses_a_name_that_is_not_marked():
    plugins = PluginSet.create({name_of(Asks): {}})
    assert plugins.answer("asks", "mood") is None
    for name in ("weather", "begin_round", "__init__", "no_such_method"):
        with raises(PluginContractError, "'asks'", name):
            plugins.answer("asks", name)


class AsksSome(Asks):
    """Asks two clients, with their ids in some form, for what they kept."""

    @hookimpl
    def end_local(self, client):
        client.state["round"] = client.round

    @hookimpl
    def begin_round(self, server):
        if server.round:
            server.state["kept"] = [float(answer.tensors["kept"]) for answer in server.ask(self.ids(), self.kept)]

    @question
    def kept(self, client):
        return {"kept": torch.tensor(client.state["round"])}


@pytest.mark.parametrize("ids", [np.array([0, 1]), torch.tensor([0, 1])], ids=["numpy", "torch"])
def test_ids_of_other_kinds_are_clients(tmp_path, monkeypatch, ids):
    monkeypatch.setattr(AsksSome, "ids", lambda self: ids, raising=False)
    result = federate(tmp_path, AsksSome, participation=1.0, rounds=2)
    assert committed(result).plugins["askssome"] == {"kept": [0, 0]}


def test_ids_that_are_no_whole_numbers_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(AsksSome, "ids", lambda self: [0.5], raising=False)
    with raises(PluginContractError, "0.5"):
        federate(tmp_path, AsksSome, rounds=2)


@pytest.mark.parametrize(
    ("method", "named"),
    [
        (lambda self, server: None, "'server'"),
        (lambda self, client, n=3: None, "'n=3'"),
    ],
)
def test_questions_that_clients_could_not_be_asked_are_refused(method, named):
    cls = type("Odd", (Plugin,), {"asked": question(method), "__module__": __name__})
    globals()["Odd"] = cls
    with raises(PluginContractError, named):
        PluginSet.create({name_of(cls): {}})


class Broken(Asks):
    """Its question raises on the clients up to some id."""

    up_to = 0

    @question
    def mood(self, client):
        if client.id <= self.up_to:
            raise NotImplementedError("to do")


class BrokenOnAll(Broken):
    up_to = 9


class Unbelieving(Asks):
    @hookimpl
    def begin_round(self, server):
        list(server.ask("cohort", self.mood, check=self.believe))

    def believe(self, answer):
        raise ValueError("no")


@pytest.mark.parametrize(("plugin", "kinds"), [(Broken, ["raised"]), (Unbelieving, ["rejected"] * 3)])
def test_an_answer_that_fails_is_no_training_that_fails(tmp_path, plugin, kinds):
    notes = []
    result = federate(
        tmp_path, plugin, clients=3, participation=1.0, rounds=1, notify=lambda event, said: notes.append((event, said))
    )
    (record,) = records(result)
    name = f"{plugin.__name__.lower()}.mood"
    assert [(failure["kind"], failure["question"]) for failure in record["failures"]] == [
        (kind, name) for kind in kinds
    ]
    assert (record["accepted"], lost(record).total(), result.history[0]["failed"]) == (3, 0, 0)
    (said,) = [said["message"] for event, said in notes if event == "note" and "failed" in said["message"]]
    assert said.startswith(f"Answers to questions that failed: {len(kinds)}. The first: ")


def test_answers_that_fail_are_not_the_reason_that_a_round_fails(tmp_path):
    with raises(RoundFailedError, "--min-clients"):
        federate(tmp_path, Unbelieving, clients=4, system={"availability": 0.4}, min_clients=4)


def test_a_question_that_raises_on_every_client_ends_the_run(tmp_path):
    with raises(PluginCallError, "'brokenonall'", "mood", "round 1, client 0", "NotImplementedError"):
        federate(tmp_path, BrokenOnAll, clients=3)
