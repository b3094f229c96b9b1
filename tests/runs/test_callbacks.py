"""``on_round``: a function of the caller after every round, which may end the run."""

from __future__ import annotations

import contextlib
import json
import traceback

import numpy as np
import pytest

import fedcore
from fedcore import CallbackError, Interrupted, Plugin, RunConfig, hookimpl
from fedcore_testing import model_bytes
from tests.sentences import raises


@pytest.fixture
def config(tmp_path):
    return RunConfig(clients=3, rounds=5, samples=150, local_epochs=1, workers=0, out=tmp_path / "run")


def test_it_gets_the_rows_of_the_history(config):
    rows = []
    result = fedcore.run(config, on_round=rows.append)
    assert rows == result.history
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("eval_every", [1, 4])
def test_true_ends_the_run_as_a_shorter_one(config, tmp_path, eval_every):
    config = config.model_copy(update={"eval_every": eval_every})
    heard = []
    stopped = fedcore.run(
        config,
        on_round=lambda row: row["round"] == 2,
        notify=lambda event, said: heard.append(said["message"]) if event == "note" else None,
    )
    shorter = fedcore.run(config, rounds=2, out=tmp_path / "shorter")
    assert model_bytes(stopped) == model_bytes(shorter)
    assert stopped.metrics == shorter.metrics
    assert stopped.summary["confusion"] == shorter.summary["confusion"]
    assert (stopped.summary["rounds"], stopped.summary["stopped_early"]["rounds"]) == (2, 5)
    assert "stopped after round 2: on_round returned True" in heard
    assert fedcore.load_run(stopped.directory).metrics == stopped.metrics


@pytest.mark.parametrize(
    ("returned", "rounds"),
    [(True, 1), (np.True_, 1), (np.False_, 2), (1, 2), ("row\n", 2), ([0], 2), ({"round": 1}, 2)],
)
def test_true_alone_ends_a_run(config, returned, rounds):
    """Callbacks end with a call that returns something: file.write, an update of a bar, a list's setdefault."""
    assert fedcore.run(config, rounds=2, on_round=lambda row: returned).summary["rounds"] == rounds


def test_a_run_that_was_ended_goes_on_with_more_rounds(config, tmp_path):
    fedcore.run(config, on_round=lambda row: row["round"] == 2)
    resumed = fedcore.resume(config.out, changes={"rounds": 5})
    whole = fedcore.run(config, out=tmp_path / "whole")
    assert model_bytes(resumed) == model_bytes(whole)


class StoppedOnce(Plugin):
    """Ctrl-C in the first ``post_train``."""

    stops = True

    @hookimpl
    def post_train(self, server):
        if StoppedOnce.stops:
            StoppedOnce.stops = False
            raise KeyboardInterrupt


def test_a_run_that_was_ended_and_killed_after_its_training_trains_no_more(config, tmp_path):
    with pytest.raises(Interrupted):
        fedcore.run(config, plugins=StoppedOnce, on_round=lambda row: row["round"] == 2)
    assert fedcore.resume(config.out, plugins=StoppedOnce, allow_code=True).summary["rounds"] == 2


def test_ctrl_c_ends_a_loop_over_runs(config):
    """Such a loop often passes over the errors of its runs."""

    def stop(row):
        raise KeyboardInterrupt

    with raises(Interrupted), contextlib.suppress(Exception):
        fedcore.run(config, on_round=stop)


def test_an_exception_names_the_callback_and_the_round_is_saved(config, tmp_path):
    def watch(row):
        if row["round"] == 3:
            raise KeyError("accuracy")

    with raises(CallbackError, "on_round", "3", "'accuracy'") as caught:
        fedcore.run(config, on_round=watch)
    assert isinstance(caught.value.__cause__, KeyError)
    assert "in watch" in "".join(traceback.format_exception(caught.value)), "with the caller's own line"
    lines = (config.out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [0, 1, 2]
    resumed = fedcore.resume(config.out)
    assert model_bytes(resumed) == model_bytes(fedcore.run(config, out=tmp_path / "whole"))
