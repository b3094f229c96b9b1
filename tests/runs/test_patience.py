"""Early stop by the clients' held-out parts."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch

import fedcore
from fedcore import ConfigError, RunConfig
from fedcore.base.serial import read_tensors, write_tensors
from fedcore.data import load_dataset
from fedcore.runs.checkpoint import CheckpointStore
from fedcore.runs.evaluation import Evaluator
from fedcore.runs.resuming import Finished, Refused, TrainOn, next_state
from fedcore.runs.training import out_of_patience
from fedcore.server.state import ServerState
from fedcore_testing import model_bytes, records
from tests.sentences import raises, warns

OPTIONS = {"clients": 2, "local_epochs": 1, "samples": 100, "workers": 0, "client_test_fraction": 0.3}


class Spoils(fedcore.Plugin):
    """From the third round on, each weight of the global model is 0."""

    @fedcore.hookimpl
    def server_step(self, server, mean):
        return {name: torch.zeros_like(tensor) for name, tensor in mean.items()} if server.round >= 2 else None


BEST_IS_EARLY = {"clients": 4, "rounds": 6, "samples": 200, "lr": 0.05, "seed": 3, "workers": 0} | {
    "client_test_fraction": 0.3,
    "plugins": [Spoils],
}
"""The second round stays the best, whatever a processor's rounding makes of the training."""


@pytest.mark.parametrize(
    ("rounds", "best", "stops"),
    [(1, 0, False), (3, 1, False), (4, 1, True), (9, 1, True), (9, 8, False), (4, None, False)],
)
def test_patience_counts_the_rounds_since_the_best(rounds, best, stops):
    state = ServerState(model={}, round=rounds, best={} if best is None else {"round": best})
    assert out_of_patience(RunConfig(patience=2), state) == stops
    assert not out_of_patience(RunConfig(), state)


ROUNDS, PATIENCE, BOTH = {"rounds"}, {"patience"}, {"rounds", "patience"}


@pytest.mark.parametrize(
    ("phase", "round", "asked", "expected"),
    [
        ("train", 0, (), ("train on", "train")),
        ("train", 3, (), ("train on", "train")),
        ("train", 3, ROUNDS, ("train on", "train")),
        ("train", 6, (), ("finished", "post_train")),  # it was to get fewer rounds, and was killed before
        ("train", 7, ROUNDS, ("refused", "has had 7 rounds already, more than --rounds 6")),
        ("post_train", 6, (), ("finished", "post_train")),
        ("post_train", 6, BOTH, ("finished", "post_train")),
        ("post_train", 3, (), ("train on", "train")),  # it was to get more rounds, and was killed before
        ("post_train", 7, ROUNDS, ("refused", "has had 7 rounds already, more than --rounds 6")),
        ("stopped", 3, (), ("finished", "post_train")),
        ("stopped", 3, {"workers"}, ("finished", "post_train")),
        ("stopped", 3, ROUNDS, ("train on", "train")),
        ("stopped", 3, PATIENCE, ("train on", "train")),
        ("out of patience", 3, (), ("finished", "post_train")),
        ("out of patience", 3, PATIENCE, ("finished", "post_train")),
        ("out of patience", 3, ROUNDS, ("finished", "post_train", "--patience 2 ended the run after round 3")),
        ("out of patience", 6, ROUNDS, ("finished", "post_train")),
        ("done", 6, (), ("finished", "done")),
        ("done", 6, ROUNDS, ("finished", "done")),
        ("done", 3, (), ("finished", "done")),
        ("done", 3, ROUNDS, ("train on", "train")),
        ("done", 3, PATIENCE, ("train on", "train")),
        ("done", 7, PATIENCE, ("finished", "done")),
        ("done", 7, BOTH, ("refused", "has had 7 rounds already, more than --rounds 6")),
    ],
)
def test_how_a_run_goes_on(phase, round, asked, expected):
    """Of a run that has by now 6 rounds and a patience of 2."""
    best = {"round": 0} if phase == "out of patience" else {"round": round}
    at = phase if phase in ("train", "done") else "post_train"
    state = ServerState(model={}, round=round, phase=at, best=best, stopped=phase == "stopped")
    match next_state(state, RunConfig(rounds=6, patience=2), asked):
        case Refused(reason):
            assert ("refused", reason) == expected
        case TrainOn(after):
            assert ("train on", after.phase, after.stopped) == (*expected, False)
        case Finished(after, note):
            assert ("finished", after.phase) == expected[:2]
            assert (after.round, bool(note)) == (round, len(expected) == 3)
            assert expected[-1] in (note or after.phase)
    assert (state.phase, state.round) == (at, round)


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


