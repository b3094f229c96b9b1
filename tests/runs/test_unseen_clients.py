"""Clients that never train: who they are, that nothing of them reaches a model, and how they are evaluated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import fedcore
from fedcore import ConfigError, Plugin, PluginContractError, RunConfig, generator, hookimpl, question
from fedcore.base.seeding import numpy_generator
from fedcore.data import TensorSamples, load_dataset
from fedcore.runs.resolve import resolve_partition
from fedcore.server.system import Everybody
from fedcore_export import export_run
from fedcore_testing import (
    client_state,
    initial_weights,
    interrupted,
    model_bytes,
    partition_of,
    records,
    same_tensors,
    weights,
)
from tests.sentences import raises, refused, warns
from tests.support import brief

DIGITS = load_dataset("digits")
OPTIONS = {"clients": 5, "unseen_clients": 0.4, "client_test_fraction": 0.25, "rounds": 2, "local_epochs": 1}
ADAPTED = {**OPTIONS, "adapt_epochs": 2}
SEEN, UNSEEN = [0, 1, 2], [3, 4]


def without(record, *names):
    """Return a record's metrics without these protocols."""
    return {name: row for name, row in record.get("metrics", {}).items() if name not in names}


# --- who they are ------------------------------------------------------------------------------------------------


def test_they_are_drawn_from_the_seed_and_have_the_last_ids(go):
    """The others keep their order, and nobody's samples change: with a partitioner and with a partition file."""
    whole = go(clients=5, client_test_fraction=0.25, rounds=1, samples=None)
    split = partition_of(whole)
    drawn = numpy_generator(0, "unseen").permutation(5)[:2]
    order = [*(k for k in range(5) if k not in drawn), *sorted(drawn)]
    for partition in ("dirichlet", str(whole.directory / "partition.json")):
        found = partition_of(go(**OPTIONS, partition=partition))
        for mine, theirs in ((found.train, split.train), (found.test, split.test)):
            assert [part.tolist() for part in mine] == [theirs[k].tolist() for k in order]


HOSPITALS = ("Basel", "Chur", "Genf", "Olten", "Zug")


def of_hospitals(labels, num_clients, **_):
    return {name: np.arange(k, len(labels), num_clients) for k, name in enumerate(HOSPITALS[:num_clients])}


@pytest.mark.parametrize("plugin", ["fedavg", "ditto"])
def test_hospitals_that_are_named_never_train(cli, plugin):
    """The others keep their order; the names move with the samples, and resume and a partition file have them."""
    named = "module:tests.runs.test_unseen_clients.of_hospitals"
    flags = ("--plugin", plugin, "--clients", 5, "--client-test-fraction", 0.25, "--rounds", 1, "--local-epochs", 1)
    assert cli("train", *flags, "--partition", named, "--out", "whole").exit_code == 0
    result = cli("train", *flags, "--partition", named, "--unseen-clients", "Genf,Basel", "--out", "run")
    assert result.exit_code == 0, result.output
    whole, run = fedcore.load_run("whole", allow_code=True), fedcore.load_run("run", allow_code=True)
    split, found = partition_of(whole), partition_of(run)
    order = [1, 3, 4, 0, 2]
    assert found.names == ["Chur", "Olten", "Zug", "Basel", "Genf"]
    assert split.names == list(HOSPITALS)
    assert [part.tolist() for part in found.train] == [split.train[k].tolist() for k in order]
    assert set(run.metrics["unseen"]["per_client"]) == {"3", "4"}
    assert set(run.metrics["personal" if plugin == "ditto" else "global_local"]["per_client"]) == {"0", "1", "2"}
    if plugin == "ditto":
        export_run(run.directory, "safetensors", Path("out"), client=4, allow_code=True)
        assert "client 4 (Genf)" in Path("out/README.md").read_text()
    assert cli("report", "run", "--points", 0, "--allow-code").exit_code == 0
    page = Path("report.html").read_text()
    assert "Zug, seed 0" in page
    assert "client Basel" in page
    again = cli(
        "train", *flags, "--partition", "run/partition.json", "--unseen-clients", "Genf,Basel", "--out", "again"
    )
    assert again.exit_code == 0, again.output
    assert weights(fedcore.load_run("again")).keys() == weights(run).keys()
    assert same_tensors(weights(fedcore.load_run("again")), weights(run))
    assert cli("resume", "run", "--rounds", 2, "--allow-code").exit_code == 0


