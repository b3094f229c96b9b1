"""Every installed plugin keeps the contract: all checks of the kit on all of them."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from fedcore_testing import CHECKS, parametrize_with_checks, run_checks
from tests.support import CORRECTED

NAMES = sorted({point.name for point in entry_points(group="fedcore.plugins")} - {"fedavg"})
# Most of these share one run per plugin; the others take several each. The packages' own tests do not repeat them.
QUICK = {check.name for check in CHECKS.values() if check.function.__module__.endswith((".contract", ".hooks"))} | {
    "check_neutral_options_are_fedavg",
    "check_resumes_to_the_same_bits",
}

NOISE = "secure noise is never drawn twice"
NOISY = {
    "check_trains_with_batch_norm": "BatchNorm's statistics would be averaged without noise: refused with the remedy",
    "check_same_seed_gives_the_same_bits": NOISE,
    "check_resumes_to_the_same_bits": NOISE,
    "check_a_second_pass_changes_nothing": NOISE,
    "check_order_of_clients_does_not_matter": NOISE,
    "check_the_same_as_one_by_one": NOISE,
    "check_worker_processes_give_the_same_bits": NOISE,
    "check_every_engine_gives_the_same_bits": NOISE,
}
EXPECTED = {
    "attack": {"check_mean_of_equal_updates_is_that_update": "a malicious client's update is replaced"},
    "dp": {
        **NOISY,
        "check_mean_of_equal_updates_is_that_update": "equal updates are clipped and get noise",
        "check_runs_beside_another_plugin": "the neighbour sums up what single clients send: refused",
    },
    "dp-sgd": {
        **NOISY,
        "check_runs_beside_another_plugin": "the neighbour may look at samples past the noise: refused",
    },
    "fedbn": {"check_works_with_a_frozen_backbone": "this model's only BatchNorm is frozen: refused, without effect"},
    "fednh": {
        "check_mean_of_equal_updates_is_that_update": "the classifier's prototypes come from the clients' features",
    },
    "fltrust": {"check_mean_of_equal_updates_is_that_update": "updates get the length of the server's own update"},
    "local-dp": {**NOISY, "check_runs_beside_another_plugin": NOISE},
}


def expected(name):
    """Return the checks that a plugin cannot pass, with the reasons; fedcore-dp's own tests seed its noise."""
    return EXPECTED.get(name, {})


@pytest.mark.parametrize("name", NAMES)
def test_conformance(name, subtests):
    """In one test per plugin: most checks look at the same run. The slow ones have the default corrections."""
    known = {check: reason for check, reason in expected(name).items() if check in QUICK}
    for verdict in run_checks(name, only=QUICK, expected_failed_checks=known, options=CORRECTED.get(name)):
        with subtests.test(verdict.check.name):
            assert verdict.status != "failed", verdict.message


@pytest.mark.slow
@parametrize_with_checks(NAMES, only=set(CHECKS) - QUICK, expected_failed_checks=expected)
def test_conformance_in_whole_runs(plugin, check):
    check(plugin)


def test_the_plugins_are_there():
    assert {"fedprox", "moon", "fedcd"} <= set(NAMES)
    assert 20 < len(QUICK) < len(CHECKS)
