"""Whether a run is the beginning of a longer one. Imports no torch until it is asked about plugins."""

from __future__ import annotations

from fedcore import FedcoreError, RunConfig
from fedcore.base.registry import is_code


def follows_rounds(config: RunConfig) -> bool:
    """Return whether the training of a round depends on the number of all rounds, by the schedule or a method.

    A run that was resumed with another number then differs from one that was begun with it. Plugins that are not
    installed, and the user's own code, are not asked.
    """
    if config.lr_schedule == "cosine":
        return True
    if not config.plugins:
        return False
    from fedcore.hooks.plugins import PluginSet

    try:
        plugins = PluginSet.create({name: given for name, given in config.plugins.items() if not is_code(name)})
    except FedcoreError:
        return False
    return any("rounds" in plugin.assumes for plugin in plugins)
