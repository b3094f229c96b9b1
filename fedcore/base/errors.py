"""The errors that fedcore raises on purpose: what was wrong, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar, Literal, Self


class FedcoreError(Exception):
    """Base of all errors whose message is written for users; the CLI prints it without a traceback."""


class ConfigError(FedcoreError):
    """The configuration of a run cannot work."""


class DataError(FedcoreError):
    """A data set is missing, damaged or does not fit the run."""


class RunDirectoryError(FedcoreError):
    """A run directory cannot be created, read or resumed."""


class StorageError(RunDirectoryError):
    """A file cannot be written or read: no space, no permission, a broken disk."""


class UnknownNameError(ConfigError):
    """An unknown name of a plugin, data set, model, option, ..."""

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        super().__init__(f"unknown {kind} {name!r}.{suggestion(name, self.known)}{' ' + hint if hint else ''}")


class PluginConflictError(ConfigError):
    """Two plugins of a run declare what only one of them can have."""

    @classmethod
    def of(cls, one: str, other: str, reason: str) -> Self:
        """Return the error that two plugins, given by name, cannot be combined, and why."""
        return cls(f"plugins {one!r} and {other!r} cannot be combined: {reason}")


class PluginContractError(FedcoreError):
    """A plugin, or another registered object, breaks its contract; ``plugin`` and ``hook`` name it, if known."""

    def __init__(self, message: str, *, plugin: str | None = None, hook: str | None = None) -> None:
        super().__init__(message)
        self.plugin, self.hook = plugin, hook

    @classmethod
    def of(
        cls,
        name: str | None,
        found: str,
        *,
        kind: str = "plugin",
        hook: str | None = None,
        round: int | None = None,
        client: int | None = None,
        expected: str = "",
        hint: str = "",
    ) -> Self:
        """Return the error ``KIND NAME hook HOOK (round R, client C) FOUND, expected EXPECTED. Hint: HINT``.

        :param name: None where the fault is not one plugin's but in all of the run's together.
        :param hook: a hook, or ``question NAME``.
        :param found: what the plugin does wrong, as a predicate: ``returned Linear``.
        :param round: from 0, as the hook counts; the message counts from 1.
        :param kind: of the registered object: ``plugin``, ``model``, ``tracker``, ...
        """
        number = None if round is None else round + (hook not in ("personal_model", "post_train"))  # after that round
        place = ", ".join(f"{what} {at}" for what, at in (("round", number), ("client", client)) if at is not None)
        message = "the plugins" if name is None else f"{kind} {name!r}"
        if hook:
            message += f" {hook}" if hook.startswith("question ") else f" hook {hook}"
        message += f" ({place})" if place else ""
        message += f" {found}"
        message += f", expected {expected}" if expected else ""
        message += f". Hint: {hint}" if hint else ""
        return cls(message, plugin=name, hook=hook)


class PluginCallError(PluginContractError):
    """A hook raised; the message names plugin, hook, round and client, the cause is chained."""


class RejectUpdate(FedcoreError):
    """Raised in ``pre_aggregate``, ``weight`` or ``accumulate`` (or by the core) to leave out one client's update.

    :cvar kind: how the round's record names the failure.
    """

    kind: ClassVar[Literal["rejected", "diverged"]] = "rejected"


class NonFiniteUpdate(RejectUpdate):
    """An update holds nan or inf: its local training diverged."""

    kind = "diverged"


class RoundFailedError(FedcoreError):
    """Too few clients delivered a usable update.

    :ivar raised: code of the run, a plugin's or a model's, raised on so many of them.
    """

    def __init__(self, message: str, *, raised: bool = False) -> None:
        super().__init__(message)
        self.raised = raised


class DivergedError(RoundFailedError):
    """A round failed because training diverged: losses, updates or the new model are not finite.

    :ivar everywhere: no client gave a usable update, so the state that they began with may be at fault.
    """

    def __init__(self, message: str, *, everywhere: bool = False) -> None:
        super().__init__(message)
        self.everywhere = everywhere


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the nearest known name, else the list of what there is."""
    names = sorted(known)
    near = nearest(name, names)
    if near is not None:
        return f" Did you mean {near!r}?"
    return f" Known: {', '.join(names)}." if names else ""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that another one resembles, or is short for; None where there is none.

    >>> nearest("SimpleCNN", ["mlp", "simple-cnn"]), nearest("learning_rate", ["alpha", "lr"])
    ('simple-cnn', 'lr')
    """
    plain = {other.lower().replace("-", "_"): other for other in known}
    words = name.lower().replace("-", "_")
    initials = "".join(word[:1] for word in words.split("_"))
    if len(initials) > 1 and initials in plain:
        return plain[initials]
    near = difflib.get_close_matches(words, plain, n=1, cutoff=0.6)
    return plain[near[0]] if near else None
