"""The protocols of evaluation: which models are evaluated, on which data."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import fedcore
from fedcore import ConfigError, Plugin, PluginContractError, RunConfig, SplitModel, hookimpl
from fedcore.runs.api import resume, started
from fedcore.runs.evaluation import Evaluator
from fedcore.runs.training import Interrupted
from fedcore_testing import PersonalClassifier, small_config
from tests.sentences import check, raises
from tests.support import committed, lines, model_bytes


class ConstantModel(SplitModel):
    def __init__(self, label):
        super().__init__(torch.nn.Flatten(), 64, 10)
        self.label = label

    def forward(self, x):
        return x.flatten(1), F.one_hot(torch.full((len(x),), self.label), 10).float()


class OwnModel(Plugin):
    @hookimpl
    def personal_model(self, client):
        return ConstantModel(client.id) if client.id < 2 else None


def test_personal_model(go):
    result = go(OwnModel)
    plain = go()
    found = result.metrics["personal_global"]
    test_labels = result.metrics["global"]["per_class"]
    assert result.metrics["global"] == plain.metrics["global"], "the global model is evaluated as it is"
    assert "personal_global" not in plain.metrics
    zeros, ones = 36 / 360, 36 / 360  # 36 of the 360 test samples are zeros, 36 are ones
    rest = result.metrics["global"]["accuracy"]
    expected = [zeros, ones, rest, rest]
    assert found["accuracy"] == pytest.approx(np.mean(expected))
    assert found["std"] == pytest.approx(np.std(expected))
    assert (found["clients"], found["untrained"]) == (4, 0)
    assert len(test_labels) == 10


class FailsOnSome(Plugin):
    """What clients 0 to 2 return in place of a model that can be evaluated; client 3 has none of its own."""

    @hookimpl
    def personal_model(self, client):
        if client.id == 0:
            raise ValueError("no such file")
        return {1: torch.nn.Linear(64, 5), 2: ConstantModel(math.nan), 3: None}[client.id]


class Narrow(ConstantModel):
    def forward(self, x):
        return x.flatten(1), torch.zeros(len(x), 5)


class Fails(Plugin):
    @hookimpl
    def personal_model(self, client):
        raise ValueError


@pytest.mark.parametrize("others", [(), (PersonalClassifier,)])
def test_clients_that_never_took_part_are_asked_unless_they_keep_parameters(go, others):
    options = {"clients": 5, "participation": 0.25, "rounds": 1, "unseen_clients": 0.2, "client_test_fraction": 0.2}
    result = go(Fails, *others, **options, notify=lambda event, said: None)
    asked = {failure["client"] for failure in result.summary["metrics"]["failures"]}
    assert asked == ({*lines(result)[0]["cohort"]} if others else {0, 1, 2, 3})


class Overflows(Plugin):
    """Makes a global model of finite weights in round 3 whose logits overflow. argmax takes them for class 0."""

    @hookimpl
    def server_step(self, server, mean):
        if server.round < 2:
            return None
        return {"classifier.weight": torch.full_like(mean["classifier.weight"], 3e38)}


def test_a_global_model_that_overflows_predicts_nothing_and_is_never_the_best(go):
    notes: list[str] = []
    options = {"model": "mlp", "rounds": 3, "client_test_fraction": 0.2, "metrics": ["macro-f1"]}
    result = go(Overflows, **options, notify=lambda event, said: notes.append(str(said.get("message"))))
    row, clients = result.metrics["global"], result.metrics["global_local"]
    assert 300 < row["undefined"] <= row["samples"] == 360
    assert row["accuracy"] <= 1 - row["undefined"] / row["samples"]
    assert row["loss"] is row["macro-f1"] is clients["macro-f1"] is None
    assert row["accuracy"] * 360 == sum(map(sum, np.array(result.summary["confusion"]) * np.eye(10)))
    assert 360 - row["undefined"] == np.sum(result.summary["confusion"])
    assert clients["undefined"] > 0
    assert result.summary["metrics"]["best_by_validation"]["round"] < 3
    said = (
        f"the model's output is nan or infinite: {row['undefined']} in global, {clients['undefined']} in global_local"
    )
    assert sum(said in note for note in notes) == 1
    assert fedcore.evaluate_run(result.directory, allow_code=True)["global"] == row


class FailsInShape(Plugin):
    @hookimpl
    def personal_model(self, client):
        return Narrow(0)


def test_an_own_model_that_fails_leaves_the_other_protocols_of_its_client(go, monkeypatch):
    constant = ConstantModel.forward
    monkeypatch.setattr(
        ConstantModel,
        "forward",
        lambda model, x: (x.flatten(1), torch.full((len(x), 10), math.nan)) if model.label != 0 else constant(model, x),
    )
    heard = []
    result = go(FailsOnSome, client_test_fraction=0.2, rounds=3, notify=lambda event, said: heard.append((event, said)))
    metrics = result.summary["metrics"]
    assert metrics["global_local"]["clients"] == 4, "it does not need the own model"
    assert metrics["personal"]["clients"] == metrics["personal_global"]["clients"] == 1
    assert math.isfinite(metrics["personal"]["loss"])
    assert metrics["failed"] == 3
    assert metrics["best_by_validation"]["clients"] == 1
    reasons = {failure["client"]: failure["message"] for failure in metrics["failures"]}
    where = "plugin 'failsonsome' hook personal_model (round 3, client"
    line = FailsOnSome.personal_model.__code__.co_firstlineno + 3
    assert reasons[0] == f"{where} 0) raised ValueError: no such file (test_evaluation.py:{line})"
    assert reasons[1].startswith(f"{where} 1) returned Linear, which cannot be evaluated: ")
    assert reasons[2] == f"{where} 2) returned ConstantModel, which cannot be evaluated: its logits are nan or infinite"
    notes = [
        said["message"] for event, said in heard if event == "note" and "could not be evaluated" in said["message"]
    ]
    assert len(notes) == 1, "of three evaluations"
    assert notes[0].startswith("client 0 and 2 more could not be evaluated by every protocol: plugin 'failsonsome'")


def test_the_shape_of_an_own_models_logits_is_told(go):
    result = go(FailsInShape, client_test_fraction=0.2, rounds=1, notify=lambda event, said: None)
    check(result.summary["metrics"]["failures"][0]["message"], "(17, 5)", "(17, 10)")
    assert "personal" not in result.metrics
    assert result.summary["metrics"]["best_by_validation"] is None, "not of a protocol other than the run's"


def test_protocols(go):
    plain = go(client_test_fraction=0.2)
    assert set(plain.metrics) == {"global", "global_local"}
    found = plain.metrics["global_local"]
    assert found["clients"] == 4
    assert plain.summary["metrics"]["best_by_validation"]["validation"] == "global_local"
    held_out = sum(len(part) for part in json.loads((plain.directory / "partition.json").read_text())["test"])
    assert found["accuracy"] * held_out == pytest.approx(round(found["accuracy"] * held_out))

    head = go(PersonalClassifier, client_test_fraction=0.2, participation=0.25, rounds=2)
    took_part = {client for record in lines(head) for client in record["cohort"]}
    assert head.metrics["global"] is None
    assert "global_local" not in head.metrics
    assert head.metrics["personal"]["untrained"] == 4 - len(took_part)
    assert head.metrics["personal_global"]["untrained"] == 4 - len(took_part)
    assert head.metrics["personal"]["worst10"] <= head.metrics["personal"]["accuracy"]

    without = go(PersonalClassifier)
    assert "personal" not in without.metrics
    assert "personal_global" in without.metrics
    assert without.summary["metrics"]["best_by_validation"] is None


def test_eval_every(go):
    result = go(rounds=4, eval_every=3)
    assert [record["metrics"] is not None for record in lines(result)] == [False, False, True, True]


def test_a_stop_in_an_evaluation_keeps_the_rounds_recorded_before_it(go, tmp_path, monkeypatch):
    best = Evaluator.best

    def stops(evaluator, state, metrics):
        if state.round == 3:
            raise KeyboardInterrupt
        return best(evaluator, state, metrics)

    monkeypatch.setattr(Evaluator, "best", stops)
    with pytest.raises(Interrupted):
        go("moon", rounds=5, checkpoint_every=100, out=tmp_path / "stopped")
    monkeypatch.setattr(Evaluator, "best", best)
    assert committed(tmp_path / "stopped").round == len(lines(tmp_path / "stopped")) == 2
    again, whole = resume(tmp_path / "stopped"), go("moon", rounds=5)
    assert (model_bytes(again), lines(again)) == (model_bytes(whole), lines(whole))


def test_an_experiment_that_is_left_early_has_its_last_round_on_the_disk(go, tmp_path):
    with started(small_config(tmp_path, rounds=3)) as (experiment, state):
        experiment.one_round(experiment.one_round(state))
        directory = experiment.directory.path
    assert [record["round"] for record in lines(directory)] == [0, 1]
    assert committed(directory).round == 2


class Reports(Plugin):
    @hookimpl
    def report(self, server):
        return {"seen": server.round}


class Unbounded(Plugin):
    @hookimpl
    def report(self, server):
        return {"spread": math.nan, "best": [math.inf, 1.0]}


class Late(Plugin):
    @hookimpl
    def report(self, server):
        server.state["rounds"] = server.round


def test_a_reported_figure_that_is_not_finite_ends_no_run(tmp_path):
    result = fedcore.run(small_config(tmp_path, rounds=1), plugins=[Unbounded])
    assert result.summary["reports"] == {"unbounded": {"spread": None, "best": [None, 1.0]}}
    (line,) = map(json.loads, (result.directory / "metrics.jsonl").read_text().splitlines())
    assert line["reports"] == result.summary["reports"]


def test_a_data_set_of_a_single_class_is_noted(tmp_path):
    images, labels = np.zeros((20, 8, 8), np.uint8), np.zeros(20, int)
    heard = []
    config = fedcore.RunConfig(rounds=1, clients=2, partition="iid", workers=0, out=tmp_path / "run")
    fedcore.run(
        config, dataset=(images, labels, images, labels), notify=lambda event, said: heard.append((event, said))
    )
    (start,) = (said for event, said in heard if event == "start")
    assert any("has a single class" in note for note in start["notes"])


def test_state_that_is_written_after_the_commit_is_refused(tmp_path):
    """It would be in no checkpoint, nor there in the next round."""
    with raises(PluginContractError, "'late'", "'rounds'"):
        fedcore.run(small_config(tmp_path, rounds=1), plugins=[Late])


@pytest.mark.parametrize("plugins", [["fedavg"], ["ditto"]])
def test_the_samples_that_choose_the_best_round_are_not_reported(tmp_path, plugins):
    options = {"plugins": plugins, "clients": 5, "rounds": 2, "local_epochs": 1, "client_test_fraction": 0.3}
    chosen = fedcore.run(**options, validation_share=0.5, workers=0, out=tmp_path / "share")
    plain = fedcore.run(**options, workers=2, out=tmp_path / "plain")
    assert model_bytes(chosen) == model_bytes(plain)
    own = ["personal"] if plugins == ["ditto"] else []
    for reported, chooses in [("global_local", "global_validation"), *((name, f"{name}_validation") for name in own)]:
        parts, whole = [chosen.metrics[name] for name in (reported, chooses)], plain.metrics[reported]
        sizes = [len(part) for part in json.loads((tmp_path / "plain" / "partition.json").read_text())["test"]]
        for client, size in enumerate(sizes):
            counts = [size - size // 2, size // 2]
            hits = [n * part["per_client"][str(client)] for n, part in zip(counts, parts, strict=True)]
            assert sum(hits) == pytest.approx(size * whole["per_client"][str(client)], abs=1e-3), client
    best = chosen.summary["metrics"]["best_by_validation"]
    assert best["validation"] == ("personal_validation" if own else "global_validation")
    assert best["validation_accuracy"] in [
        record["metrics"][best["validation"]]["accuracy"] for record in lines(chosen) if record["metrics"]
    ]
    kept = fedcore.run(**options, validation_share=0.5, keep="best", workers=2, out=tmp_path / "kept")
    assert kept.summary["metrics"]["best_by_validation"]["validation"] == "global_validation"


def test_a_validation_share_needs_samples(tmp_path):
    options = {"samples": 60, "clients": 10, "partition": "iid", "client_test_fraction": 0.2}
    with raises(ConfigError, "--validation-share", "0.5", "1"):
        fedcore.run(**options, validation_share=0.5, out=tmp_path / "few")
    with raises(ConfigError, "--validation-share"):
        fedcore.run(validation_share=0.5, out=tmp_path / "none")


@pytest.mark.parametrize("plugins", [["fedavg"], ["ditto"], ["fedper"]])
def test_a_run_measures_the_protocols_that_are_asked_for(tmp_path, plugins):
    options = {"plugins": plugins, "clients": 5, "rounds": 2, "local_epochs": 1, "client_test_fraction": 0.3}
    whole = fedcore.run(**options, workers=0, out=tmp_path / "whole")
    asked = fedcore.run(**options, workers=0, protocols=["personal", "unseen"], out=tmp_path / "asked")
    assert model_bytes(asked) == model_bytes(whole)
    own = "personal" in whole.metrics
    assert asked.summary["metrics"]["global"] is None
    assert "global_reason" in asked.summary["metrics"]
    found = {name for name in asked.metrics if asked.metrics[name]}
    assert found == ({"personal"} if own else set())
    if own:
        assert asked.metrics["personal"] == whole.metrics["personal"]
    again = fedcore.evaluate_run(asked.directory)
    assert {name: again[name] for name in whole.metrics} == {name: whole.metrics[name] for name in whole.metrics}


def test_protocols_have_to_contain_the_one_that_chooses(tmp_path):
    options = {"client_test_fraction": 0.3, "protocols": "global", "rounds": 1, "clients": 4, "workers": 0}
    with raises(ConfigError, "--patience", "--protocol"):
        fedcore.run(**options, patience=2, out=tmp_path / "a")
    with raises(ConfigError, "--keep", "--protocol"):
        fedcore.run(**options | {"protocols": "personal"}, keep="best", out=tmp_path / "b")
    run = fedcore.run(**options, patience=2, validation_share=0.5, out=tmp_path / "c")
    assert {name for name in run.metrics if run.metrics[name]} == {"global", "global_validation"}
    with raises(ConfigError, "'personel'", "'personal'"):
        RunConfig(protocols=["personel"])
