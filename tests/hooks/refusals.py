"""Plugins created alone, as a run does, and plugins that a run refuses."""

from __future__ import annotations

from typing import Any

from fedcore import Plugin
from fedcore.base.errors import PluginContractError
from fedcore.hooks.checks import create_plugin
from fedcore.hooks.plugins import PluginSet
from tests.sentences import raises
from tests.support import name_of


def create(cls: type[Plugin], **options: Any) -> Plugin:
    return create_plugin(name_of(cls), options)


def refused(cls: type[Plugin], *words: str) -> PluginContractError:
    """Start a run with the plugin: refused before anything is written, with all these words."""
    with raises(PluginContractError, cls.__name__.lower(), *words) as caught:
        PluginSet.create({name_of(cls): {}})
    return caught.value