def test_the_model_that_is_kept_is_judged_itself(tmp_path):
    options = {**BEST_IS_EARLY, "rounds": 2, "plugins": ["ditto"]}
    for keep, chosen_by in (("last", "personal"), ("best", "global_local")):
        result = fedcore.run(**options, keep=keep, out=tmp_path / keep)
        assert result.summary["metrics"]["best_by_validation"]["validation"] == chosen_by


@pytest.mark.filterwarnings("ignore:stopped after round")
def test_a_run_that_stopped_early_trains_no_more_where_its_rounds_are_given_again(tmp_path):
    config = RunConfig(**OPTIONS, rounds=6, lr=1e-30, patience=2, out=tmp_path / "run")
    before = fedcore.run(config)
    for rounds in (6, 8, 8):
        with warns(RuntimeWarning, "--patience 2", "round 3"):
            assert fedcore.resume(config.out, changes={"rounds": rounds}).summary["rounds"] == 3
    assert model_bytes(fedcore.load_run(config.out)) == model_bytes(before)


def test_the_test_set_plays_no_part(tmp_path):
    config = RunConfig(**{**OPTIONS, "client_test_fraction": 0.0}, patience=2, out=tmp_path / "run")
    named = "--patience", "--client-test-fraction", "0.2"
    with raises(ConfigError, *named):
        fedcore.run(config)
    assert not (tmp_path / "run").exists()
    begun = fedcore.run(config.model_copy(update={"patience": None, "rounds": 1}))
    with raises(ConfigError, *named):
        fedcore.resume(begun.directory, changes={"rounds": 9, "patience": 2})


def test_the_best_rounds_model_is_kept(tmp_path):
    result = fedcore.run(**BEST_IS_EARLY, keep="best", out=tmp_path / "run")
    best = result.summary["metrics"]["best_by_validation"]
    assert best["round"] < 6, "else the test shows nothing"
    shorter = fedcore.run(**BEST_IS_EARLY | {"rounds": best["round"]}, out=tmp_path / "shorter")
    kept = result.best_model.state_dict()
    assert all(torch.equal(kept[name], tensor) for name, tensor in shorter.model.state_dict().items())
    test = load_dataset("digits").test
    assert result.evaluate(test, model=result.best_model)["accuracy"] == best["global_accuracy"]
    plain = fedcore.run(**BEST_IS_EARLY, out=tmp_path / "plain")
    assert model_bytes(plain) == model_bytes(result)
    with raises(ConfigError):
        _ = plain.best_model


def test_a_killed_run_keeps_the_same_best_model(tmp_path):
    whole = fedcore.run(**BEST_IS_EARLY, keep="best", out=tmp_path / "whole")

    def stop(row):
        assert row["round"] < 3

    with pytest.raises(fedcore.CallbackError):
        fedcore.run(**BEST_IS_EARLY, keep="best", out=tmp_path / "stopped", on_round=stop)
    resumed = fedcore.resume(tmp_path / "stopped", allow_code=True)
    files = [(result.directory / "model-best.safetensors").read_bytes() for result in (whole, resumed)]
    assert files[0] == files[1]
    (tmp_path / "stopped" / "model-best.safetensors").unlink()
    with raises(fedcore.RunDirectoryError, "best.safetensors"):
        _ = resumed.best_model


@pytest.fixture
def second_is_best(monkeypatch):
    """Let each of the first two rounds be the best so far, and no later one, whatever their figures are."""

    def best(evaluator, state, metrics):
        return {"round": state.round - 1, "validation": "global_local"} if state.round <= 2 else state.best

    monkeypatch.setattr(Evaluator, "best", best)


