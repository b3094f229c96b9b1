"""The errors that fedcore raises on purpose. A message names the fault, its place and the remedy."""

from __future__ import annotations

import difflib
import os
import traceback
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self

if TYPE_CHECKING:
    from pydantic import ValidationError

DEBUG = "FEDCORE_DEBUG"
"""Environment variable of a command with ``--debug``; worker processes inherit it."""

REPEATED = ("plugins", "trackers", "tags", "metrics", "protocols")
"""Fields of RunConfig whose flags can be repeated."""

_MOST_PROBLEMS = 20


class FedcoreError(Exception):
    """Base of all errors with a message for users. The command line prints the message without a traceback."""


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
    """Two plugins of a run declare something that only one of them can have."""

    @classmethod
    def of(cls, one: str, other: str, reason: str) -> Self:
        """Return the error that two plugins, given by name, cannot be combined for a reason."""
        return cls(f"plugins {one!r} and {other!r} cannot be combined: {reason}")


class PluginContractError(FedcoreError):
    """A plugin, or another registered object, breaks its contract. ``plugin`` and ``hook`` name it, if known."""

    def __init__(self, message: str, *, plugin: str | None = None, hook: str | None = None) -> None:
        super().__init__(message)
        self.plugin, self.hook = plugin, hook

    @classmethod
    def of(
        cls,
        name: str | None,
        fault: str,
        *,
        kind: str = "plugin",
        hook: str | None = None,
        round: int | None = None,
        client: int | None = None,
        expected: str = "",
        hint: str = "",
    ) -> Self:
        """Return the error ``KIND NAME hook HOOK (round R, client C) FAULT, expected EXPECTED. Hint: HINT``.

        :param name: the object's name; None if the plugins of a run break the contract together.
        :param hook: a hook, or ``question NAME``.
        :param fault: the fault, as a predicate: ``returned Linear``.
        :param round: the round, counted from 0 as in hooks. The message counts from 1.
        :param kind: the kind of the object: ``plugin``, ``model``, ``tracker``, ...
        """
        after = hook in ("personal_model", "post_train")  # they run after the round
        number = None if round is None else round if after else round + 1
        place = ", ".join(f"{what} {at}" for what, at in (("round", number), ("client", client)) if at is not None)
        message = "the plugins" if name is None else f"{kind} {name!r}"
        if hook:
            message += f" {hook}" if hook.startswith("question ") else f" hook {hook}"
        message += f" ({place})" if place else ""
        message += f" {fault}"
        message += f", expected {expected}" if expected else ""
        message += f". Hint: {hint}" if hint else ""
        return cls(message, plugin=name, hook=hook)


class PluginCallError(PluginContractError):
    """A hook raised. The message names plugin, hook, round and client. The original exception is chained."""


class RejectUpdate(FedcoreError):
    """Raised in ``pre_aggregate``, ``weight`` or ``accumulate``, or by the core, to leave out one client's update."""

    kind: ClassVar[Literal["rejected", "diverged"]] = "rejected"
    """The name of the failure in the round's record."""


class NonFiniteUpdate(RejectUpdate):
    """An update holds nan, inf or values that count as diverged because they are too large."""

    kind = "diverged"


class RoundFailedError(FedcoreError):
    """Too few clients delivered a usable update."""

    def __init__(self, message: str, *, raised: bool = False) -> None:
        super().__init__(message)
        self.raised = raised
        """Whether the clients failed because code of a plugin or a model raised."""


class DivergedError(RoundFailedError):
    """Training diverged: losses, updates, the new model or a plugin's ``server.state`` are not finite."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the nearest known name. Without one, return the list of the known names.

    A name with a comma is quoted in the list.
    """
    names = sorted(known)
    near = nearest(name, names)
    if near is not None:
        return f" Did you mean {near!r}?"
    return f" Known: {', '.join(repr(each) if ',' in each else each for each in names)}." if names else ""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that ``name`` resembles or spells out; None if there is no such name.

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


def describe(error: ValidationError, prefix: str = "", *, flags: bool = True, typed: Collection[str] = ()) -> str:
    """Render a pydantic error as one line per problem: option, problem, the value given.

    :param prefix: the source of the values, for each line.
    :param typed: the options that the user typed on the command line. Their lines have no prefix.
    """
    lines = []
    for problem in error.errors(include_url=False)[:_MOST_PROBLEMS]:
        path = [str(part) for part in problem["loc"]]
        name = flag_of(path[0]) if flags and path else ".".join(path)
        if flags and path[:1] == ["system"]:
            name = " ".join([name, *path[1:]])
        message = problem["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        if problem["type"] in ("tuple_type", "list_type"):
            value = problem["input"]
            message = f"input should be a list, such as {f'[{value}]' if isinstance(value, (str, int)) else '[1, 2]'}"
        says_what = problem["type"] == "value_error" and message  # with the value, where that helps
        message = lower_first(message) or "a validator refuses it and gives no reason"
        ending = "" if says_what or isinstance(problem["input"], dict) else f" (given: {problem['input']!r:.200})"
        source = "" if path and path[0] in typed else prefix
        lines.append(f"{source}{name + ': ' if name else ''}{message}{ending}")
    return "\n".join(lines)


def flag_of(field: str) -> str:
    """Return the flag of a field of RunConfig. The flag of a list gives one of its values: ``--tag`` of ``tags``."""
    return "--" + (field.removesuffix("s") if field in REPEATED else field).replace("_", "-")


def lower_first(text: str) -> str:
    """Return a sentence as it stands after a colon."""
    return text[:1].lower() + text[1:]


def print_traceback() -> None:
    """Print the traceback of the error that is being handled if the command runs with ``--debug``."""
    if os.environ.get(DEBUG):
        traceback.print_exc()


def place_of(error: BaseException, module: str) -> str:
    """Return the last line of a module's package that an error passed, as `` (method.py:12)``; empty if none."""
    package, place = module.partition(".")[0], ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).partition(".")[0] == package:
            place = f" ({Path(frame.f_code.co_filename).name}:{line})"
    return place
