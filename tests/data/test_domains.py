"""Data sets with domains: evaluation by domain, and a domain that no client holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedcore import ConfigError, RunConfig, UnknownNameError, run
from fedcore.client.evaluation import by_domain
from fedcore.data import Domains, TensorSamples, load_dataset, make_partition
from fedcore.data.dataset import data_digest
from fedcore.runs.resolve import resolve_config
from fedcore_metrics import AUROC, CalibrationError, CalibrationSlope, MacroF1
from fedcore_testing import records
from tests.sentences import raises

NAMES = ("plain", "inverted", "noisy")
IID = RunConfig(partition="iid", clients=4, seed=3)


def with_domains():
    """Digits whose samples are plain, inverted or noisy in turn."""
    digits = load_dataset("digits")

    def moved(samples):
        images, of = samples.gather(torch.arange(len(samples))), torch.arange(len(samples)) % 3
        images[of == 1] *= -1
        images[of == 2] += torch.randn(images[of == 2].shape, generator=torch.Generator().manual_seed(0))
        return TensorSamples(images, samples.labels), of

    (train, of_train), (test, of_test) = moved(digits.train), moved(digits.test)
    return replace(digits, train=train, test=test, domains=Domains(NAMES, of_train, of_test))


DATASET = with_domains()


def trained(tmp_path, **options):
    out = tmp_path / "run"
    options = {"clients": 4, "rounds": 2, "local_epochs": 1, "workers": 0, **options}
    return run(dataset=DATASET, out=out, progress=False, **options)


def accuracy_of(model, domain):
    rows = (DATASET.domains.test == domain).nonzero().flatten()
    with torch.no_grad():
        found = model(DATASET.test.gather(rows))[1].argmax(dim=1)
    return float((found == DATASET.test.labels[rows]).double().mean())


def test_the_global_model_is_evaluated_on_each_domain(tmp_path):
    result = trained(tmp_path)
    by_hand = {name: accuracy_of(result.model, number) for number, name in enumerate(NAMES)}
    overall = result.metrics["global"]
    assert overall["domains"] == pytest.approx(by_hand)
    assert overall["samples"] == len(DATASET.test)
    assert overall["accuracy"] == pytest.approx(
        sum(by_hand[name] * int((DATASET.domains.test == k).sum()) for k, name in enumerate(NAMES)) / len(DATASET.test)
    )
    worst = result.metrics["worst_domain"]
    assert worst["domain_of"]["accuracy"] == min(by_hand, key=by_hand.__getitem__)
    assert worst["accuracy"] == pytest.approx(min(by_hand.values()))
    mean = result.metrics["mean_domain"]
    assert mean["accuracy"] == pytest.approx(sum(by_hand.values()) / len(by_hand))
    assert "unseen_domain" not in result.metrics
    assert all("worst_domain" in line["metrics"] for line in records(result))


def test_the_mean_over_domains_counts_each_domain_equally():
    rows = {
        "large": {"accuracy": 0.9, "loss": 0.5, "samples": 900, "f1": 0.8},
        "small": {"accuracy": 0.3, "loss": None, "samples": 100, "f1": 0.2},
    }
    found = by_domain({"accuracy": 0.84, "samples": 1000}, rows, {"f1": MacroF1(10)})
    assert found["mean_domain"] == {"accuracy": pytest.approx(0.6), "loss": None, "f1": 0.5, "samples": 1000}
    assert found["worst_domain"] == {
        "accuracy": 0.3,
        "loss": None,
        "f1": 0.2,
        "domain_of": {"accuracy": "small", "f1": "small"},
    }


def test_each_figure_is_worst_by_its_own_sign_and_left_out_where_it_is_not_defined():
    rows = {
        "a": {"accuracy": 0.5, "loss": 0.7, "auroc": 0.814, "ece": 0.1},
        "b": {"accuracy": 0.6, "loss": 0.9, "auroc": 0.735, "ece": 0.3},
        "c": {"accuracy": 0.7, "loss": 0.8, "auroc": None, "ece": 0.2},  # samples of one class
    }
    metrics = {"auroc": AUROC(2), "ece": CalibrationError(2)}
    found = by_domain({"accuracy": 0.6, "samples": 3}, rows, metrics)
    assert found["worst_domain"] == {
        "accuracy": 0.5,
        "loss": 0.9,
        "auroc": 0.735,
        "ece": 0.3,
        "domain_of": {"accuracy": "a", "loss": "b", "auroc": "b", "ece": "b"},
    }
    assert found["mean_domain"]["auroc"] == pytest.approx((0.814 + 0.735) / 2)
    assert found["mean_domain"]["mean_over"] == {"auroc": 2}
    assert found["global"]["auroc_domains"] == {"a": 0.814, "b": 0.735}
    assert found["global"]["domains"] == {"a": 0.5, "b": 0.6, "c": 0.7}
    rows["c"]["undefined"] = 1  # the model is the reason, not the samples
    found = by_domain({"accuracy": 0.6, "samples": 3}, rows, metrics)
    assert found["worst_domain"]["auroc"] is found["mean_domain"]["auroc"] is None
    assert "mean_over" not in found["mean_domain"]


def test_a_figure_of_which_neither_more_nor_less_is_better_has_no_worst_domain():
    rows = {name: {"accuracy": 0.5, "loss": 0.7, "slope": slope} for name, slope in (("a", 0.5), ("b", 2.0))}
    found = by_domain({"accuracy": 0.5, "samples": 3}, rows, {"slope": CalibrationSlope(2)})
    assert found["mean_domain"]["slope"] == pytest.approx(1.25)
    assert found["worst_domain"]["slope"] is None
    assert "slope" not in found["worst_domain"]["domain_of"]


def test_domains_change_no_bit_of_the_other_figures(tmp_path):
    plain = run(
        dataset=replace(DATASET, domains=None),
        out=tmp_path / "plain",
        progress=False,
        clients=4,
        rounds=2,
        local_epochs=1,
        workers=0,
    )
    found = trained(tmp_path).metrics["global"]
    assert {**found, "domains": 0, "loss": 0} == {**plain.metrics["global"], "domains": 0, "loss": 0}
    assert found["loss"] == pytest.approx(plain.metrics["global"]["loss"])


def test_nobody_holds_the_unseen_domain(tmp_path):
    result = trained(tmp_path, unseen_domain="inverted")
    held = make_partition(DATASET, IID.model_copy(update={"unseen_domain": "inverted"}))
    assert 1 not in DATASET.domains.train[held.train.positions.long()].tolist()
    assert len(held.train.positions) == int((DATASET.domains.train != 1).sum())
    assert held.info["unseen_domain"] == "inverted"
    assert result.metrics["global"]["domains"].keys() == {"plain", "noisy"}
    assert result.metrics["global"]["samples"] == int((DATASET.domains.test != 1).sum())
    unseen = result.metrics["unseen_domain"]
    assert unseen["domain"] == "inverted"
    assert unseen["accuracy"] == pytest.approx(accuracy_of(result.model, 1))
    assert "inverted" not in result.metrics["worst_domain"]["domain_of"].values()


@pytest.mark.parametrize("as_file", [True, False])
def test_a_partition_must_not_give_it_to_clients(tmp_path, as_file):
    def given(config):
        partition, file = make_partition(DATASET, config), tmp_path / "part.json"
        partition.save(file)
        return str(file) if as_file else partition

    with raises(ConfigError):
        trained(tmp_path, partition=given(IID), unseen_domain="inverted")
    without = IID.model_copy(update={"unseen_domain": "inverted"})
    assert "unseen_domain" in trained(tmp_path, partition=given(without), unseen_domain="inverted").metrics


def test_wrong_domains_are_refused(tmp_path):
    with raises(UnknownNameError):
        trained(tmp_path, unseen_domain="invertd")
    with raises(ConfigError):
        run(dataset="digits", unseen_domain="inverted", out=tmp_path / "run")
    with raises(ConfigError):
        trained(tmp_path, unseen_domain="inverted", public="0.1")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "kept",
    [
        2,
        1,
        None,
    ],
)
def test_test_samples_of_the_domain_and_of_others_are_needed(kept):
    rows = (DATASET.domains.test == kept).nonzero().flatten() if kept else torch.empty(0, dtype=torch.int64)
    test = TensorSamples(DATASET.test.gather(rows), DATASET.test.labels[rows])
    domains = replace(DATASET.domains, test=DATASET.domains.test[rows])
    with raises(ConfigError):
        resolve_config(RunConfig(unseen_domain="noisy"), replace(DATASET, test=test, domains=domains))


def test_the_digest_covers_domains():
    other = replace(DATASET, domains=replace(DATASET.domains, names=("a", "b", "c")))
    assert len({data_digest(each) for each in (DATASET, other, replace(DATASET, domains=None))}) == 3
