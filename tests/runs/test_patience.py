"""Early stop by the clients' held-out parts."""

from __future__ import annotations

import pytest

import fedcore
from fedcore import ConfigError, RunConfig
from fedcore.runs.training import out_of_patience
from fedcore.server.state import ServerState
from fedcore_testing import model_bytes

OPTIONS = {"clients": 2, "local_epochs": 1, "samples": 100, "workers": 0, "client_test_fraction": 0.3}


@pytest.mark.parametrize(
    ("rounds", "best", "stops"),
    [(1, 0, False), (3, 1, False), (4, 1, True), (9, 1, True), (9, 8, False), (4, None, False)],
)
def test_patience_counts_the_rounds_since_the_best(rounds, best, stops):
    state = ServerState(model={}, round=rounds, best={} if best is None else {"round": best})
    assert out_of_patience(RunConfig(patience=2), state) == stops
    assert not out_of_patience(RunConfig(), state)


def test_a_run_that_learns_nothing_stops_as_a_shorter_one_ends(tmp_path):
    """At a rate of nearly 0 no round is better than the first: after two more the run ends, with the same bits."""
    notes = []

    def notify(event, details):
        notes.extend([details["message"]] if event == "note" else [])

    config = RunConfig(**OPTIONS, rounds=9, lr=1e-30, patience=2, out=tmp_path / "early")
    result = fedcore.run(config, notify=notify)
    assert (result.summary["rounds"], result.summary["stopped_early"]) == (3, {"rounds": 9, "patience": 2})
    assert result.summary["metrics"]["best_by_validation"]["round"] == 1
    assert notes == ["stopped after round 3: round 1 stays the best on the clients' held-out parts (--patience 2)"]
    shorter = fedcore.run(RunConfig(**OPTIONS, rounds=3, lr=1e-30, out=tmp_path / "shorter"))
    assert model_bytes(shorter) == model_bytes(result)
    assert "stopped_early" not in shorter.summary


@pytest.mark.filterwarnings("ignore:stopped after round")
@pytest.mark.parametrize(("patience", "rounds"), [(4, 5), (None, 6)])
def test_a_run_that_stopped_early_goes_on_with_more_patience(tmp_path, patience, rounds):
    config = RunConfig(**OPTIONS, rounds=6, lr=1e-30, patience=2, out=tmp_path / "run")
    assert fedcore.run(config).summary["rounds"] == 3
    longer = fedcore.resume(config.out, changes={"patience": patience})
    assert longer.summary["rounds"] == rounds
    straight = fedcore.run(config.model_copy(update={"patience": patience, "out": tmp_path / "straight"}))
    assert straight.summary["rounds"] == rounds
    assert model_bytes(straight) == model_bytes(longer)
    assert longer.config.patience == patience


def test_the_test_set_plays_no_part(tmp_path):
    config = RunConfig(**{**OPTIONS, "client_test_fraction": 0.0}, patience=2, out=tmp_path / "run")
    with pytest.raises(
        ConfigError, match="--patience looks at the clients' held-out parts; add --client-test-fraction"
    ):
        fedcore.run(config)
    assert not (tmp_path / "run").exists()
