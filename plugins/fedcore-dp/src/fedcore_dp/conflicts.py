"""What a guarantee of privacy excludes: buffers that are averaged, and plugins that bypass the noise."""

from __future__ import annotations

from collections.abc import Mapping

from fedcore import ConfigError, PluginConflictError, RunSetup

LEAVES_CLIENTS = {
    "mid_local_epoch": "sends parts of single clients' models in mid-epoch, without noise",
}
"""Hook -> what leaves a client by it without passing the noise of either plugin."""

SEEN_ON_THE_SERVER = {
    "all_updates": "sees all clients' updates on the server, and may replace one by what others sent",
    "pre_aggregate": "sees single clients' updates on the server, before or after they are clipped",
    "weight": "weighs single clients, so that one of them could count for more than the bound",
    "accumulate": "adds up what single clients sent, without noise",
    "aggregate": "aggregates what single clients sent, without noise",
}
"""Hook -> what it uses on the server beside the noised mean; with ``local-dp`` that is noised already."""


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


def refuse_coarse_parameters(setup: RunSetup, name: str) -> None:
    """Refuse trained shared parameters of two bytes: clipped updates and their mean are rounded to them.

    :raises ConfigError: says which parameter, and what to do.
    """
    for parameter in setup.layout.shared:
        dtype = setup.layout.shapes[parameter][1]
        if parameter in setup.layout.trainable and dtype.itemsize < 4:
            raise ConfigError(
                f"plugin {name!r}: {parameter!r} is {dtype}, to which updates and their mean are rounded before the "
                "noise is added, so that one client could move the mean further than clip. Use a network of float32 "
                "(network.float()); --precision bf16 trains that in bfloat16."
            )


def refuse_chosen_rounds(setup: RunSetup, name: str) -> None:
    """Refuse to let a round be chosen by the clients' held-out samples: no noise is added to their figures.

    :raises ConfigError: what to do in its place.
    """
    for option, used in (
        ("--patience", setup.config.patience is not None),
        ("--keep best", setup.config.keep == "best"),
    ):
        if used:
            raise ConfigError(
                f"plugin {name!r}: {option} chooses a round by figures of the clients' held-out samples without noise, "
                "so the model would tell more of them than epsilon says. Fix the rounds in advance and leave "
                f"{option} out."
            )


def refuse_hooks(setup: RunSetup, name: str, hooks: Mapping[str, str]) -> None:
    """Refuse every other plugin that implements one of some hooks.

    :param hooks: hook -> what it does that the noise does not cover.
    :raises PluginConflictError: names both plugins, the hook and the reason.
    """
    for hook, reason in hooks.items():
        for other in setup.plugins.implementers(hook):
            # Encoding looks at one update: on the server before the clipping, on the client after training.
            encodes = hook in ("pre_aggregate", "begin_local", "pre_upload") and other.encodes
            guards = hook == "begin_local" and other.implements("guard_upload")  # local-dp keeps w_t
            apart = hook == "all_updates" and getattr(other, "own_updates_only", False)  # each update by itself
            if other.name != name and not (encodes or guards or apart):
                raise PluginConflictError.of(name, other.name, f"{other.name!r} implements {hook}, which {reason}")


def refuse_questions(setup: RunSetup, name: str) -> None:
    """Refuse every plugin that can ask clients, whatever its options: no noise is added to what they answer.

    :raises PluginConflictError: names both plugins and the question.
    """
    for other in setup.plugins:
        for question in other.questions:
            reason = f"{other.name!r} can ask clients for {question}, which they would answer without noise"
            raise PluginConflictError.of(name, other.name, reason)


def refuse_step_readers(setup: RunSetup, name: str) -> None:
    """Refuse every plugin whose server scales by the clients' numbers of steps: they are sent as 1.

    :raises PluginConflictError: names both plugins.
    """
    for other in setup.plugins:
        if getattr(other, "reads_steps", False):
            reason = f"{other.name!r} scales by the clients' numbers of steps, which {name!r} hides"
            raise PluginConflictError.of(name, other.name, reason)


def refuse_earlier_step(setup: RunSetup, name: str) -> None:
    """Refuse a plugin that steps on the server before the one that adds the noise.

    :raises PluginConflictError: with the order that works.
    """
    first = setup.plugins.implementers("server_step")[0]
    if first.name != name:
        raise PluginConflictError.of(
            name,
            first.name,
            f"in this order {first.name!r} would step from the mean without noise. "
            f"Hint: list the plugin that adds noise ({name!r}) first.",
        )
