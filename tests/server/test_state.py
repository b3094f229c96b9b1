"""Bytes are counted by direction and sender, and add up."""

from __future__ import annotations

from fedcore.server.state import Ledger


def test_totals_are_the_sum_of_the_senders():
    ledger = Ledger()
    for _ in range(3):
        ledger.down("model", 100)
    ledger.up("model", 50)
    ledger.up("scaffold", 7)
    ledger.down("moon", 0)
    assert ledger.as_json() == {
        "down": 300,
        "up": 57,
        "by_plugin": {"model": {"down": 300, "up": 50}, "scaffold": {"down": 0, "up": 7}},
    }


def test_a_run_goes_on_from_the_totals_of_its_checkpoint():
    first = Ledger()
    first.down("model", 4)
    again = Ledger(first.as_json())
    other = Ledger()
    other.up("fedcd", 2)
    other.down("model", 1)
    assert again.add(other).as_json() == {
        "down": 5,
        "up": 2,
        "by_plugin": {"fedcd": {"down": 0, "up": 2}, "model": {"down": 5, "up": 0}},
    }
    assert first.as_json()["down"] == 4, "the totals that it began with are copied"