@pytest.mark.parametrize(
    ("unseen", "named"),
    [
        ("Gnf", ("'Gnf'", "'Genf'")),
        ("1.5", ("'1.5'",)),
        ("-0.2", ("'-0.2'",)),
        (",".join(HOSPITALS), ("unseen_clients", "5 of 5")),
        ("Genf,Genf", ("--unseen-clients", "once")),
        ("Genf,Köln, D", ("'Köln'", '"B, C"')),
    ],
)
def test_unseen_clients_without_such_a_name_are_refused(cli, unseen, named):
    partition = "module:tests.runs.test_unseen_clients.of_hospitals"
    result = cli(
        "train", "--clients", 5, "--client-test-fraction", 0.25, "--partition", partition, f"--unseen-clients={unseen}"
    )
    refused(result, *named)


def test_clients_without_names_have_their_numbers():
    partition = resolve_partition(RunConfig(clients=5, unseen_clients="4,1", client_test_fraction=0.2), DIGITS)
    whole = resolve_partition(RunConfig(clients=5, client_test_fraction=0.2), DIGITS)
    assert [part.tolist() for part in partition.train] == [whole.train[k].tolist() for k in (0, 2, 3, 1, 4)]
    assert RunConfig(unseen_clients=["3"]).training_clients == 9
    assert RunConfig(unseen_clients="3").training_clients == 9
    for each in (3, [3]):  # as a grid or a file has the number of a site
        assert RunConfig(unseen_clients=each).unseen_clients == ["3"]
    assert RunConfig(unseen_clients='Genf,"Köln, D"').unseen_clients == ["Genf", "Köln, D"]
    for each in ("0,", [0], ["0"]):
        assert RunConfig(unseen_clients=each).unseen_clients == ["0"]
    for each in ("0", 0, "00"):  # of a grid that leaves out one numbered site after the other, or none and a share
        with raises(ConfigError, "--unseen-clients", 0):
            RunConfig.create({"unseen_clients": each})
    assert RunConfig(unseen_clients="0.0").training_clients == 10
    assert RunConfig(unseen_clients=0.3).training_clients == 7
    with raises(ConfigError):
        RunConfig.create({"unseen_clients": {"a": 1}})


def test_a_partition_with_unseen_clients_is_used_as_it_is(go):
    first = go(**OPTIONS)
    file = str(first.directory / "partition.json")
    assert model_bytes(go(**OPTIONS, partition=file)) == model_bytes(first)
    for share in (0.0, 0.2):
        with raises(ConfigError, "0.4", "--unseen-clients"):
            go(**{**OPTIONS, "unseen_clients": share}, partition=file)


@pytest.mark.parametrize("system", [None, {"availability": 0.7}, {"concurrency": 3}])
def test_they_are_in_no_cohort(system):
    config = RunConfig(clients=10, unseen_clients=0.5, participation=0.4, system=system)
    there = Everybody(config.training_clients, 5) if system is None else config.simulated(lambda client: 16)
    assert config.cohort_size == 2
    cohorts = [there.available(t) if there.arriving(t) is None else there.arriving(t) for t in range(20)]
    assert set().union(*cohorts) == set(range(5))


class Counts(Plugin):
    """Notes which clients a method can see."""

    @hookimpl
    def end_round(self, server):
        answers = [answer.client for answer in server.ask("all", self.size)]
        SEEN_BY_METHOD.append((server.num_clients, len(server.client_sizes), list(server.available), answers))
        if server.config.seed == 1:
            list(server.ask([3], self.size))

    @question
    def size(self, client):
        return {"n": torch.tensor(client.n)}


SEEN_BY_METHOD = []


def test_methods_see_the_clients_that_can_take_part(go):
    SEEN_BY_METHOD.clear()
    result = go(Counts, **OPTIONS)
    assert SEEN_BY_METHOD == [(3, 3, SEEN, SEEN)] * 2
    assert [line["cohort"] for line in records(result)] == [SEEN] * 2
    with raises(PluginContractError, "0", "2"):
        go(Counts, **OPTIONS, seed=1)


def test_a_cohort_with_an_unseen_client_is_refused(go):
    class Chooses(Plugin):
        @hookimpl
        def select_clients(self, server):
            return [2, 3]

    with raises(PluginContractError, "0", "2"):
        go(Chooses, **OPTIONS)


