"""Questions of a plugin that has no hook ``answer``."""

from __future__ import annotations

import pytest

from fedcore import Plugin, hookimpl
from fedcore.base.errors import PluginContractError
from fedcore_testing import federate


class Asks(Plugin):
    @hookimpl
    def begin_round(self, server):
        for answer in server.ask("how are you", clients="all"):
            server.state[f"{answer.client}"] = answer.tensors["mood"]


class AsksWhoIsThere(Plugin):
    @hookimpl
    def begin_round(self, server):
        server.state["there"] = [answer.client for answer in server.ask("there?", clients="all") if not answer.tensors]


class AnswersSomethingElse(Asks):
    @hookimpl
    def answer(self, client):
        return None


def test_the_missing_hook_is_named_where_an_answer_is_read(tmp_path):
    with pytest.raises(PluginContractError) as caught:
        federate(tmp_path, Asks)
    assert "reads 'mood' of a client's answer, but has no hook answer" in str(caught.value)
    assert "Hint: write `@hookimpl def answer(" in str(caught.value)
    assert caught.value.plugin == "asks"


def test_who_is_there_can_be_asked_without_it(tmp_path):
    federate(tmp_path, AsksWhoIsThere)


def test_a_name_that_the_hook_does_not_give_is_an_error_of_the_plugin(tmp_path):
    with pytest.raises(PluginContractError, match="raised KeyError: 'mood'"):
        federate(tmp_path, AnswersSomethingElse)
