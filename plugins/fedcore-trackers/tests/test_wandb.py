"""Offline runs of Weights & Biases, read back from the files that ``wandb sync`` sends."""

from __future__ import annotations

import json
import struct

import pytest

from fedcore import Interrupted, resume
from fedcore.tools import RunDirectory
from fedcore_testing import federate
from fedcore_trackers.testing import check_tracker


@pytest.fixture(autouse=True)
def _offline(tmp_path, monkeypatch):
    """No network, no account, no settings of whoever runs the tests."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "NETRC"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    (tmp_path / "home").mkdir()


def files_of(directory):
    return sorted(directory.glob("wandb/offline-run-*/run-*.wandb"), key=lambda file: file.stat().st_mtime_ns)


def read(file):
    """Yield the records of a .wandb file: protocol buffers in LevelDB's log format, in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    data = file.read_bytes()
    assert data[:4] == b":W&B"
    position, message = 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:  # too short for a header: padding
            position += left
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        message += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            message = b""
            yield record


def key(item):
    return item.key or "/".join(item.nested_key)


def history(file):
    return [
        {key(item): json.loads(item.value_json) for item in record.history.item}
        for record in read(file)
        if record.WhichOneof("record_type") == "history"
    ]


def test_an_offline_run_is_written(tmp_path):
    result = federate(tmp_path, "moon", rounds=3, alpha=0.3, trackers={"wandb": {"project": "mine"}})
    (file,) = files_of(result.directory)
    rows = history(file)
    lines = RunDirectory(result.directory).metrics.read()
    for name, expected in {
        "round": [1, 2, 3],
        "global/accuracy": [line["metrics"]["global"]["accuracy"] for line in lines],
        "loss/task": [line["losses"]["task"] for line in lines],
        "bytes/up": [line["bytes"]["up"] for line in lines],
        "seconds/local_training": [line["time"]["local_training"] for line in lines],
    }.items():
        assert [row[name] for row in rows] == pytest.approx(expected), name
    assert ["loss/moon.contrast" in row for row in rows] == [False, True, True]
    found = list(read(file))
    run = next(record.run for record in found if record.WhichOneof("record_type") == "run")
    assert run.project == "mine"
    assert run.display_name == result.directory.name
    config = {key(item): json.loads(item.value_json) for item in run.config.update}
    assert (config["alpha"], config["plugins"], config["moon.mu"]) == (0.3, "moon", 1.0)
    summary = {key(item): json.loads(item.value_json) for record in found for item in record.summary.update}
    assert summary["final/global/accuracy"] == pytest.approx(result.metrics["global"]["accuracy"])
    kept = {item.path for record in found for item in record.files.files}
    assert {f"{result.directory.name}/config.yaml", f"{result.directory.name}/summary.json"} <= kept
    assert [record.exit.exit_code for record in found if record.WhichOneof("record_type") == "exit"] == [0]


@pytest.mark.slow
def test_rounds_that_are_not_evaluated_have_rows_of_their_own(tmp_path):
    result = federate(tmp_path, rounds=4, eval_every=2, trackers={"wandb": {}})
    (file,) = files_of(result.directory)
    assert [(row["round"], "global/accuracy" in row) for row in history(file)] == [
        (1, False),
        (2, True),
        (3, False),
        (4, True),
    ]


@pytest.mark.slow
def test_a_resumed_run_keeps_its_id(tmp_path):
    def stop(event, details):
        if event == "round" and details["round"] == 2:
            raise KeyboardInterrupt

    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        federate(tmp_path, rounds=5, checkpoint_every=2, trackers={"wandb": {}}, out=out, notify=stop)
    (first,) = files_of(out)
    resume(out, allow_code=True, allow_outside=True)
    before, after = files_of(out)
    assert before == first
    assert before.name == after.name  # run-ID.wandb
    assert [row["round"] for row in history(before) + history(after)] == [1, 2, 3, 4, 5]


def test_without_an_account_nothing_is_asked_and_the_run_goes_on(tmp_path):
    heard = []
    result = federate(
        tmp_path,
        rounds=1,
        trackers={"wandb": {"mode": "online"}},
        notify=lambda event, details: heard.append(details["message"]) if event == "note" else None,
    )
    assert result.summary["rounds"] == 1
    (note,) = heard
    assert "tracker 'wandb' is switched off: start raised UsageError: No API key configured" in note


@pytest.mark.slow
def test_it_keeps_the_contract(tmp_path):
    check_tracker("wandb", tmp_path, {"dir": str(tmp_path / "files")})
