"""What a plugin's class may look like: hooks, markers, arguments, options."""

from __future__ import annotations

import inspect

import pytest
from pydantic import BaseModel

from fedcore import Plugin, hookimpl
from fedcore.base.errors import PluginContractError
from fedcore.hooks.checks import RESULTS, RETURNS, create_plugin
from fedcore.hooks.plugin import ATTRIBUTES
from fedcore.hooks.plugins import PluginSet
from tests.hooks.refusals import create, refused
from tests.sentences import raises


def test_a_hook_that_does_not_exist():
    class Typo(Plugin):
        @hookimpl
        def local_los(self, step):
            return None

    error = refused(Typo, "local_los ", "'local_loss'")
    assert (error.plugin, error.hook) == ("typo", "local_los")


def test_a_hook_without_its_marker():
    class Unmarked(Plugin):
        def local_loss(self, step):
            return None

    assert refused(Unmarked, "local_loss", "@hookimpl").hook == "local_loss"


def test_an_overridden_hook_without_its_marker():
    class Parent(Plugin):
        @hookimpl
        def local_loss(self, step):
            return None

    class Child(Parent):
        def local_loss(self, step):
            return None

    create(Parent)
    refused(Child, "local_loss", "@hookimpl")


def test_an_argument_with_a_default():
    class Defaulted(Plugin):
        @hookimpl
        def local_loss(self, step, scale=1.0):
            return None

    assert refused(Defaulted, "local_loss", "'scale=1.0'").hook == "local_loss"


def test_a_specified_argument_with_a_default():
    class Half(Plugin):
        @hookimpl
        def local_loss(self, step=None):
            return None

    refused(Half, "local_loss", "'step=None'")


def _yields(self, step):
    yield step


async def _awaits(self, step):
    return None


async def _awaits_and_yields(self, step):
    yield step


@pytest.mark.parametrize(
    ("hook", "named"),
    [
        (_yields, "generator"),
        (_awaits, "asynchronous"),
        (_awaits_and_yields, "asynchronous"),
        (staticmethod(lambda step: None), "staticmethod"),
        (classmethod(lambda cls, step: None), "classmethod"),
    ],
)
def test_a_function_whose_body_would_not_run(hook, named):
    refused(type("Odd", (Plugin,), {"observe": hookimpl(hook)}), "observe", named)


def test_a_result_that_nothing_would_use():
    silent = {hook for hook, returns in RETURNS.items() if returns == "None"}
    assert {"observe", "accumulate", "begin_round", "check_run"} <= silent
    checked_where_used = {hook for hook in RETURNS if hook not in silent and RETURNS[hook] not in RESULTS}
    assert checked_where_used == {"local_loss", "task_loss"}
    assert set(RESULTS) <= set(RETURNS.values()), "each row is the type of a hook's result"
    found = PluginSet([create(type("Odd", (Plugin,), {"observe": hookimpl(lambda self, step: 1.0)}))])
    with raises(PluginContractError, "'odd'"):
        found.call_all("observe", step=None)


def test_an_init_that_raises_is_named_with_its_place():
    class Broken(Plugin):
        def __init__(self, options):
            super().__init__(options)
            raise OSError("no table of constants")

    error = refused(Broken, "OSError: no table of constants", "(test_checks.py:")
    assert error.plugin == "broken"


def test_an_init_that_does_not_call_the_base_class():
    class Alone(Plugin):
        def __init__(self, options):
            self.strength = 3

    assert create(Alone).options == Alone.Options()


def test_an_extra_argument():
    class Extra(Plugin):
        @hookimpl
        def local_loss(self, step, client):
            return None

    assert refused(Extra, "local_loss", "'client'", "(step)").hook == "local_loss"


@pytest.mark.parametrize("kind", ["args", "kwargs"])
def test_variable_arguments(kind):
    class Args(Plugin):
        @hookimpl
        def local_loss(self, *args):
            return None

    class Kwargs(Plugin):
        @hookimpl
        def local_loss(self, **kwargs):
            return None

    refused({"args": Args, "kwargs": Kwargs}[kind], "local_loss", kind)


def test_a_keyword_only_argument():
    class KeywordOnly(Plugin):
        @hookimpl
        def local_loss(self, *, step):
            return None

    refused(KeywordOnly, "local_loss", "step")


def test_a_hook_hidden_by_an_attribute_of_the_instance():
    class Shadowed(Plugin):
        def __init__(self, options):
            super().__init__(options)
            self.weight = 0.5

        @hookimpl
        def weight(self, update):
            return 1.0

    refused(Shadowed, "weight")


def method_of_that_name(self):
    """No declaration."""


@pytest.mark.parametrize("declaration", sorted(row.name for row in ATTRIBUTES))
@pytest.mark.parametrize("value", [method_of_that_name, 3.5, (b"classifier.*",)], ids=["method", "number", "bytes"])
@pytest.mark.parametrize("on", ["class", "self"])
def test_a_declaration_of_the_wrong_type(declaration, value, on):
    """An own attribute that has a declaration's name by chance is such a mistake, too."""
    members = {declaration: value} if on == "class" else {}

    def set_on_self(self, options):
        Plugin.__init__(self, options)
        setattr(self, declaration, value)

    if on == "self":
        members["__init__"] = set_on_self
    with pytest.raises(PluginContractError, match=f"'wrong' has {declaration} = "):
        create(type("Wrong", (Plugin,), members))


def test_a_single_pattern_is_no_tuple():
    refused(type("Bare", (Plugin,), {"starts": "classifier.*"}), "starts", "('classifier.*',)")


def test_a_declaration_can_be_a_property_of_the_options():
    class Computed(Plugin):
        starts = property(lambda self: ("classifier.*",))

    assert create(Computed).starts == ("classifier.*",)


def test_every_attribute_that_a_plugin_may_set_is_a_declaration():
    others = {"Options", "name", "parts", "_made_parts"}
    assert {row.name for row in ATTRIBUTES} == set(inspect.get_annotations(Plugin)) - others


@pytest.mark.parametrize("target", [print, 3, int, "Plugin"])
def test_an_entry_point_that_is_no_plugin_class(target):
    import tests.support as offered

    offered.target = target
    with raises(PluginContractError):
        create_plugin("module:tests.support.target", {})


def test_options_that_are_no_plugin_options():
    class Loose(Plugin):
        class Options(BaseModel):
            mu: float = 1.0

    refused(Loose, "Options", "PluginOptions")
