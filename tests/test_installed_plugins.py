"""Every installed plugin keeps the contract: all checks of the kit on all of them."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from fedcore.testing import CHECKS, parametrize_with_checks

NAMES = sorted({point.name for point in entry_points(group="fedcore.plugins")} - {"fedavg"})
# These share one run per plugin; the others take several each.
QUICK = {check.name for check in CHECKS.values() if check.function.__module__.endswith((".contract", ".hooks"))}


@parametrize_with_checks(NAMES, only=QUICK)
def test_conformance(plugin, check):
    check(plugin)


@pytest.mark.slow
@parametrize_with_checks(NAMES, only=set(CHECKS) - QUICK)
def test_conformance_in_whole_runs(plugin, check):
    check(plugin)


def test_the_plugins_are_there():
    assert {"fedprox", "moon", "fedcd"} <= set(NAMES)
    assert 20 < len(QUICK) < len(CHECKS)
