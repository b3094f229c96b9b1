"""All checks on a plugin, with pytest or without."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from fedcore import PluginContractError, UnknownNameError
from fedcore_testing.causes import cause_of
from fedcore_testing.checks import CHECKS, Check, CheckFailed, NotApplicable
from fedcore_testing.checks.base import trial_of
from fedcore_testing.federation import initial_weights

Status = Literal["passed", "failed", "not applicable", "failed as expected"]
FIRST = ("check_is_a_plugin_class", "check_hooks_are_known_and_marked", "check_options_have_defaults")
"""The other checks need a plugin that passes these."""
PLAINEST = "check_trains"
"""Runs next, so that an error that stops every run is reported by this check."""


class Verdict(NamedTuple):
    """Result of one check.

    :param message: the reason, if it did not pass.
    :param same_as: the earlier check that failed by the same error; empty for none.
    """

    check: Check
    status: Status
    message: str
    seconds: float
    same_as: str = ""


def run_checks(
    plugin: Any,
    *,
    slow: bool = True,
    only: Collection[str] = (),
    expected_failed_checks: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
) -> Iterator[Verdict]:
    """Run the checks on a plugin one by one; yields a verdict for each.

    A check that fails by the same error as an earlier one, in the same hook, only refers to that one.

    :param plugin: its class, or the name under which it is installed.
    :param slow: also run the checks that start processes.
    :param only: names of checks; default all.
    :param expected_failed_checks: check -> the reason why the plugin cannot pass it; if it passes, that is a failure.
    :param options: the plugin's own options; default: the plugin's defaults.
    :param run: options of RunConfig for all runs, such as ``dataset`` and ``model``.
    :raises UnknownNameError: no plugin, no check, no option or no model of that name.
    :raises ConfigError: the options cannot be used.
    """
    expected = expected_failed_checks or {}
    _require_known([*only, *expected])
    trial = trial_of(plugin, options, run)
    if options or run:
        with suppress(PluginContractError):  # the checks name the plugin's fault
            initial_weights(trial.config)
    broken = ""
    first_checks: dict[str, str] = {}
    for check in sorted(CHECKS.values(), key=lambda check: (check.name not in FIRST, check.name != PLAINEST)):
        if (only and check.name not in only) or (check.slow and not slow and not only):
            continue
        began = time.perf_counter()
        status, message, cause = _verdict(check, trial, expected, broken)
        if status == "failed" and check.name in FIRST:
            broken = check.name
        same_as = "" if not cause or first_checks.setdefault(cause, check.name) == check.name else first_checks[cause]
        if same_as:
            message = f"plugin {trial.label!r} fails {check.name}: the same error as in {same_as}"
        yield Verdict(check, status, message, time.perf_counter() - began, same_as)


def check_plugin(
    plugin: Any,
    *,
    slow: bool = True,
    expected_failed_checks: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
) -> list[Verdict]:
    """Run all checks on a plugin and return the verdicts; the parameters are as for :func:`run_checks`.

    :raises CheckFailed: an AssertionError that names the plugin, every check that failed, and what to do.
    """
    expected = expected_failed_checks
    verdicts = list(run_checks(plugin, slow=slow, expected_failed_checks=expected, options=options, run=run))
    failed = [verdict for verdict in verdicts if verdict.status == "failed"]
    if failed:
        raise CheckFailed("\n\n".join(_with_others(each, failed) for each in failed if not each.same_as))
    return verdicts


def _with_others(verdict: Verdict, failed: Iterable[Verdict]) -> str:
    """Return a verdict's message with the other checks that failed by the same error."""
    others = [other.check.name for other in failed if other.same_as == verdict.check.name]
    return verdict.message + (f"\nThe same error fails {', '.join(others)}." if others else "")


def parametrize_with_checks(
    plugins: Iterable[Any],
    *,
    only: Collection[str] = (),
    expected_failed_checks: Mapping[str, str] | Callable[[Any], Mapping[str, str]] | None = None,
    options: Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
) -> Any:
    """Return a pytest mark that runs a test once for every plugin and check.

    Checks that start processes are marked ``slow``; those that do not apply to the plugin are skipped, with the reason.

    :param plugins: classes, or the names under which they are installed.
    :param only: names of checks; default all.
    :param expected_failed_checks: check -> reason, or a function of the plugin that returns this; these must fail.
    :param options: the plugins' own options; ``run`` options of RunConfig, as in :func:`run_checks`.

    >>> @parametrize_with_checks([MyMethod])  # doctest: +SKIP
    ... def test_conformance(plugin, check):
    ...     check(plugin)
    """
    import pytest

    _require_known(only)
    cases = []
    for plugin in plugins:
        by_plugin = expected_failed_checks
        expected = by_plugin(plugin) if callable(by_plugin) else by_plugin or {}
        _require_known(expected)
        label = plugin if isinstance(plugin, str) else getattr(plugin, "__name__", str(plugin)).lower()
        for check in (check for check in CHECKS.values() if not only or check.name in only):
            marks = [pytest.mark.slow] if check.slow else []
            if check.name in expected:
                marks.append(pytest.mark.xfail(reason=expected[check.name], raises=CheckFailed, strict=True))
            cases.append(pytest.param(plugin, _skipping(check, options, run), marks=marks, id=f"{label}-{check.name}"))
    return pytest.mark.parametrize(("plugin", "check"), cases)


def _skipping(
    check: Check, options: Mapping[str, Any] | None, overrides: Mapping[str, Any] | None
) -> Callable[[Any], None]:
    def run(plugin: Any) -> None:
        import pytest

        try:
            check.function(trial_of(plugin, options, overrides))
        except NotApplicable as reason:
            pytest.skip(str(reason))

    return run


def _verdict(check: Check, trial: Any, expected: Mapping[str, str], broken: str) -> tuple[Status, str, str]:
    """Return status and message, and the cause of a failure that is not expected."""
    if broken:
        return "not applicable", f"{broken} failed", ""
    try:
        check.function(trial)
    except NotApplicable as reason:
        return "not applicable", str(reason), ""
    except CheckFailed as error:
        if check.name in expected:
            return "failed as expected", expected[check.name], ""
        return "failed", str(error), cause_of(error)
    if check.name in expected:
        message = (
            f"plugin {trial.label!r} passes {check.name}, which is listed as failing ({expected[check.name]})\n"
            "What to do: expect it no longer (expected_failed_checks, --expect)."
        )
        return "failed", message, ""
    return "passed", "", ""


def _require_known(names: Iterable[str]) -> None:
    for name in names:
        if name not in CHECKS:
            raise UnknownNameError("check", name, CHECKS)
