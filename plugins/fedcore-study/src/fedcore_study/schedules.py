"""Whether a run's training depends on its number of rounds. Imports torch only for a run with plugins."""

from __future__ import annotations

from fedcore import FedcoreError, RunConfig
from fedcore.tools import registry


def follows_rounds(config: RunConfig) -> bool:
    """Return whether the training of a round depends on the number of all rounds, by the schedule or a method.

    Then a run that is resumed with another number of rounds differs from a run that begins with it. The user's own
    code is not asked, and neither are plugins if one of them is not installed.
    """
    longer = config.model_copy(update={"rounds": 2 * config.rounds})
    if any(longer.learning_rate(number) != config.learning_rate(number) for number in range(config.rounds)):
        return True
    if not config.plugins:
        return False
    from fedcore.tools import PluginSet

    try:
        plugins = PluginSet.create(
            {name: options for name, options in config.plugins.items() if not registry.is_code(name)}
        )
    except FedcoreError:
        return False
    return any("rounds" in plugin.assumes for plugin in plugins)
