"""The declarations of plugins, and the conflicts between them.

The checks of :class:`~fedcore.hooks.plugins.PluginSet` and ``fedcore plugins show`` read the same table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedcore.base.errors import PluginConflictError, PluginContractError
from fedcore.hooks.checks import EXCLUSIVE, HOOKS
from fedcore.hooks.plugin import Plugin, patterns_of


@dataclass(frozen=True)
class Declaration:
    """A declaration of a plugin: an attribute that it sets, or an exclusive hook that it implements."""

    name: str
    """The name of the attribute or the hook."""
    plugin: str = ""
    """A noun phrase for a plugin with this declaration."""
    value: str = ""
    """The item of the attribute's value that makes the declaration; empty if any value does."""
    alone: str = ""
    """Why only one plugin of a run can have the declaration; empty if several can."""
    patterns: bool = False
    """Whether the value is patterns over the model's names. Two plugins can then declare different names."""
    shared: bool = False
    """Whether the names must be shared: no other plugin can keep them on the clients."""
    hooks: tuple[str, ...] = ()
    """The hooks that a plugin with the declaration implements: they do what it declares."""
    needed: bool = False
    """Whether these hooks are called only for a plugin with the declaration."""
    excludes: Mapping[str, str] = field(default_factory=dict)
    """Other declaration -> why plugins with the two declarations cannot be combined.

    The reason is a format of ``one`` and ``other``, the plugins' names, and ``value``, the other plugin's patterns.
    """

    def made_by(self, plugin: Plugin | type[Plugin]) -> bool:
        """Return whether a plugin has this declaration."""
        if self.name in HOOKS:
            return plugin.implements(self.name) if isinstance(plugin, Plugin) else hasattr(plugin, self.name)
        declared = getattr(plugin, self.name)
        return self.value in declared if self.value else bool(declared)


ATTRIBUTES = (
    Declaration(
        "owns", "plugin that owns parameters (owns)", patterns=True, shared=True, hooks=("aggregate",), needed=True
    ),
    Declaration(
        "starts",
        "plugin that chooses what clients start from (starts)",
        patterns=True,
        shared=True,
        hooks=("begin_local",),
    ),
    Declaration(
        "exchanges",
        "plugin that exchanges parameters in mid-epoch (exchanges)",
        patterns=True,
        shared=True,
        hooks=("mid_local_epoch",),
        needed=True,
    ),
    Declaration("corrects", patterns=True, shared=True, hooks=("post_train",)),
    Declaration("reads"),
    Declaration(
        "scales_task",
        "plugin that scales the task loss (scales_task)",
        alone="both scale the task loss (scales_task)",
    ),
    Declaration(
        "server_optimizer",
        "server optimizer (server_optimizer)",
        alone="both are server optimizers (server_optimizer)",
        excludes={
            "owns": "{one!r} steps the whole model on the server, but {other!r} owns the aggregation of {value}",
        },
    ),
    Declaration(
        "assumes",
        "plugin that derives state from how far a client's model moved (assumes displacement)",
        value="displacement",
        excludes={
            "exchanges": "{one!r} derives its state from how far a client's model moved, but {other!r} exchanges "
            "{value} between clients in mid-epoch",
        },
    ),
    Declaration(
        "encodes",
        "plugin that encodes uploads (encodes)",
        patterns=True,
        hooks=("pre_upload", "pre_aggregate"),
        excludes={
            "guard_upload": "{one!r} sends parameters in another form (encodes), but {other!r} guards what goes up "
            "in its plain form",
        },
    ),
    Declaration("neutral"),
)
"""The declarations that are attributes of :class:`~fedcore.hooks.plugin.Plugin`. Its docstring explains them."""

TABLE = {
    declaration.name: declaration
    for declaration in (
        *(
            Declaration(
                hook,
                f"plugin that implements {hook}",
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
                found, hint = f"declares {name}, but does not implement {hook}", f"write {hook}, or leave {name} out"
                raise PluginContractError.of(plugin.name, found, hint=hint)
            if declaration.needed and plugin.implements(hook) and not declared and name not in vars(plugin):
                found = f"would never be called: the plugin declares no {name}"
                hint = f"set {name} on the class, or in __init__, where an option may leave it empty"
                raise PluginContractError.of(plugin.name, found, hook=hook, hint=hint)


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
            for name, reason in declaration.excludes.items():
                if TABLE[name].made_by(second):
                    value = patterns_of(second, name) if TABLE[name].patterns else ""
                    said = reason.format(one=first.name, other=second.name, value=value)
                    raise PluginConflictError.of(first.name, second.name, said)
