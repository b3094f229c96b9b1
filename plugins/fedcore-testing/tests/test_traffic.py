"""What a plugin sends, and its card."""

from pydantic import Field
from rich.console import Console

from fedcore import Plugin, PluginOptions, hookimpl
from fedcore_testing import name_of
from fedcore_testing.card import describe, draw
from fedcore_testing.traffic import watch


def test_a_plugin_that_sends_nothing_of_its_own():
    assert watch("fedprox") == ({}, {"down": 0, "up": 0})


def test_prototypes_go_up_and_come_back():
    sent, counted = watch("fedcd", {"fine_classes": 2})
    shapes = {"prototypes": [10, 2, 256], "counts": [10, 2]}
    assert sent == {"up": shapes, "down, before training": shapes}
    each = 10 * 2 * (256 * 4 + 8)  # float32 and int64
    assert counted == {"down": 2 * each, "up": 2 * 2 * each}  # two clients; down in the second round only


def test_an_exchange_and_answers_are_seen():
    exchange = watch("fedcme").tensors
    assert set(exchange["up, exchange"]) == set(exchange["down, exchange"]) == {"classifier.weight", "classifier.bias"}
    assert set(watch("uscc").tensors) == {"up, answer"}


class NeedyOptions(PluginOptions):
    mu: float = Field(ge=0, description="Strength.")


class Needy(Plugin[NeedyOptions]):
    """Has an option without a default."""


class Fails(Plugin):
    """Fails in every round."""

    @hookimpl
    def begin_round(self):
        raise KeyError("centre")


def test_a_plugin_that_does_not_run_by_itself_has_a_card():
    needy, fails = (describe(name_of(plugin)) for plugin in (Needy, Fails))
    assert (needy["options"][0]["default"], needy["sends"]) == ("required", {})
    assert "mu: field required" in needy["not_run"]
    console = Console(width=200)
    with console.capture() as shown:
        console.print(draw(fails))
    assert "which would show what it sends, fail: plugin 'fails' hook begin_round" in shown.get()
