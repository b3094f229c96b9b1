"""What a plugin's class may look like: hooks, markers, arguments, options."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from fedcore import Plugin, hookimpl
from fedcore.base.errors import PluginContractError
from fedcore.hooks.checks import create_plugin
from tests.hooks.refusals import create, refused


def test_a_hook_that_does_not_exist():
    class Typo(Plugin):
        @hookimpl
        def local_los(self, step):
            return None

    error = refused(Typo, "hook local_los does not exist", "Did you mean 'local_loss'?")
    assert (error.plugin, error.hook) == ("typo", "local_los")


def test_a_hook_without_its_marker():
    class Unmarked(Plugin):
        def local_loss(self, step):
            return None

    assert refused(Unmarked, "hook local_loss", "@hookimpl").hook == "local_loss"


def test_an_overridden_hook_without_its_marker():
    class Parent(Plugin):
        @hookimpl
        def local_loss(self, step):
            return None

    class Child(Parent):
        def local_loss(self, step):
            return None

    create(Parent)
    refused(Child, "hook local_loss", "@hookimpl")


def test_an_argument_with_a_default():
    class Defaulted(Plugin):
        @hookimpl
        def local_loss(self, step, scale=1.0):
            return None

    assert refused(Defaulted, "local_loss", "'scale'", "default").hook == "local_loss"


def test_a_specified_argument_with_a_default():
    class Half(Plugin):
        @hookimpl
        def local_loss(self, step=None):
            return None

    refused(Half, "local_loss", "'step'", "default")


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


@pytest.mark.parametrize("target", [print, 3, int, "Plugin"])
def test_an_entry_point_that_is_no_plugin_class(target):
    import tests.support as offered

    offered.target = target
    with pytest.raises(PluginContractError, match=r"subclass of fedcore\.Plugin"):
        create_plugin("module:tests.support.target", {})


def test_options_that_are_no_plugin_options():
    class Loose(Plugin):
        class Options(BaseModel):
            mu: float = 1.0

    refused(Loose, "Options", "PluginOptions")
