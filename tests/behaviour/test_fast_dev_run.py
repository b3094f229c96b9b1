"""``train --fast-dev-run``: two small rounds with every method, and nothing that stays."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedcore
from fedcore import Loss, Plugin, hookimpl
from fedcore.base.registry import available
from fedcore.data import Domains, Partition, load_dataset
from fedcore.engines import InProcessEngine
from fedcore.runs.resolve import resolve_partition
from tests.sentences import raises, refused
from tests.support import CORRECTED

SMALL = {"clients": 6, "participation": 0.5, "client_test_fraction": 0.2}
NEEDS = {
    "fedbuff": {"system": {"concurrency": 2}},
    "feddf": {"public": 0.1},
    "fltrust": {"public": 0.1},
    "diagnostics": {"public": 0.1},
}
"""Options without which a method refuses the whole run."""


def tried(plugin=None, **options):
    """Return the result of a fast dev run, and what its second round notified."""
    rounds = []

    def notify(event, details):
        if event == "round":
            rounds.append(details)

    result = fedcore.run(plugins=plugin, fast_dev_run=True, notify=notify, **{**SMALL, **options})
    _, second = rounds
    return result, second


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """A folder for temporary files, in which nothing is left, and a folder of the run, in which nothing is written."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    yield
    assert not list(folder.glob("fedcore-*"))
    assert not list(work.iterdir())
    assert not torch.is_anomaly_enabled()


QUICK = {"fedcd", "fedeccr", "fedproc", "fdcl", "fedcme", "moon", "scaffold", "ditto", "dp", "solo"}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in available("plugin")]
)
def test_every_installed_method(name):
    private = name in ("dp", "local-dp", "dp-sgd")  # which refuse figures of clients' held-out samples
    patience = {} if private else {"patience": 2}
    result, second = tried({name: CORRECTED.get(name, {})}, **patience, **NEEDS.get(name, {}))
    assert result.config.clients == (2 if name == "fedcme" else 1)
    assert len(second["cohort"]) == result.config.clients
    assert result.metrics
    assert not result.directory.exists()


@pytest.mark.parametrize("engine", [None, "local", "workers", InProcessEngine])
def test_an_engine_that_is_not_tried_is_named(engine):
    notes = []

    def notify(event, details):
        notes.extend([details["message"]] if event == "note" else ())

    fedcore.run(engine=engine, fast_dev_run=True, notify=notify, **SMALL)
    untried = ["a fast dev run trains in this process: the engine is not tried"]
    assert [note for note in notes if "engine" in note] == (untried if engine not in (None, "local") else [])


def test_two_batches_of_one_client():
    seen = []

    class Counting(Plugin):
        @hookimpl
        def observe(self, step):
            seen.append((step.epoch, len(step.y)))

    tried(Counting)
    assert seen == [(0, 16), (1, 16)] * 2
    seen.clear()
    tried(Counting, local_epochs=1)
    assert seen == [(0, 16), (0, 16)] * 2
    seen.clear()
    result, _ = tried(Counting, local_steps=30)
    assert len(seen) == 2 * 2
    assert result.config.local_epochs == 5  # another number would be noted as without effect


def test_clients_that_exchange_are_two_and_reach_the_exchange():
    result, _ = tried("fedcme", local_epochs=9)
    assert (result.config.clients, result.config.local_epochs) == (2, 2)


def test_a_method_that_refuses_few_clients_gets_the_least_that_it_takes():
    class Three(Plugin):
        @hookimpl
        def check_run(self, setup):
            if setup.config.clients < 3:
                raise fedcore.ConfigError("too few clients")

    assert tried(Three)[0].config.clients == 3


@pytest.mark.parametrize(
    "options",
    [
        {"keep": "best"},
        {"validation_share": 0.05, "batch_size": 1},
        {"partition": "classes", "workers": 3, "client_timeout": 9.0, "min_clients": 3, "warmup_rounds": 4},
        {"system": {"dropout": 0.9, "no_show": 0.9}},
        {"trackers": "tensorboard"},
        {"public": 0.2, "augment": False, "eval_every": 7},
    ],
    ids=str,
)
def test_options_of_long_runs_are_accepted(options):
    assert tried("fedprox", **options)[0].config.rounds == 2


def test_the_partition_may_be_an_object():
    dataset = load_dataset("digits")
    train = torch.arange(1200).split(200)
    made = Partition(train, [part[:0] for part in train], resolve_partition(fedcore.RunConfig(), dataset).info)
    assert tried("fedavg", partition=made, client_test_fraction=0.0)[0].config.clients == 1


def test_a_small_domain_keeps_test_samples():
    dataset = load_dataset("digits")
    train = (torch.arange(len(dataset.train)) < 200).long()
    test = ((torch.arange(len(dataset.test)) - 14).abs() < 3).long()  # of 360, of which the trial takes every 11th
    dataset = replace(dataset, domains=Domains(("many", "few"), train, test))
    assert "unseen_domain" in tried(dataset=dataset, unseen_domain="few")[0].metrics


def test_clients_that_hold_their_own_data_cannot_be_tried():
    made = Partition.declared([20] * 6, [0] * 6, "digits")
    with raises(fedcore.ConfigError):
        tried("fedavg", partition=made)


class Imaginary(Plugin):
    """Its term is 0, and its gradient NaN: 0 * inf, as of a square root at 0."""

    @hookimpl
    def local_loss(self, step):
        return Loss(0 * (step.logits[:1] - step.logits[:1]).abs().sqrt().sum())


@pytest.mark.filterwarnings("ignore:Error detected in SqrtBackward0")
def test_anomaly_detection_names_the_operation_whose_gradient_is_nan():
    with pytest.raises(fedcore.RoundFailedError, match="SqrtBackward0"):
        tried(Imaginary)


class Broken(Plugin):
    @hookimpl
    def end_local(self, client):
        raise ZeroDivisionError("of my own")


class Late(Plugin):
    """Its term begins in the second round."""

    reads = ("previous",)

    @hookimpl
    def local_loss(self, step):
        if step.frozen("previous") is not None:
            raise ZeroDivisionError("of my own")


def test_a_term_on_the_previous_model_is_tried():
    with raises(fedcore.RoundFailedError, "2"):
        tried(Late)


def test_the_command_prints_that_everything_ran(cli):
    result = cli("train", "--plugin", "moon", "--fast-dev-run", "--quiet")
    assert result.exit_code == 0
    told = "everything ran: moon on digits (mlp), 2 rounds of 1 client with a few batches of 16. Nothing is kept.\n"
    assert result.stdout == told


def test_the_command_prints_the_error_with_the_plugins_name(cli):
    result = cli("train", "--plugin", "module:tests.behaviour.test_fast_dev_run.Broken", "--fast-dev-run")
    assert result.exit_code == 1
    assert "Broken" in result.stderr
    assert "of my own" in result.stderr
    assert "everything ran" not in result.stdout
    assert "resume" not in result.stderr


def test_the_whole_configuration_is_checked(cli, tmp_path: Path):
    refused(cli("train", "--participation", 2, "--fast-dev-run"), "--participation", 2)
    refused(cli("train", "--patience", 3, "--fast-dev-run"), "--patience", "--client-test-fraction")
    refused(cli("train", "--tracker", "tensorbord", "--fast-dev-run"), "'tensorbord'", "'tensorboard'")
