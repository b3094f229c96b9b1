"""A check: a function of a plugin that raises an AssertionError with the defect and the remedy."""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedcore_testing.trial import Trial


class CheckFailed(AssertionError):
    """A plugin fails a check; the message names plugin, check and remedy."""


class NotApplicable(Exception):
    """The check does not apply to this plugin; the message says why."""


class Check(NamedTuple):
    """A registered check.

    :param function: takes a plugin's class or name, or a :class:`Trial`.
    :param slow: it starts processes.
    """

    name: str
    function: Callable[[Any], None]
    summary: str
    slow: bool


CHECKS: dict[str, Check] = {}
"""All checks by name, in the order in which they run, except that ``check_trains`` runs early."""

_KEPT = 4
_trials: OrderedDict[Any, Trial] = OrderedDict()


def check(todo: str, *, slow: bool = False) -> Callable[[Callable[[Trial], None]], Callable[[Any], None]]:
    """Make a function of a :class:`Trial` a check.

    :param todo: the remedy for a plugin that fails; left out where the error has its own hint.
    """

    def decorate(function: Callable[[Trial], None]) -> Callable[[Any], None]:
        name = function.__name__

        @functools.wraps(function)
        def run(plugin: Any) -> None:
            trial = trial_of(plugin)
            try:
                function(trial)
            except NotApplicable:
                raise
            except Exception as error:
                problem = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
                remedy = "" if ". Hint: " in problem else f"\nWhat to do: {todo}"
                raise CheckFailed(f"plugin {trial.label!r} fails {name}: {problem}{remedy}") from error

        summary = (inspect.getdoc(function) or "").partition("\n")[0].replace("``", "")
        CHECKS[name] = Check(name, run, summary, slow)
        return run

    return decorate


def trial_of(
    plugin: Any, options: Mapping[str, Any] | None = None, overrides: Mapping[str, Any] | None = None
) -> Trial:
    """Return a plugin's trial; the last ones are cached, so that checks share their runs."""
    if isinstance(plugin, Trial):
        return plugin
    key = plugin, repr(options or {}), repr(overrides or {})
    if key not in _trials:
        _trials[key] = Trial(plugin, options, overrides)
    _trials.move_to_end(key)
    while len(_trials) > _KEPT:
        _trials.popitem(last=False)
    return _trials[key]
