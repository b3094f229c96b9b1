"""The checks of the conformance kit that secure noise cannot pass, with noise from the seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedcore_testing import parametrize_with_checks

PLUGINS = [f"module:seeded_noise.{name}" for name in ("SeededDP", "SeededLocalDP", "SeededDPSGD")]
BITS = [
    "check_same_seed_gives_the_same_bits",
    "check_resumes_to_the_same_bits",
    "check_a_second_pass_changes_nothing",
    "check_order_of_clients_does_not_matter",
    "check_the_same_as_one_by_one",
    "check_worker_processes_give_the_same_bits",
    "check_every_engine_gives_the_same_bits",
]


@pytest.mark.sampled(3)
@parametrize_with_checks(PLUGINS, only=BITS)
def test_seeded_noise_gives_the_same_bits(plugin, check, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    check(plugin)