# --- no influence ------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plugin", ["fedcme", "ccvr", "fedper"])
def test_their_samples_influence_no_model(tmp_path, go, plugin):
    """FedCME exchanges layers between clients, CCVR asks all clients, FedPer keeps heads."""
    options = {**ADAPTED, "local_epochs": 2, "workers": 0, "progress": False, "plugins": dict([brief(plugin)])}
    plain = fedcore.run(out=tmp_path / "plain", **options)
    parts = partition_of(plain)
    images = DIGITS.train.gather(torch.arange(len(DIGITS.train))).clone()
    for client in UNSEEN:
        images[torch.cat([parts.train[client], parts.test[client]])] *= -1
    other = fedcore.run(
        dataset=replace(DIGITS, train=TensorSamples(images, DIGITS.train.labels)), out=tmp_path / "other", **options
    )
    assert same_tensors(weights(other), weights(plain))
    names = ("unseen", "unseen_adapted")
    assert [without(line, *names) for line in records(other)] == [without(line, *names) for line in records(plain)]
    assert other.metrics["unseen"]["loss"] != plain.metrics["unseen"]["loss"]
    assert other.metrics["unseen_adapted"]["loss"] != plain.metrics["unseen_adapted"]["loss"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plugin", ["ditto", "fedper", "moon"])
def test_adaptation_leaves_no_trace(go, plugin):
    plain, adapted = go(plugin, **OPTIONS), go(plugin, **ADAPTED)
    assert model_bytes(adapted) == model_bytes(plain)
    for one, other in zip(records(plain), records(adapted), strict=True):
        assert "unseen_adapted" in other["metrics"]
        assert {**one, "metrics": 0} == {**other, "metrics": 0}
        assert one["metrics"] == without(other, "unseen_adapted")
    for client in SEEN:
        assert str(client_state(adapted, client)) == str(client_state(plain, client))
    kept = sorted(int(folder.name) for folder in (adapted.directory / "clients").iterdir())
    assert kept == SEEN


@pytest.mark.slow
def test_workers_and_a_resume_keep_the_figures(go, tmp_path):
    straight = go("ditto", **ADAPTED, workers=0)
    assert go("ditto", **ADAPTED, workers=2).metrics == straight.metrics
    resumed = interrupted(tmp_path, "ditto", after=1, **ADAPTED, samples=500)
    assert (resumed.metrics, model_bytes(resumed)) == (straight.metrics, model_bytes(straight))
    assert fedcore.evaluate_run(straight.directory)["unseen_adapted"] == straight.metrics["unseen_adapted"]


# --- the figures, by hand ----------------------------------------------------------------------------------------


def figures(result, states):
    """Return accuracy and mean loss over the unseen clients' held-out parts, with a client's weights in ``states``."""
    parts, model, hits, losses = partition_of(result).test, result.model, [], []
    for client in UNSEEN:
        model.load_state_dict(states[client])
        with torch.no_grad():
            _, logits = model(DIGITS.train.gather(parts[client]))
        labels = DIGITS.train.labels[parts[client]]
        hits += (logits.argmax(dim=1) == labels).tolist()
        losses += F.cross_entropy(logits, labels, reduction="none").tolist()
    return {"accuracy": np.mean(hits), "loss": np.mean(losses)}


def trained_by_hand(result, client, start):
    """Return the weights after the adaptation of a client, by SGD with momentum from ``start``."""
    config, own, model = result.config, partition_of(result).train[client], result.model
    model.load_state_dict(start)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
    )
    for epoch in range(config.adapt_epochs):
        stream = generator(config.seed, f"shuffle/{epoch}", round=config.rounds, client=client)
        for batch in own[torch.randperm(len(own), generator=stream)].split(config.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(model(DIGITS.train.gather(batch))[1], DIGITS.train.labels[batch]).backward()
            optimizer.step()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def is_like(row, expected):
    return row["accuracy"] == pytest.approx(expected["accuracy"]) and row["loss"] == pytest.approx(
        expected["loss"], rel=1e-4
    )


@pytest.mark.filterwarnings("ignore:--local-epochs 1 has no effect")
def test_a_global_model_is_fine_tuned(go):
    """It adapts for epochs where rounds have steps, and by the run's first learning rate: a cosine ends at 0."""
    result = go(**ADAPTED, lr_schedule="cosine", local_steps=3)
    last = weights(result)
    assert is_like(result.metrics["unseen"], figures(result, dict.fromkeys(UNSEEN, last)))
    tuned = {client: trained_by_hand(result, client, last) for client in UNSEEN}
    assert is_like(result.metrics["unseen_adapted"], figures(result, tuned))
    assert result.metrics["unseen_adapted"]["clients"] == 2
    assert result.metrics["unseen_adapted"]["untrained"] == 0
    assert result.metrics["global_local"]["clients"] == 3


def test_fedper_trains_a_head_and_keeps_the_global_base(go):
    result = go("fedper", **ADAPTED)
    first = initial_weights(result.config)
    head = [name for name in first if name.startswith("classifier.")]
    start = {**weights(result), **{name: first[name] for name in head}}
    assert is_like(result.metrics["unseen"], figures(result, dict.fromkeys(UNSEEN, start)))
    trained = {client: trained_by_hand(result, client, start) for client in UNSEEN}
    own = {client: {**start, **{name: trained[client][name] for name in head}} for client in UNSEEN}
    assert is_like(result.metrics["unseen_adapted"], figures(result, own))
    assert result.metrics["unseen_adapted"]["loss"] < result.metrics["unseen"]["loss"]


def test_per_fedavg_takes_its_step(go):
    """w - alpha grad f_i(w) on the training part, in float64."""
    result = go(("per-fedavg", {"alpha": 0.1}), **ADAPTED)
    model, parts, own = result.model.double(), partition_of(result).train, {}
    for client in UNSEEN:
        model.load_state_dict(weights(result))
        x, y = DIGITS.train.gather(parts[client]).double(), DIGITS.train.labels[parts[client]]
        found = torch.autograd.grad(F.cross_entropy(model(x)[1], y), list(model.parameters()))
        own[client] = {n: (w - 0.1 * g).float() for (n, w), g in zip(model.named_parameters(), found, strict=True)}
    result.model.float()
    assert is_like(result.metrics["unseen_adapted"], figures(result, own))
    assert result.metrics["unseen_adapted"]["loss"] < result.metrics["unseen"]["loss"]


def test_dittos_own_model_without_a_pull_is_a_fine_tuned_global_model(go):
    ditto, fedavg = go(("ditto", {"lambda": 0}), **ADAPTED), go(**ADAPTED)
    assert is_like(ditto.metrics["unseen_adapted"], fedavg.metrics["unseen_adapted"])
    assert ditto.metrics["unseen_adapted"]["loss"] < ditto.metrics["unseen"]["loss"]


def test_an_adaptation_that_fails_leaves_the_other_figure(go):
    class Fails(Plugin):
        @hookimpl
        def end_local(self, client):
            if client.id == 4:
                raise ValueError("no end")

    with warns(RuntimeWarning, "client 4", "no end"):
        metrics = go(Fails, **ADAPTED).metrics
    assert (metrics["unseen"]["clients"], metrics["unseen_adapted"]["clients"]) == (2, 1)


def test_an_exported_model_has_the_figure_of_the_received_one(go, tmp_path):
    """The adaptation is not kept, so its figure is not the exported model's."""
    result = go("ditto", **ADAPTED)
    export_run(result.directory, "safetensors", tmp_path / "out", client=4)
    measured = 100 * result.metrics["unseen"]["per_client"]["4"]
    assert f"| its held-out part | {measured:.2f} |" in (tmp_path / "out" / "README.md").read_text()


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"unseen_clients": 0.01}, ("0", "10")),
        ({"unseen_clients": 0.99}, ("10",)),
        ({"adapt_epochs": 1}, ("--unseen-clients",)),
        ({"unseen_clients": 0.5, "min_clients": 6}, ("5",)),
        ({"unseen_clients": 0.5, "system": {"concurrency": 2}}, ("5",)),
    ],
)
def test_options_that_make_no_sense_are_refused(options, named):
    with raises(ConfigError, *named):
        RunConfig.create({"clients": 10, **options})


def test_held_out_parts_are_needed(tmp_path):
    with raises(ConfigError, "--client-test-fraction"):
        fedcore.run(unseen_clients=0.2, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_trial_tries_the_adaptation(tmp_path):
    options = {**ADAPTED, "local_epochs": 2, "plugins": "fedcme"}
    result = fedcore.run(**options, fast_dev_run=True, progress=False)
    assert result.metrics["unseen_adapted"]["clients"] == 1
    assert result.config.training_clients == 2
