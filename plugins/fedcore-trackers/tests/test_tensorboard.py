"""TensorBoard's files, read back with TensorBoard's own reader."""

from __future__ import annotations

import pytest

from fedcore import Interrupted, resume, run
from fedcore.tools import RunDirectory
from fedcore_testing import federate, small_config
from fedcore_trackers.testing import check_tracker

pytest.importorskip("tensorboard", reason="the extra fedcore-trackers[tensorboard] is not installed")


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def curve(found, tag):
    return [(event.step, pytest.approx(event.value)) for event in found.Scalars(tag)]


def test_a_run_is_in_tensorboard(tmp_path):
    config = small_config(tmp_path, "moon", rounds=9, client_test_fraction=0.2, trackers={"tensorboard": {}})
    result = run(config, on_round=lambda row: row["round"] == 3, notify=lambda event, details: None)
    found = events(result.directory / "tensorboard")
    lines = RunDirectory(result.directory).metrics.read()
    for tag, read in {
        "global/accuracy": lambda line: line["metrics"]["global"]["accuracy"],
        "global_local/worst10": lambda line: line["metrics"]["global_local"]["worst10"],
        "loss/task": lambda line: line["losses"]["task"],
        "bytes/up": lambda line: line["bytes"]["up"],
        "bytes/by_plugin/model/down": lambda line: line["bytes"]["by_plugin"]["model"]["down"],
        "seconds/local_training": lambda line: line["time"]["local_training"],
        "clients/accepted": lambda line: line["accepted"],
    }.items():
        assert curve(found, tag) == [(line["round"] + 1, read(line)) for line in lines], tag
    assert [step for step, _ in curve(found, "loss/moon.contrast")] == [2, 3]  # nothing to contrast with in the first
    assert curve(found, "final/global/accuracy") == [(3, result.metrics["global"]["accuracy"])]
    text = found.Tensors("config")[0].tensor_proto.string_val[0].decode()
    assert "temperature: 0.5" in text


@pytest.mark.slow
def test_the_table_of_runs_has_the_options(tmp_path):
    from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data

    result = federate(tmp_path, "moon", rounds=1, alpha=0.3, trackers={"tensorboard": {"dir": str(tmp_path / "all")}})
    found = events(tmp_path / "all" / result.directory.name)
    data = found.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    values = parse_session_start_info_plugin_data(data).hparams
    assert values["alpha"].number_value == 0.3
    assert values["plugins"].string_value == "moon"
    assert values["moon.mu"].number_value == 1.0
    assert "trackers" not in values


@pytest.mark.slow
def test_a_resumed_run_has_one_curve(tmp_path):
    def stop(event, details):
        if event == "round" and details["round"] == 2:
            raise KeyboardInterrupt

    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        federate(tmp_path, rounds=5, checkpoint_every=2, trackers={"tensorboard": {}}, out=out, notify=stop)
    resume(out, allow_code=True, allow_outside=True)
    assert len(list((out / "tensorboard").iterdir())) == 2
    assert [step for step, _ in curve(events(out / "tensorboard"), "loss/task")] == [1, 2, 3, 4, 5]


def test_without_tensorboard_the_extra_is_named_and_the_run_goes_on(tmp_path, monkeypatch):
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "tensorboard.py").write_text("raise ImportError(\"No module named 'tensorboard'\")")
    monkeypatch.syspath_prepend(tmp_path / "none")
    heard = []
    result = federate(
        tmp_path,
        rounds=1,
        trackers={"tensorboard": {}},
        notify=lambda event, details: heard.append(details["message"]) if event == "note" else None,
    )
    assert result.summary["rounds"] == 1
    (note,) = heard
    assert "pip install tensorboard" in note


@pytest.mark.slow
def test_it_keeps_the_contract(tmp_path):
    check_tracker("tensorboard", tmp_path)
