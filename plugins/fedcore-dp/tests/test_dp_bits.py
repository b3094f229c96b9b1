"""The checks of the conformance kit that secure noise cannot pass, with noise from the seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedcore_testing import CHECKS

BITS = [
    "check_same_seed_gives_the_same_bits",
    "check_resumes_to_the_same_bits",
    "check_a_second_pass_changes_nothing",
    "check_order_of_clients_does_not_matter",
    "check_worker_processes_give_the_same_bits",
    "check_every_engine_gives_the_same_bits",
]
ON_THE_SERVER = {"check_order_of_clients_does_not_matter"}
"""Not applicable to local DP, of whose hooks none on the server sees updates."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("plugin", "check"),
    [
        pytest.param(plugin, name, marks=[pytest.mark.slow] if CHECKS[name].slow else [])
        for plugin in ("SeededDP", "SeededLocalDP")
        for name in BITS
        if plugin == "SeededDP" or name not in ON_THE_SERVER
    ],
)
def test_seeded_noise_gives_the_same_bits(plugin: str, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    CHECKS[check].function(f"module:seeded_noise.{plugin}")
