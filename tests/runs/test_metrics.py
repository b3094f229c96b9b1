"""Metrics of an evaluation next to accuracy and loss: where their figures are, and which objects are refused."""

from __future__ import annotations

import json
import math

import pytest
import torch

import fedcore
from fedcore import ConfigError, Metric, PluginContractError, RunConfig, UnknownNameError
from fedcore.base import registry
from fedcore.base.process import cores
from fedcore.base.protocols import further
from fedcore.client.evaluation import evaluate
from fedcore.data import load_dataset
from fedcore_metrics.checked import make_metrics
from fedcore_testing import PersonalClassifier, model_bytes, small_config
from tests.sentences import raises

HERE = f"module:{__name__}"


class Error(Metric):
    """The error rate, with a sum of floating point in its counts."""

    lower_is_better = True

    def count(self, logits, labels):
        wrong = logits.argmax(dim=1) != labels
        return torch.stack([wrong.sum().double(), torch.ones_like(labels).sum().double(), logits.double().sum()])

    def value(self, counts):
        return float(counts[0] / counts[1])


class Drawn(Error):
    def curve(self, counts):
        return {"x": [0.0, 1.0], "y": [math.nan, self.value(counts)]}


class Undefined(Error):
    def value(self, counts):
        return math.nan


class Grows(Error):
    def count(self, logits, labels):
        return logits.argmax(dim=1)

    def value(self, counts):
        return float(counts.sum())


class Mean(Error):
    def count(self, logits, labels):
        return (logits.argmax(dim=1) != labels).float().mean()


class PerClass(Error):
    def value(self, counts):
        return counts.tolist()


class Fails(Error):
    def count(self, logits, labels):
        raise RuntimeError("no such layer")


class FailsLater(Error):
    def count(self, logits, labels):
        if len(labels) > 1:
            raise RuntimeError("too many samples")
        return super().count(logits, labels)


class ExactMean(Error):
    def count(self, logits, labels):
        return (logits.argmax(dim=1) != labels).double().mean()


class Number(Error):
    def count(self, logits, labels):
        return float((logits.argmax(dim=1) == labels).sum())


class accuracy(Error):
    pass


def number(num_classes):
    return num_classes


METRICS = {"metrics": [f"{HERE}.Error", f"{HERE}.Undefined"], "client_test_fraction": 0.2}


@pytest.fixture
def measured(go):
    return go(PersonalClassifier, **METRICS)


def test_figures_of_every_protocol(go, measured):
    plain = go(PersonalClassifier, client_test_fraction=0.2)
    for protocol in ("personal", "personal_global"):
        row = measured.metrics[protocol]
        assert row["Error"] == pytest.approx(1 - row["accuracy"])
        assert row["Error_mean"] == pytest.approx(1 - row["mean"])
        assert row["Error_std"] == pytest.approx(row["std"])
        assert row["Undefined"] is row["Undefined_mean"] is row["Undefined_std"] is None
        assert further(row) == ["Error", "Undefined"]
        own = {name: value for name, value in row.items() if not name.startswith(("Error", "Undefined"))}
        assert own == plain.metrics[protocol], "the other figures are the same bits"
    assert model_bytes(measured) == model_bytes(plain)
    assert measured.history[-1]["personal.Error"] == measured.metrics["personal"]["Error"]
    assert "personal.Undefined" not in measured.history[-1]
    assert json.loads((measured.directory / "summary.json").read_text())["metrics"]["personal"]["Error"] > 0


def test_each_client_has_a_figure_and_the_summary_the_curves(go):
    result = go(PersonalClassifier, metrics=[f"{HERE}.Drawn", f"{HERE}.Undefined"], client_test_fraction=0.2)
    row = result.metrics["personal"]
    errors = {client: pytest.approx(1 - accuracy, abs=2e-6) for client, accuracy in row["per_client"].items()}
    assert row["Drawn_per_client"] == errors
    assert row["Undefined_per_client"] == {}
    summary = json.loads((result.directory / "summary.json").read_text())
    assert summary["curves_personal"] == {"Drawn": {"x": [0.0, 1.0], "y": [None, row["Drawn"]]}}
    assert "curves_personal" not in go(PersonalClassifier, **METRICS).summary


def test_the_global_model(go):
    result = go(**METRICS)
    for protocol in ("global", "global_local"):
        row = result.metrics[protocol]
        assert row["Error"] == pytest.approx(1 - row["accuracy"])
    test = load_dataset("digits", None).test
    assert result.evaluate(test) == result.metrics["global"]
    assert fedcore.load_run(result.directory, allow_code=True).evaluate(test) == result.metrics["global"]
    assert f"'{HERE}.Error'" in str(result.config), "the configuration names them"


