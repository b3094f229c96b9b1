"""Parts: small plugins without a name, whose hooks are called before those of the plugin that is made of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pydantic import Field

from fedcore import ClientUpdate, Plugin, PluginContractError, PluginOptions, hookimpl, question
from fedcore.hooks.checks import create_plugin
from fedcore.hooks.plugins import PluginSet
from fedcore_testing import federate, name_of, plugin_state, records
from tests.sentences import raises


class CountsOptions(PluginOptions):
    """Options of the part."""

    step: int = Field(default=2, description="What each update counts.")


class Counts(Plugin[CountsOptions]):
    """A part: counts the updates, and tells the clients."""

    starts = ("encoder.*",)

    @hookimpl
    def broadcast(self, server):
        return {"count": torch.tensor(float(server.state.get("count", 0)))}

    @hookimpl
    def begin_local(self, client):
        client.scratch["first"] = float(client.received["count"])

    @hookimpl
    def end_local(self, client):
        return {"step": torch.tensor(float(self.options.step))}

    @hookimpl
    def accumulate(self, server, update):
        assert update.payload.keys() == {"step"}
        server.state["count"] = server.state.get("count", 0) + int(update.payload["step"])


class OwnerOptions(CountsOptions):
    """Options of the owner: those of its part, and another."""

    scale: float = Field(default=3.0, description="Factor.")


class Owner(Plugin[OwnerOptions]):
    """Made of the part; sends something else next to it."""

    owns = ("classifier.*",)

    def __init__(self, options):
        super().__init__(options)
        self.parts = (Counts(options),)

    @hookimpl
    def begin_local(self, client):
        client.state["seen"] = client.scratch["first"] * self.options.scale

    @hookimpl
    def end_local(self, client):
        return {"seen": torch.tensor(client.state["seen"])}

    @hookimpl
    def accumulate(self, server, update):
        assert update.payload.keys() == {"seen"}
        server.state["seen"] = float(update.payload.pop("seen"))

    @hookimpl
    def aggregate(self):
        return None


def test_parts_work_in_the_namespace_of_their_owner_and_with_its_options(tmp_path):
    result = federate(tmp_path, (Owner, {"step": 5}), clients=2, rounds=2, participation=1.0)
    state = plugin_state(result, name_of(Owner).rpartition(".")[2].lower())
    assert state["count"] == 2 * 2 * 5
    assert state["seen"] == 2 * 5 * 3.0  # what the clients of round 1 received, times the owner's option


def test_the_owner_declares_what_its_parts_declare():
    owner = create_plugin(name_of(Owner), {})
    assert (owner.owns, owner.starts) == (("classifier.*",), ("encoder.*",))
    assert [type(member) for member in owner.members] == [Counts, Owner]
    assert {member.name for member in owner.members} == {"owner"}
    assert owner.implements("broadcast")
    assert not owner.implements("report")


def refused(named, **attributes):
    cls = type("Made", (Plugin,), {"__module__": __name__, **attributes})
    globals()["Made"] = cls
    with raises(PluginContractError, "'made'", named):
        create_plugin(name_of(cls), {})


def test_parts_that_do_not_fit_are_refused():
    for parts in ((3,), (Counts,), Counts()):
        refused("(Part(options),)", parts=parts)

    class Weighs(Plugin):
        @hookimpl
        def weight(self):
            return 1.0

    both = {"parts": (Weighs(),), "weight": hookimpl(lambda self: 2.0)}
    refused("weight", **both)
    asks = [type("Asks", (Plugin,), {"size": question(lambda self: None)}) for _ in range(2)]
    refused("size", parts=tuple(ask() for ask in asks))


def test_two_parts_cannot_send_the_same_name():
    class Sends(Plugin):
        @hookimpl
        def broadcast(self):
            return {"x": torch.zeros(1)}

    class Twice(Sends):
        parts = (Sends(),)

    globals()["Twice"] = Twice
    Twice.__qualname__ = "Twice"
    plugins = PluginSet.create({name_of(Twice): {}})
    with raises(PluginContractError, "'twice'", "'x'"):
        plugins.call("twice", "broadcast", server=None)


def clips(bound):
    return hookimpl(
        lambda self, update: replace(update, model={n: t.clamp(max=bound) for n, t in update.model.items()})
    )


def test_parts_change_an_update_one_after_the_other():
    class First(Plugin):
        pre_aggregate = clips(3.0)

    class Idle(Plugin):
        @hookimpl
        def pre_aggregate(self, update):
            assert float(update.model["w"]) == 3.0
            assert update.payload == {}

    class Chain(Plugin):
        parts = (First(), Idle())
        pre_aggregate = clips(2.0)

    Chain.__qualname__ = "Chain"
    globals()["Chain"] = Chain
    plugins = PluginSet.create({name_of(Chain): {}})
    update = ClientUpdate(0, {"w": torch.tensor(9.0)}, 1, 1, 0.1, 0.0, payload={"chain": {"own": 1}, "other": {"x": 2}})
    seen = plugins.call("chain", "pre_aggregate", server=None, update=update)
    assert float(seen.model["w"]) == 2.0
    assert seen.payload == {**update.payload, "chain.First": {}, "chain.Idle": {}}


class Sender(Plugin):
    """A part with an argument: sends its number under the name that its brother uses, too."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    @hookimpl
    def end_local(self, client):
        return {"number": torch.tensor(self.number)}

    @hookimpl
    def accumulate(self, server, update):
        assert update.payload.keys() == {"number"}
        server.state[f"got {self.number}"] = int(update.payload["number"])
        update.payload.clear()


class Other(Sender):
    """A second part of this kind."""


class Pair(Plugin):
    """Made of two parts with arguments; its objects do not share them."""

    parts = (Sender(3), Other(4))


class Reversed(Plugin):
    """The same in another order."""

    parts = Pair.parts[::-1]


@pytest.mark.parametrize("pair", [Pair, Reversed])
@pytest.mark.parametrize("workers", [0, 1])
def test_each_part_has_a_payload_of_its_own_whatever_their_order(tmp_path, pair, workers):
    result = federate(tmp_path, pair, clients=2, rounds=1, participation=1.0, workers=workers)
    name = pair.__name__.lower()
    state = plugin_state(result, name)
    assert (state["got 3"], state["got 4"]) == (3, 4)
    assert records(result)[0]["bytes"]["by_plugin"][name]["up"] == 2 * 2 * 8
    assert not hasattr(pair.parts[0], "name")


def test_the_patterns_of_two_parts_are_joined_whatever_sequence_they_are():
    class Keeps(Plugin):
        @hookimpl
        def personal_parameters(self):
            return ("encoder.*",)

    class Both(Plugin):
        parts = (Keeps(),)

        @hookimpl
        def personal_parameters(self):
            return ["classifier.bias"]

    globals()["Both"] = Both
    Both.__qualname__ = "Both"
    plugins = PluginSet.create({name_of(Both): {}})
    assert plugins.call("both", "personal_parameters", model=None) == ["encoder.*", "classifier.bias"]
