"""A run with trackers: they get every record once and in order, and nothing they do reaches the run."""

from __future__ import annotations

import os

import pytest

from fedcore import ConfigError, Interrupted, PluginContractError, RunConfig, UnknownNameError, resume
from fedcore.tools import RunDirectory, digest
from fedcore_study.sweeps.run import run_sweep
from fedcore_study.sweeps.spec import SweepSpec
from fedcore_testing import SMALL, federate, model_bytes, records
from fedcore_trackers.base import create_tracker, resolve_trackers
from fedcore_trackers.process import Memory, memory_file
from fedcore_trackers.testing import check_tracker
from tests.reliability.processes import start, wait_for
from tests.sentences import raises, warns

RECORDER = "module:odd_trackers.Recorder"


class Notes:
    """Listens to a run and keeps its notes."""

    def __init__(self):
        self.heard = []

    def __call__(self, event, details):
        if event == "note":
            self.heard.append(details["message"])


def rounds_of(calls):
    return [call[1]["round"] for call in calls if call[0] == "round"]


def test_a_tracker_sees_every_record_in_order(tmp_path, calls):
    result = federate(tmp_path, "moon", rounds=3, eval_every=2, trackers={RECORDER: {}})
    found = calls(result.directory)
    lines = RunDirectory(result.directory).metrics.read()
    evaluated = [line for line in lines if line["metrics"]]
    assert [call[0] for call in found] == ["start", "round", "round", "evaluation", "round", "evaluation", "finish"]
    assert found[0] == ["start", 0, {"starts": 1}, 3]
    assert [call[1] for call in found if call[0] == "round"] == lines
    assert [call[1:] for call in found if call[0] == "evaluation"] == [[e["round"], e["metrics"]] for e in evaluated]
    assert found[-1] == ["finish", "finished", RunDirectory(result.directory).read_summary()]


@pytest.mark.slow
def test_a_run_has_the_same_bits_with_and_without(tmp_path):
    plain = federate(tmp_path, "moon")
    tracked = federate(tmp_path, "moon", trackers={RECORDER: {}, "module:odd_trackers.Hostile": {}})
    assert model_bytes(tracked) == model_bytes(plain)
    assert records(tracked) == records(plain)
    assert tracked.metrics == plain.metrics


@pytest.mark.slow
def test_whatever_goes_wrong_is_told_once_and_changes_nothing(tmp_path, calls):
    expected = {
        "NoTracker": "expected a subclass of fedcore_trackers.Tracker",
        "InStart": "start raised ValueError: boom in start",
        "InRound": "round (round 2) raised ValueError: boom in round",
        "InFinish": "finish raised ValueError: boom in finish",
        "Exits": "round (round 1) raised SystemExit: 0",
        "Dies": "its process was killed by SIGKILL",
        "State": "not JSON serializable",
        "HangsAtOnce": "did not finish within 1 s; to wait longer: --set module:odd_trackers.HangsAtOnce.patience",
        "HangsAtTheEnd": "did not finish within",
        "Asks": "EOFError",
    }
    trackers = {f"module:odd_trackers.{name}": {} for name in expected}
    for name in ("HangsAtOnce", "HangsAtTheEnd"):
        trackers[f"module:odd_trackers.{name}"] = {"patience": 1}
    notes = Notes()
    result = federate(tmp_path, trackers={**trackers, RECORDER: {}}, notify=notes)
    for name, words in expected.items():
        (note,) = [note for note in notes.heard if f"{name}'" in note]
        assert words in note
        assert "The run is not affected" in note
    assert len(notes.heard) == len(expected)
    assert rounds_of(calls(result.directory)) == [0, 1]
    assert model_bytes(result) == model_bytes(federate(tmp_path))
    log = memory_file(result.directory, "module:odd_trackers.InRound").with_suffix(".log")
    assert 'raise ValueError("boom in round")' in log.read_text()


def test_a_package_whose_import_fails_is_left_to_its_process(tmp_path, monkeypatch):
    info = tmp_path / "broken_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fedcore.trackers]\nbroken = broken_on_import:Tracker\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_trackers({"broken": {"some": 1}}) == {"broken": {"some": 1}}
    with raises(PluginContractError, "'broken'", "RuntimeError: boom in import"):
        create_tracker("broken", {"some": 1})


def test_a_python_caller_without_a_listener_is_warned(tmp_path):
    with warns(RuntimeWarning, "InStart'", "start raised ValueError: boom in start"):
        federate(tmp_path, rounds=1, trackers={"module:odd_trackers.InStart": {}})


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("raised", "status"), [(KeyboardInterrupt, "stopped"), (RuntimeError, "failed")])
def test_a_resumed_run_goes_on_where_its_tracker_was(tmp_path, calls, raised, status):
    def stop(event, details):
        if event == "round" and details["round"] == 1:
            raise raised("now")

    out = tmp_path / "run"
    with pytest.raises(Interrupted if raised is KeyboardInterrupt else raised):
        federate(tmp_path, rounds=4, checkpoint_every=2, trackers={RECORDER: {}}, out=out, notify=stop)
    assert calls(out)[-1] == ["finish", status, None]
    result = resume(out, allow_code=True, allow_outside=True)
    found = calls(out)
    assert rounds_of(found) == [0, 1, 2, 3]
    starts = [call for call in found if call[0] == "start"]
    assert [call[2] for call in starts] == [{"starts": 1}, {"starts": 2}]
    assert found[-1][1] == "finished"
    again = resume(out, allow_code=True, allow_outside=True)  # nothing is left to say
    assert calls(out) == found
    assert again.metrics == result.metrics


