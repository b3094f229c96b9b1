"""Hooks: their specifications and contexts, plugins, their options, declarations and checks, the set-up of a run.

The names below are for tools that check or describe plugins. They are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedcore.base.lazy import lazy

if TYPE_CHECKING:
    from fedcore.hooks.checks import EXCLUSIVE as EXCLUSIVE
    from fedcore.hooks.checks import HOOKS as HOOKS
    from fedcore.hooks.checks import QUESTION as QUESTION
    from fedcore.hooks.checks import check_class as check_class
    from fedcore.hooks.checks import create_plugin as create_plugin
    from fedcore.hooks.checks import problem_with as problem_with
    from fedcore.hooks.declarations import TABLE as TABLE
    from fedcore.hooks.declarations import require_hooks as require_hooks
    from fedcore.hooks.plugin import ATTRIBUTES as ATTRIBUTES
    from fedcore.hooks.plugin import BUILTIN as BUILTIN
    from fedcore.hooks.plugin import Declaration as Declaration
    from fedcore.hooks.plugin import patterns_of as patterns_of
    from fedcore.hooks.plugins import match as match

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
