"""Bytes are counted by direction and sender, and add up."""

from __future__ import annotations

from fedcore.server.state import Ledger


def test_totals_are_the_sum_of_the_senders():
    ledger = Ledger()
    for _ in range(3):
        ledger["model", "down"] += 100
    ledger["model", "up"] += 50
    ledger["scaffold", "up"] += 7
    ledger["moon", "down"] += 0
    assert ledger.as_json() == {
        "down": 300,
        "up": 57,
        "by_plugin": {"model": {"down": 300, "up": 50}, "scaffold": {"down": 0, "up": 7}},
    }


def test_a_run_goes_on_from_the_totals_of_its_checkpoint():
    first = Ledger({("model", "down"): 4})
    again = Ledger.of(first.as_json())
    again.update(Ledger({("fedcd", "up"): 2, ("model", "down"): 1}))
    assert again.as_json() == {
        "down": 5,
        "up": 2,
        "by_plugin": {"fedcd": {"down": 0, "up": 2}, "model": {"down": 5, "up": 0}},
    }
    assert first.as_json()["down"] == 4, "the totals that it began with are copied"