@pytest.mark.filterwarnings("ignore:no checkpoint was written before")
@pytest.mark.parametrize("every", [1, 2])
def test_after_a_kill_the_best_model_is_of_a_round_that_the_checkpoint_has(
    tmp_path, monkeypatch, second_is_best, every
):
    """Copies before and after its checkpoint are what a kill there leaves."""
    out, save, copies = tmp_path / "run", CheckpointStore.save, {}

    def copying(store, state, touched=()):
        for when in ("before", "after"):
            if state.round == 2 and state.phase == "train":
                copies[when] = shutil.copytree(out, tmp_path / when)
            if when == "before":
                save(store, state, touched)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "save", copying)
        fedcore.run(**BEST_IS_EARLY | {"rounds": 3}, keep="best", checkpoint_every=every, out=out)
    best = (out / "model-best.safetensors").read_bytes()
    ended = [
        fedcore.resume(copies[when], allow_code=True, changes={"rounds": 1 + (when == "after")})
        for when in ("before", "after")
    ]
    assert [result.summary["metrics"]["best_by_validation"]["round"] for result in ended] == [1, 2]
    for result in ended:  # a run of so many rounds ends with the model of the best one
        kept = result.best_model.state_dict()
        assert all(torch.equal(kept[name], tensor) for name, tensor in result.model.state_dict().items())
        assert not (result.directory / "model-best-next.safetensors").exists()
    assert (copies["after"] / "model-best.safetensors").read_bytes() == best
    more = fedcore.resume(copies["before"], allow_code=True, changes={"rounds": 3})
    assert (more.directory / "model-best.safetensors").read_bytes() == best


def test_an_older_checkpoint_has_no_better_model_than_it_knows_of(tmp_path, second_is_best):
    """If the newest checkpoint is damaged, the best model of a later round goes: this round is trained again."""
    out = fedcore.run(**BEST_IS_EARLY | {"rounds": 2}, keep="best", out=tmp_path / "run").directory
    for name in ("summary.json", "model.safetensors", "checkpoint/000002-2-done.safetensors"):
        (out / name).unlink()
    newest = out / "checkpoint" / "000002-1-post_train.safetensors"
    newest.rename(newest.with_name("000001-0-train.safetensors"))
    tensors, meta = read_tensors(newest.with_name("000001-0-train.safetensors"))
    line = len((out / "metrics.jsonl").read_bytes().splitlines(keepends=True)[0])
    meta |= {"round": 1, "phase": "train", "metrics_bytes": line, "best": {**meta["best"], "round": 0}}
    write_tensors(newest.with_name("000001-0-train.safetensors"), tensors, meta)
    result = fedcore.resume(out, allow_code=True, changes={"rounds": 1})
    assert not (out / "model-best.safetensors").exists()
    with raises(fedcore.RunDirectoryError, "best.safetensors"):
        _ = result.best_model