def test_a_killed_runs_tracker_learns_of_it_and_goes_on_after_a_resume(tmp_path, calls):
    out = tmp_path / "run"
    flags = {**SMALL, "rounds": 500, "checkpoint_every": 7, "eval_every": 100, "out": out}
    command = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    log = tmp_path / "log"
    run = start("train", "--quiet", "--tracker", RECORDER, *command, log=log)

    def far_enough():
        assert run.poll() is None, log.read_text()
        return (out / "calls.jsonl").exists() and len(rounds_of(calls(out))) > 9

    wait_for(far_enough, every=0.05)
    run.kill()
    run.wait()
    wait_for(lambda: Memory.read(memory_file(out, RECORDER)).status == "stopped", every=0.05)
    before = rounds_of(calls(out))
    assert before == list(range(len(before)))
    result = resume(out, allow_code=True, allow_outside=True, changes={"rounds": len(before) + 5})
    assert rounds_of(calls(out)) == list(range(len(before) + 5)) == [r["round"] for r in records(result)]


@pytest.mark.slow
def test_rounds_that_could_not_be_sent_are_made_up_for(tmp_path, calls):
    def stop(event, details):
        if event == "round" and details["round"] == 1:
            raise KeyboardInterrupt

    out, trackers = tmp_path / "run", {"module:odd_trackers.OfflineFirst": {}}
    with pytest.raises(Interrupted):
        federate(tmp_path, rounds=3, trackers=trackers, out=out, notify=stop)
    assert not (out / "calls.jsonl").exists()
    (tmp_path / "online").touch()
    resume(out, allow_code=True, allow_outside=True)
    assert rounds_of(calls(out)) == [0, 1, 2]


@pytest.mark.slow
def test_a_tracker_that_is_gone_does_not_keep_a_run_from_being_resumed(tmp_path):
    result = federate(tmp_path, trackers={RECORDER: {}})
    file = result.directory / "config.yaml"
    file.write_text(file.read_text().replace(RECORDER, "uninstalled"))
    notes = Notes()
    resume(result.directory, notify=notes, allow_code=True)
    (note,) = notes.heard
    assert "tracker 'uninstalled' is switched off: unknown tracker 'uninstalled'" in note


@pytest.mark.parametrize(
    ("trackers", "error", "named"),
    [
        ({"tensorbord": {}}, UnknownNameError, ("'tensorbord'", "'tensorboard'")),
        ({"tensorboard": {"dri": 1}}, UnknownNameError, ("'dri'", "'dir'")),
        ({"tensorboard": {"patience": 0}}, ConfigError, ("'tensorboard'", "patience", 0)),
    ],
)
def test_bad_choices_are_refused_before_anything_is_written(tmp_path, trackers, error, named):
    with raises(error, *named):
        federate(tmp_path, trackers=trackers, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_trackers_do_not_make_another_run():
    plain, tracked = RunConfig(), RunConfig(trackers={"tensorboard": {"dir": "elsewhere"}})
    assert digest(plain) == digest(tracked)
    with raises(ConfigError, "'moon'"):
        RunConfig.create({"plugins": ["moon"], "trackers": ["moon"]})
    with raises(ConfigError, "'x'", "2"):
        RunConfig.create({"trackers": ["x", "x"]})


def test_a_sweep_hands_trackers_and_their_options_to_its_runs():
    values = {"base": {"trackers": ["tensorboard"]}, "grid": {"alpha": [0.5, 5.0]}, "set": {"tensorboard.patience": 9}}
    found = [config for _, config in SweepSpec.create(values).cells()]
    assert [config.trackers for config in found] == [{"tensorboard": {"patience": 9}}] * 2
    with raises(ConfigError):
        SweepSpec.create({"grid": {"tracker": ["tensorboard"]}})


@pytest.mark.slow
def test_a_tracker_of_a_sweep_is_in_each_of_its_runs(tmp_path):
    heard = []
    spec = SweepSpec.create(
        {
            "base": {**SMALL, "rounds": 1, "trackers": ["tensorboard", "module:odd_trackers.InStart"]},
            "grid": {"alpha": [0.5, 5.0]},
            "set": {"tensorboard.dir": str(tmp_path / "events")},
        }
    )
    result = run_sweep(spec, tmp_path / "sweep", listen=lambda name, event, details: heard.append((event, details)))
    assert [outcome.status for outcome in result.outcomes] == ["finished", "finished"]
    names = {outcome.name for outcome in result.outcomes}
    assert {folder.name for folder in (tmp_path / "events").iterdir()} == names
    notes = [details["note"] for event, details in heard if event == "note"]
    assert len(notes) == 2
    assert all("boom in start" in note for note in notes)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("InStart", "start raised ValueError: boom in start"),
        ("InFinish", "finish raised ValueError: boom in finish"),
        ("State", "JSON"),
        ("Edits", "evaluation"),
        ("NoDescription", "'folder'"),
        ("NoTracker", "fedcore_trackers.Tracker"),
        ("Dies", "SIGKILL"),
    ],
)
def test_the_check_finds_what_is_wrong_with_a_tracker(tmp_path, name, named, monkeypatch):
    if name == "Dies":  # the check hands over a run in this process first
        monkeypatch.setattr(os, "kill", lambda *_: None)
    with raises(AssertionError, name, named):
        check_tracker(f"module:odd_trackers.{name}", tmp_path)


def test_the_check_passes_on_a_good_one(tmp_path):
    check_tracker(RECORDER, tmp_path)