def test_workers_and_threads_change_no_bit(go, measured):
    by_workers = go(PersonalClassifier, **METRICS, workers=2)
    assert by_workers.metrics == measured.metrics
    data = load_dataset("digits", None)
    model = fedcore.client_model(measured.directory, 0, allow_code=True)
    metrics = make_metrics([f"{HERE}.Error"], 10)
    one, many = (
        evaluate(model, data.train, 10, torch.device("cpu"), threads=threads, metrics=metrics)
        for threads in (1, max(2, cores()))
    )
    assert all(torch.equal(tensor, many.tensors()[name]) for name, tensor in one.tensors().items())
    assert one.metrics["Error"][0] == len(data.train) - one.correct.sum()


def test_an_evaluation_with_other_metrics(go):
    result = go(client_test_fraction=0.2)
    found = fedcore.evaluate_run(result.directory, metrics=Error)
    assert found["global"].pop("Error") == pytest.approx(1 - result.accuracy)
    assert found["global"] == result.metrics["global"]
    loaded = fedcore.load_run(result.directory, metrics=[Error])
    assert "Error" in loaded.evaluate(load_dataset("digits", None).test)
    assert "Error" not in fedcore.load_run(result.directory).evaluate(load_dataset("digits", None).test)


def test_a_run_goes_on_with_other_metrics(go):
    result = go(rounds=1)
    longer = fedcore.resume(result.directory, changes={"rounds": 2}, metrics=[Error], progress=False)
    assert ["Error" in line["metrics"]["global"] for line in longer.records] == [False, True]
    assert longer.config.metrics == [f"{HERE}.Error"]


def test_an_object_that_no_other_program_can_import(tmp_path):
    class Local(Error):
        pass

    result = fedcore.run(small_config(tmp_path, workers=2), metrics=[Local], progress=False)
    assert result.metrics["global"]["Local"] == pytest.approx(1 - result.accuracy)
    assert result.config.metrics == ["object:Local"]
    with raises(ConfigError, "fedcore.resume"):
        fedcore.evaluate_run(result.directory)
    assert fedcore.evaluate_run(result.directory, metrics=[Local]) == result.summary["metrics"]


@pytest.mark.parametrize("metrics", [Error(10), [Error(10)]])
def test_an_object_instead_of_its_class_is_refused(tmp_path, metrics):
    with raises(ConfigError):
        fedcore.run(small_config(tmp_path), metrics=metrics)


def test_code_of_a_saved_run_needs_permission(measured):
    with raises(ConfigError, "--allow-code"):
        fedcore.evaluate_run(measured.directory)


@pytest.mark.parametrize(
    ("name", "error", "named"),
    [
        ("macro-f2", UnknownNameError, ("'macro-f2'", "'macro-f1'")),
        ("fedprox", UnknownNameError, ("'fedprox'", "plugin")),
        ("macro-f1,ece", UnknownNameError, ("--metric macro-f1 --metric ece",)),
        ("torchmetrix:Accuracy", UnknownNameError, ("'torchmetrix:Accuracy'",)),
        (f"{HERE}.number", PluginContractError, ("a int",)),
        (f"{HERE}.Mean", PluginContractError, ("torch.float32", "Hint: return sums")),
        (f"{HERE}.ExactMean", PluginContractError, ("two samples", "return sums")),
        (f"{HERE}.Number", PluginContractError, ("a float", "Hint: return sums")),
        (f"{HERE}.PerClass", PluginContractError, ("a list", "the hook report")),
        (f"{HERE}.Fails", PluginContractError, ("RuntimeError: no such layer",)),
        (f"{HERE}.accuracy", ConfigError, ("'accuracy'",)),
    ],
)
def test_what_is_no_metric_is_refused_before_anything_is_written(tmp_path, name, error, named):
    with raises(error, *named):
        fedcore.run(small_config(tmp_path, metrics=name, out=tmp_path / "run"), progress=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "named"), [("Grows", "(2,)"), ("FailsLater", "too many samples")])
def test_a_metric_that_fails_on_more_samples_ends_the_run(go, name, named):
    with raises(PluginContractError, name, named):
        go(metrics=f"{HERE}.{name}")


def test_an_absent_package_is_named(monkeypatch):
    monkeypatch.setattr("fedcore.base.registry.available", lambda kind: {})
    with raises(UnknownNameError):
        make_metrics(["auroc"], 10)
    with raises(UnknownNameError):
        make_metrics(["torchmetrics:MulticlassCohenKappa"], 10)


def test_a_metric_of_ones_own_needs_the_package_that_checks_it(monkeypatch, tmp_path):
    installed = registry.available
    monkeypatch.setattr(registry, "available", lambda kind: {} if kind == "feature" else installed(kind))
    with raises(ConfigError, "test_metrics.Error needs the package fedcore-metrics"):
        fedcore.run(small_config(tmp_path), metrics=[Error], progress=False)


def test_the_configuration_takes_one_name_or_several():
    assert RunConfig(metrics="auroc").metrics == ["auroc"]
    assert RunConfig(metrics=["auroc", "ece", "auroc"]).metrics == ["auroc", "ece"]
    with raises(ConfigError):
        RunConfig.create({"metrics": [Error]})
