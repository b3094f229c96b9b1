"""Means per round of what was timed and of bytes."""

from __future__ import annotations

import json

from fedcore import Plugin, RunConfig, hookimpl
from fedcore.runs.rounds import Failures, RoundTimes, in_words, lost, per_round
from fedcore.tools import files
from fedcore_testing import federate


def spent(seconds, **terms):
    return {"round": seconds, "evaluation": seconds / 2, "plugin_terms": terms}


def test_means_per_round_by_part_and_plugin():
    times = RoundTimes()
    times.add(spent(1.0, moon=0.25))
    times.add(spent(3.0, moon=0.75, fedprox=1.0))
    found = times.split(4)
    each = found["per_round"]
    assert each == {"round": 2.0, "evaluation": 1.0, "plugin_terms": {"fedprox": 0.5, "moon": 0.5}}
    assert (times.rounds, found["workers"]) == (2, 4)
    assert found["peak_memory_mib"] > 1


def test_no_round_has_no_seconds():
    assert RoundTimes().split(1)["per_round"] == {"plugin_terms": {}}


def test_a_client_that_fails_twice_counts_once_and_others_do_not_count():
    failures = [{"client": client, "kind": kind} for client, kind in ((1, "raised"), (1, "raised"), (7, "dropped"))]
    assert lost({"cohort": [0, 1], "failures": failures}) == {"raised": 1}


def test_failures_of_a_run_in_words():
    def record(*failures):
        named = [{"client": client, "kind": kind, "message": f"of {client}"} for client, kind in failures]
        return {"round": 0, "cohort": [0, 1], "failures": named}

    found = Failures()
    for each in (record((0, "dropped")), record((7, "raised"))):
        found.add(each)
    assert found.in_words() == ""
    for each in (record((7, "raised"), (1, "diverged")), record((0, "raised"))):
        found.add(each)
    said = "2 of 8 trainings of clients failed in rounds 1 to 1, so the figures come from the others. The first: of 1"
    assert found.in_words() == said


def test_a_run_says_at_its_end_that_clients_failed(tmp_path):
    class Fails(Plugin):
        @hookimpl
        def end_local(self, client):
            if client.id == 1:
                raise ValueError("no")

    notes = []

    def notify(event, said):
        notes.extend([said["message"]] if event == "note" else [])

    federate(tmp_path, Fails, clients=3, rounds=2, notify=notify)
    assert notes[-1].startswith("2 of 6 trainings of clients failed")
    assert "ValueError: no" in notes[-1]


def test_bytes_per_round():
    ledger = {"down": 30, "up": 9, "by_plugin": {"model": {"down": 30, "up": 6}, "moon": {"down": 0, "up": 3}}}
    assert per_round(ledger, 3) == {
        "down": 10,
        "up": 3,
        "by_plugin": {"model": {"down": 10, "up": 2}, "moon": {"down": 0, "up": 1}},
    }


def test_who_took_part_in_words(tmp_path):
    assert in_words(8, 8, 0, {}) == "8 of 8 clients"
    assert in_words(8, 5, 1, {"dropped": 2, "unavailable": 1}) == "5 of 8 clients (1 partial; 2 dropped, 1 unavailable)"
    none = RunConfig(system={}).simulated(lambda client: 1).totals(files.RecordFile(tmp_path / "none"))
    assert json.loads(json.dumps(none)) == none
