"""The declarations of plugins, and the conflicts between them.

The checks of :class:`~fedcore.hooks.plugins.PluginSet` and ``fedcore plugins show`` read the same table.
"""

from __future__ import annotations

from fedcore.base.errors import PluginConflictError, PluginContractError
from fedcore.hooks.checks import EXCLUSIVE, HOOKS
from fedcore.hooks.plugin import ATTRIBUTES, Declaration, Plugin, patterns_of

TABLE = {
    declaration.name: declaration
    for declaration in (
        *(
            Declaration(
                name=hook,
                plugin=f"plugin that implements {hook}",
                alone=f"both implement {hook}, which only one plugin can",
            )
            for hook in HOOKS
            if hook in EXCLUSIVE
        ),
        *ATTRIBUTES,
    )
}
"""Every declaration by name: the exclusive hooks, then the attributes."""


def require_hooks(plugin: Plugin) -> None:
    """Refuse a declaration without its hooks, and hooks that would never be called without their declaration.

    A declaration that ``__init__`` sets may be empty.

    :raises PluginContractError: with the declaration and the hook.
    """
    for declaration in TABLE.values():
        name, declared = declaration.name, declaration.made_by(plugin)
        for hook in declaration.hooks:
            if declared and not plugin.implements(hook):
                fault, hint = f"declares {name}, but does not implement {hook}", f"write {hook}, or leave {name} out"
                raise PluginContractError.of(plugin.name, fault, hint=hint)
            if declaration.needed and plugin.implements(hook) and not declared and name not in vars(plugin):
                fault = f"would never be called: the plugin declares no {name}"
                hint = f"set {name} on the class, or in __init__, where an option may leave it empty"
                raise PluginContractError.of(plugin.name, fault, hook=hook, hint=hint)


def refuse_together(one: Plugin, other: Plugin) -> None:
    """Refuse two plugins of a run whose declarations conflict for every model.

    :raises PluginConflictError: with both names and the reason.
    """
    for declaration in TABLE.values():
        for first, second in ((one, other), (other, one)):
            if not declaration.made_by(first):
                continue
            if declaration.alone and declaration.made_by(second):
                raise PluginConflictError.of(one.name, other.name, declaration.alone)
            for name, template in declaration.excludes.items():
                if TABLE[name].made_by(second):
                    value = patterns_of(second, name) if TABLE[name].patterns else ""
                    reason = template.format(one=first.name, other=second.name, value=value)
                    raise PluginConflictError.of(first.name, second.name, reason)