@pytest.mark.parametrize(
    ("options", "named"),
    [({}, ("--keep",)), ({"plugins": "fedper", "client_test_fraction": 0.2}, ())],
)
def test_a_run_without_a_best_global_model_is_refused(tmp_path, options, named):
    with raises(ConfigError, *named):
        fedcore.run(clients=3, keep="best", out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


class Misses(fedcore.Metric):
    """The number of wrong predictions; undefined where there is none."""

    lower_is_better = True

    def count(self, logits, labels):
        return (logits.argmax(dim=1) != labels).sum()

    def value(self, counts):
        return float(counts) or float("nan")


@pytest.mark.parametrize(
    ("figure", "best", "everywhere"),
    [("loss", min, True), ("worst10", max, False), ("std", min, False), ("Misses_mean", min, False)],
)
def test_another_figure_chooses_the_best_round(tmp_path, figure, best, everywhere):
    result = fedcore.run(**BEST_IS_EARLY, metrics=[Misses], best_by=figure, keep="best", out=tmp_path / "run")
    lines = records(result)
    values = [line["metrics"]["global_local"][figure] for line in lines]
    found = result.summary["metrics"]["best_by_validation"]
    assert found["round"] == values.index(best(values)) + 1
    assert found[f"validation_{figure}"] == best(values)
    chosen = lines[found["round"] - 1]["metrics"]["global"]
    assert found.get(f"global_{figure}") == (chosen[figure] if everywhere else None)
    assert result.evaluate(load_dataset("digits").test, model=result.best_model)["loss"] == chosen["loss"]


@pytest.mark.parametrize("figure", ["calibration-slope", "calibration-slope_mean"])
def test_a_figure_of_which_neither_more_nor_less_is_better_chooses_nothing(tmp_path, figure):
    """A calibration slope is best at 1. It was taken for a figure of which more is better."""
    with raises(ConfigError, f"--best-by {figure}"):
        fedcore.run(**BEST_IS_EARLY, metrics="calibration-slope", best_by=figure, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


class Samples(fedcore.Metric):
    """The number of samples: no round is better than the first."""

    def count(self, logits, labels):
        return torch.tensor(len(labels))

    def value(self, counts):
        return float(counts)


@pytest.mark.filterwarnings("ignore:stopped after round")
@pytest.mark.parametrize(("best_by", "rounds"), [("Samples", 2), ("loss", 3)])
def test_patience_is_of_the_figure_that_chooses(tmp_path, best_by, rounds):
    """The loss falls in the second round, far beyond a processor's rounding, and rises in the third."""
    options = {**BEST_IS_EARLY, "metrics": [Samples], "patience": 1, "best_by": best_by}
    result = fedcore.run(**options, out=tmp_path / "run")
    assert result.summary["rounds"] == rounds
    losses = [line["metrics"]["global_local"]["loss"] for line in records(result)]
    assert losses[1] < losses[0] - 0.1


def evaluator_of(config, **metrics):
    """Return what :meth:`Evaluator.best` reads of a run that measures its clients."""
    federation = SimpleNamespace(config=config, dataset=load_dataset("digits"))
    return SimpleNamespace(federation=federation, _on_clients=["global_local"], further=metrics)


def test_a_figure_that_is_not_defined_is_never_the_best():
    config = RunConfig(best_by="Misses", metrics=["module:study.Misses"])
    evaluator = evaluator_of(config, Misses=Misses(10))
    best = {}
    for round, misses in enumerate([None, 7.0, None, 9.0, 5.0, None], start=1):
        metrics = {"global": None, "global_local": {"clients": 3, "Misses": misses}}
        best = Evaluator.best(evaluator, ServerState(model={}, round=round, best=best), metrics)
    assert best == {"round": 4, "validation": "global_local", "validation_Misses": 5.0, "clients": 3}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"best_by": "f1"}, ("'f1'", "accuracy", "--metric")),
        ({"best_by": "macro-f1", "metrics": ["ece"]}, ("'macro-f1'", "ece_mean")),
        ({"best_by": "loss", "client_test_fraction": 0.0}, ("--best-by", "--client-test-fraction")),
    ],
)
def test_a_figure_that_the_run_does_not_measure_chooses_nothing(tmp_path, options, named):
    with raises(ConfigError, *named):
        fedcore.run(**{**OPTIONS, **options}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("before", "clients", "accuracy", "is_best"),
    [
        ({"clients": 3, "validation_accuracy": 0.5}, 2, 0.9, False),
        ({"clients": 2, "validation_accuracy": 0.9}, 3, 0.5, True),
        ({"clients": 3, "validation_accuracy": 0.5}, 3, 0.6, True),
        ({"validation_accuracy": 0.5}, 3, 0.4, False),  # of a checkpoint that does not say how many
        ({}, 1, 0.1, True),
    ],
)
def test_a_round_over_fewer_clients_is_never_the_best(before, clients, accuracy, is_best):
    evaluator = evaluator_of(RunConfig())
    metrics = {"global": {"accuracy": 0.3}, "global_local": {"clients": clients, "accuracy": accuracy}}
    found = Evaluator.best(evaluator, ServerState(model={}, round=9, best=before), metrics)
    assert (found is not before) == is_best


class Never(Samples):
    """A metric that these samples do not define, as AUROC for one class."""

    def value(self, counts):
        return float("nan")


def test_a_note_tells_that_no_round_can_be_the_best(tmp_path):
    options = {**OPTIONS, "metrics": [Never], "best_by": "Never", "keep": "best", "rounds": 2}
    with warns(RuntimeWarning, "Never", "round 1", "--best-by") as caught:
        result = fedcore.run(**options, patience=1, out=tmp_path / "run")
    assert len([each for each in caught if "Never" in str(each.message)]) == 1
    assert result.summary["metrics"]["best_by_validation"] is None
