"""Questions: methods of a plugin that ``server.ask`` puts to clients."""

from __future__ import annotations

import pytest

from fedcore import Plugin, hookimpl, question
from fedcore.base.errors import PluginContractError
from fedcore.hooks.plugins import PluginSet
from fedcore_testing import federate, name_of


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
    with pytest.raises(PluginContractError, match="raised KeyError: 'mood'"):
        federate(tmp_path, ReadsMood)


def test_the_server_refuses_a_method_that_is_not_marked(tmp_path):
    with pytest.raises(PluginContractError, match=r"asks <bound method .*weather.*marked with @question"):
        federate(tmp_path, AsksForWeather)


def test_a_client_refuses_a_name_that_is_not_marked():
    plugins = PluginSet.create({name_of(Asks): {}})
    assert plugins.answer("asks", "mood") is None
    for name in ("weather", "begin_round", "__init__", "no_such_method"):
        with pytest.raises(
            PluginContractError, match=f"'asks' is asked '{name}', which it does not mark as a question"
        ):
            plugins.answer("asks", name)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (lambda self, server: None, "question asked takes the argument 'server'"),
        (lambda self, client, n=3: None, "question asked takes the argument 'n=3'"),
    ],
)
def test_questions_that_clients_could_not_be_asked_are_refused(method, words):
    cls = type("Odd", (Plugin,), {"asked": question(method), "__module__": __name__})
    globals()["Odd"] = cls
    with pytest.raises(PluginContractError, match=words):
        PluginSet.create({name_of(cls): {}})
