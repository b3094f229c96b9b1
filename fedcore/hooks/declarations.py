"""What a plugin can declare and what each declaration conflicts with.

The table is read by the checks of :class:`~fedcore.hooks.plugins.PluginSet` and by ``fedcore plugins show``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedcore.base.errors import PluginConflictError
from fedcore.hooks.checks import EXCLUSIVE, HOOKS
from fedcore.hooks.plugin import Plugin


@dataclass(frozen=True)
class Declaration:
    """A declaration of a plugin: an attribute that it sets, or an exclusive hook that it implements.

    :ivar name: of the attribute or the hook.
    :ivar meaning: what it tells the core.
    :ivar plugin: noun for a plugin with this declaration.
    :ivar alone: why only one plugin of a run can have it; empty if several can.
    :ivar patterns: its value is patterns over the model's names; two plugins can have it for different names.
    :ivar shared: these names must be shared; no other plugin can keep them on the clients.
    :ivar excludes: other declaration -> why plugins with the one and the other cannot be combined, where ``one`` and
        ``other`` are their names and ``value`` is what the other declares.
    """

    name: str
    meaning: str
    plugin: str = ""
    alone: str = ""
    patterns: bool = False
    shared: bool = False
    excludes: Mapping[str, str] = field(default_factory=dict)

    def made_by(self, plugin: Plugin | type[Plugin]) -> bool:
        """Return whether a plugin has this declaration."""
        return hasattr(plugin, self.name) if self.name in HOOKS else bool(getattr(plugin, self.name))


ATTRIBUTES = (
    Declaration(
        "owns",
        "Parameters that ``aggregate`` returns.",
        "plugin that owns parameters (owns)",
        patterns=True,
        shared=True,
    ),
    Declaration(
        "starts",
        "Parameters and buffers whose values at the start of a client's training ``begin_local`` returns.",
        "plugin that chooses what clients start from (starts)",
        patterns=True,
        shared=True,
    ),
    Declaration(
        "exchanges",
        "Parameters that ``mid_local_epoch`` sees and patches.",
        "plugin that exchanges parameters in mid-epoch (exchanges)",
        patterns=True,
        shared=True,
    ),
    Declaration("corrects", "Parameters that ``post_train`` changes.", patterns=True, shared=True),
    Declaration("reshapes", "Parameters whose shape ``configure_model`` changes.", patterns=True),
    Declaration("reads", 'Frozen models that the local terms use: ``"global"``, ``"previous"``.'),
    Declaration(
        "scales_task",
        "Whether a ``Loss`` of this plugin scales the task loss.",
        "plugin that scales the task loss (scales_task)",
        alone="both scale the task loss (scales_task)",
    ),
    Declaration(
        "server_optimizer",
        "Whether ``server_step`` replaces the mean as a whole (FedAvgM, FedDyn).",
        "server optimizer (server_optimizer)",
        alone="both are server optimizers (server_optimizer)",
        excludes={
            "owns": "{one!r} steps the whole model on the server, but {other!r} owns the aggregation of {value}",
        },
    ),
    Declaration(
        "uses_displacement",
        "Whether state is derived from w_t - y_k, which an exchange of parameters makes meaningless.",
        "plugin that derives state from how far a client's model moved (uses_displacement)",
        excludes={
            "exchanges": "{one!r} derives its state from how far a client's model moved, but {other!r} exchanges "
            "{value} between clients in mid-epoch",
            "starts": "{one!r} derives its state from how far a client's model moved from the one it received, but "
            "{other!r} lets clients start from other values of {value}",
        },
    ),
    Declaration(
        "assumes_sgd",
        "Whether gradients are derived from SGD's steps: learning rate, momentum and number (SCAFFOLD, FedNova).",
        "plugin that derives gradients from SGD's steps (assumes_sgd)",
        excludes={
            "freezes_epochs": "{one!r} derives gradients from the number of steps, but {other!r} freezes parameters in "
            "some local epochs, so that they take fewer",
        },
    ),
    Declaration(
        "freezes_epochs",
        "Whether it freezes parameters in some of a round's local epochs only (FedRep).",
        "plugin that freezes parameters in some local epochs (freezes_epochs)",
    ),
    Declaration(
        "guards_uploads",
        "Whether ``pre_upload`` is called after those of all other plugins and may change all that goes up, their "
        "payloads too.",
        "plugin that guards what goes up (guards_uploads)",
        alone="both guard what goes up (guards_uploads)",
    ),
    Declaration(
        "encodes",
        "Parameters that ``pre_upload`` may take out of the update into its payload, and ``pre_aggregate`` puts back.",
        "plugin that encodes uploads (encodes)",
        patterns=True,
        excludes={
            "guards_uploads": "{one!r} sends parameters in another form (encodes), but {other!r} guards what goes up "
            "as it is",
        },
    ),
    Declaration("uses_public", "Whether the method needs public samples (``--public``)."),
    Declaration(
        "uses_staleness",
        "Whether clients start from models of ``server.staleness`` steps ago, as ``--system concurrency`` needs it.",
    ),
    Declaration("neutral", "Options under which the method is FedAvg, bit by bit; None if there are none."),
)
"""The declarations that are attributes of :class:`~fedcore.hooks.plugin.Plugin`."""

TABLE = {
    declaration.name: declaration
    for declaration in (
        *(
            Declaration(
                hook,
                (HOOKS[hook].__doc__ or "").partition("\n")[0],
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

KEEPS = "personal_parameters"
"""The hook that keeps parameters on the clients; no other plugin can own, exchange or correct those."""


def refuse_together(one: Plugin, other: Plugin) -> None:
    """Refuse two plugins of a run whose declarations conflict whatever the model is.

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
                    said = reason.format(one=first.name, other=second.name, value=getattr(second, name))
                    raise PluginConflictError.of(first.name, second.name, said)


def excluded_by(plugin: Plugin | type[Plugin]) -> list[str]:
    """Return the kinds of plugins that cannot be combined with this one, each as a noun phrase."""
    found = []
    for declaration in TABLE.values():
        if not declaration.made_by(plugin):
            found += [f"a {declaration.plugin}" for name in declaration.excludes if TABLE[name].made_by(plugin)]
            continue
        if declaration.alone:
            found.append(f"another {declaration.plugin}")
        if declaration.name == KEEPS:
            found.append("a plugin that owns, exchanges or corrects any of the parameters that stay on the clients")
        if declaration.patterns:
            patterns = ", ".join(getattr(plugin, declaration.name))
            found.append(f"another plugin that {declaration.name} any of {patterns}")
            if declaration.shared:
                found.append(f"a plugin that keeps any of {patterns} on the clients")
        found += [f"a {TABLE[name].plugin}" for name in declaration.excludes]
    return list(dict.fromkeys(found))
