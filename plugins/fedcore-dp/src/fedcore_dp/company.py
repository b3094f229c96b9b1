"""What a guarantee cannot be kept beside: buffers that are averaged, and plugins that go past the noise."""

from __future__ import annotations

from collections.abc import Mapping

from fedcore import ConfigError, PluginConflictError, RunSetup


def refuse_shared_buffers(setup: RunSetup, name: str) -> None:
    """Refuse a model whose buffers travel: running means and variances are data, and no noise is added to them.

    :raises ConfigError: says which buffer, and what to do.
    """
    shared = [buffer for buffer in setup.layout.shared if buffer in setup.layout.buffers]
    if shared:
        raise ConfigError(
            f"plugin {name!r}: the model's buffer {shared[0]!r} would be averaged over the clients without noise, "
            "and BatchNorm's running statistics are data. Use --buffers local, which keeps buffers on each client, "
            "or a model without them."
        )


def refuse(setup: RunSetup, name: str, hooks: Mapping[str, str]) -> None:
    """Refuse every other plugin that implements one of some hooks.

    :param hooks: hook -> what it does that the noise does not cover; the words after "which".
    :raises PluginConflictError: names both plugins, the hook and the reason.
    """
    for hook, reason in hooks.items():
        for other in setup.plugins.implementers(hook):
            decodes = hook == "pre_aggregate" and other.encodes  # comes before the clipping, and looks at one update
            if other.name != name and not decodes:
                raise PluginConflictError(
                    f"plugins {name!r} and {other.name!r} cannot be combined: {other.name!r} implements {hook}, "
                    f"which {reason}"
                )
