"""What a plugin class and its hooks' results must be: every gap that pluggy leaves, closed with a clear error."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from fedcore.base import registry
from fedcore.base.errors import PluginContractError, suggestion
from fedcore.hooks import hookspecs
from fedcore.hooks.plugin import Plugin, PluginOptions, parse_options

HOOKS = {name: spec for name, spec in vars(hookspecs).items() if hasattr(spec, "fedcore_spec")}


EXCLUSIVE = {name for name, spec in HOOKS.items() if spec.fedcore_spec["firstresult"]}


def create_plugin(name: str, options: Mapping[str, Any]) -> Plugin:
    """Build one plugin object from its name and options, with every part of the contract checked."""
    cls = registry.resolve("plugin", name)
    short = getattr(cls, "__name__", str(cls)).lower() if name.startswith("module:") else name
    check_class(short, cls)
    plugin: Plugin = cls(parse_options(short, cls, options))
    plugin.name = short
    unknown = set(plugin.reads) - {"global", "previous"}
    if unknown:
        raise PluginContractError(
            f"plugin {short!r} reads {sorted(unknown)}; a plugin can read 'global' and 'previous'",
            plugin=short,
        )
    hidden = sorted(set(vars(plugin)) & set(HOOKS))
    if hidden:
        raise PluginContractError(
            f"plugin {short!r} sets self.{hidden[0]} in __init__, which hides its hook {hidden[0]}; "
            "use another name for the attribute",
            plugin=short,
            hook=hidden[0],
        )
    plugin._sealed = True
    return plugin


def check_class(name: str, cls: Any) -> None:
    """Refuse a class that pluggy would accept in silence and then not call, or call wrongly.

    :raises PluginContractError: with the hook, what was found, what was expected and a hint.
    """
    if not (inspect.isclass(cls) and issubclass(cls, Plugin)):
        raise PluginContractError(
            f"plugin {name!r}: its entry point gives {cls!r}, expected a subclass of fedcore.Plugin",
            plugin=name,
        )
    if not (inspect.isclass(cls.Options) and issubclass(cls.Options, PluginOptions)):
        raise PluginContractError(
            f"plugin {name!r}: Options is {cls.Options!r}, expected a subclass of fedcore.PluginOptions",
            plugin=name,
        )
    for attribute in dir(cls):
        member = inspect.getattr_static(cls, attribute)
        marked = getattr(member, "fedcore_impl", None)
        if marked is None:
            if attribute in HOOKS:
                raise PluginContractError(
                    f"plugin {name!r}: method {attribute!r} has the name of a hook but not its marker, so it would "
                    "never be called. Put @hookimpl above it, or give it another name.",
                    plugin=name,
                    hook=attribute,
                )
            continue
        if attribute not in HOOKS:
            raise PluginContractError(
                f"plugin {name!r}: there is no hook {attribute!r}.{suggestion(attribute, HOOKS)}",
                plugin=name,
                hook=attribute,
            )
        _check_signature(name, attribute, member)
        ordering = [key for key in ("tryfirst", "trylast", "wrapper", "hookwrapper") if marked.get(key)]
        if ordering and cls.__module__ != "fedcore.hooks.fedavg":
            raise PluginContractError(
                f"plugin {name!r} marks {attribute} with {ordering[0]}; the user's order decides, so plugins "
                "cannot reorder or wrap hooks. Remove the mark.",
                plugin=name,
                hook=attribute,
            )


def _check_signature(name: str, hook: str, function: Any) -> None:
    expected = list(inspect.signature(HOOKS[hook]).parameters)
    parameters = list(inspect.signature(function).parameters.values())[1:]
    defaulted = [p.name for p in parameters if p.default is not p.empty]
    if defaulted:
        raise PluginContractError(
            f"plugin {name!r} hook {hook}: argument {defaulted[0]!r} has a default value, which pluggy would always "
            "use. Make it an option of the plugin.",
            plugin=name,
            hook=hook,
        )
    awkward = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if awkward:
        raise PluginContractError(
            f"plugin {name!r} hook {hook}: takes {awkward[0]!r} as a keyword-only or variable argument, which pluggy "
            f"never passes; take any of ({', '.join(expected)}) as plain arguments",
            plugin=name,
            hook=hook,
        )
    extra = [p.name for p in parameters if p.name not in expected]
    if extra:
        raise PluginContractError(
            f"plugin {name!r} hook {hook}: takes {extra[0]!r}, which the hook does not have; "
            f"its arguments are ({', '.join(expected)})",
            plugin=name,
            hook=hook,
        )
