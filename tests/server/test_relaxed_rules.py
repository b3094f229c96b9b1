"""Frozen backbones that do not travel, questions in select_clients and aggregate, work and samples by client."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedcore import ConfigError, Exchange, Plugin, PluginContractError, Steps, hookimpl, question
from fedcore.data import Partition, load_dataset
from fedcore_testing import client_state, initial_weights, partition_of, personal_state
from fedcore_testing.problems import with_batch_norm
from tests.sentences import raises
from tests.support import committed, config, lines, model_bytes, weights

MODEL = {"model": with_batch_norm}


class Freezes(Plugin):
    """A frozen backbone with BatchNorm; the classifier is trained."""

    @hookimpl
    def configure_model(self, model):
        model.encoder.requires_grad_(False)


class FreezesEachRound(Plugin):
    """The same by ``client.freeze``, which sends the backbone every round."""

    @hookimpl
    def begin_local(self, client):
        client.freeze(["encoder.*"])


class ReadsPrevious(Plugin):
    reads = ("previous",)

    @hookimpl
    def end_local(self, client):
        client.state["seen"] = client.previous_model is not None


def test_a_frozen_backbone_neither_travels_nor_is_kept_and_the_global_model_is_evaluated(go):
    result = go(Freezes, ReadsPrevious, rounds=2, client_test_fraction=0.2, **MODEL)
    classifier = 4 * (16 * 10 + 10)
    for line in lines(result):
        assert line["bytes"] == {
            "by_plugin": {"model": {"down": 4 * classifier, "up": 4 * classifier}},
            "down": 4 * classifier,
            "up": 4 * classifier,
        }
        assert line["metrics"]["global"]["accuracy"] > 0
        assert line["metrics"]["global_local"]["clients"] == 4
    initial, final = initial_weights(config(result.directory.parent, Freezes, **MODEL)), weights(result)
    for name in initial:
        assert torch.equal(initial[name], final[name]) == name.startswith("encoder."), name
    kept = personal_state(result, 0)
    assert {name: len(tensor) for name, tensor in kept.items()} == {"previous/parameters": classifier // 4}


def test_it_gives_the_bits_of_a_backbone_that_travels_and_is_frozen_in_each_round(go):
    once, each = go(Freezes, rounds=2, **MODEL), go(FreezesEachRound, rounds=2, **MODEL)
    assert model_bytes(once) == model_bytes(each)
    assert lines(each)[0]["bytes"]["up"] > 3 * lines(once)[0]["bytes"]["up"]


def test_who_owns_nothing_but_what_is_frozen_is_refused(go):
    class Owns(Plugin):
        owns = ("encoder.base.norm.*",)

        @hookimpl
        def aggregate(self, server):
            return None

    with raises(ConfigError, "'owns'", "'encoder.base.norm.*'"):
        go(Freezes, Owns, **MODEL)


@pytest.mark.parametrize("pattern", ["classifier.*", "*"])
@pytest.mark.parametrize("declaration", ["owns", "exchanges", "corrects"])
def test_who_works_on_nothing_but_what_it_keeps_on_the_clients_is_refused(go, declaration, pattern):
    """Nor does a frozen backbone travel: ``*`` next to one began a run in which the owner had nothing to aggregate."""

    class Keeps(Plugin):
        @hookimpl
        def personal_parameters(self):
            return ["classifier.*"]

        @hookimpl
        def aggregate(self):
            return None

        @hookimpl
        def mid_local_epoch(self):
            return None

        @hookimpl
        def post_train(self):
            return None

        def __init__(self, options):
            super().__init__(options)
            self.owns, self.exchanges = (), None
            patterns = (pattern,)
            setattr(
                self, declaration, Exchange(patterns, lambda epochs: {1}) if declaration == "exchanges" else patterns
            )

    with raises(ConfigError, "'keeps'", declaration, f"'{pattern}'"):
        go(Freezes, Keeps, local_epochs=2, **MODEL)


BUILT = []


class FreezesOthers(Plugin):
    """Server and clients arrive at different frozen weights."""

    @hookimpl
    def configure_model(self, model):
        BUILT.append(1)
        model.encoder.base.linear.weight.data.fill_(len(BUILT) / 100)
        model.encoder.base.linear.requires_grad_(False)


def test_other_frozen_weights_on_a_client_than_on_the_server_end_the_run(go):
    with raises(PluginContractError):
        go(FreezesOthers, **MODEL)


# --- questions ---------------------------------------------------------------------------------------------------


class Loss(Plugin):
    """Selects the candidate of the highest loss, and weighs the answers again before the aggregation."""

    @hookimpl
    def select_clients(self, server):
        candidates = list(server.available)[1:]
        losses = {answer.client: float(answer.tensors["loss"]) for answer in server.ask(candidates, self.loss)}
        server.state["asked"] = sorted(losses)
        return [max(losses, key=losses.get)]

    @hookimpl
    def end_round(self, server):
        server.state["before"] = [float(a.tensors["loss"]) for a in server.ask("cohort", self.loss)]

    @question
    def loss(self, client):
        _, logits, labels = client.forward()
        return {"loss": torch.nn.functional.cross_entropy(logits, labels)}


def test_candidates_are_asked_and_one_trains(go):
    result = go(Loss, rounds=2)
    state = committed(result).plugins["loss"]
    assert state["asked"] == [1, 2, 3]
    model = lines(result)[0]["bytes"]["by_plugin"]["model"]
    whole = model["up"]  # one client trains
    assert model["down"] == (3 + 1 + 1) * whole  # three candidates, the cohort's training, and its question
    assert lines(result)[0]["bytes"]["by_plugin"]["loss"]["up"] == 4 * 4
    assert len(lines(result)[0]["cohort"]) == len(state["before"]) == 1


def test_a_candidate_that_cannot_be_reached_is_recorded_once(go):
    class Asks(Loss):
        @hookimpl
        def select_clients(self, server):
            for _ in range(2):
                list(server.ask(server.available, self.loss))
            return [0, 1, 2, 3]

    result = go(Asks, clients=8, rounds=2, system={"no_show": 0.5}, min_clients=0)
    for line in lines(result):
        away = [failure["client"] for failure in line["failures"]]
        assert len(away) == len(set(away))
    assert any(client > 3 for line in lines(result) for client in [f["client"] for f in line["failures"]])


def test_the_cohort_cannot_be_asked_before_it_is_selected(go):
    class Early(Plugin):
        @hookimpl
        def select_clients(self, server):
            list(server.ask("cohort", self.implements))

    with raises(PluginContractError):
        go(Early)


# --- epochs ------------------------------------------------------------------------------------------------------


class Epochs(Plugin):
    """Client k trains k + 1 epochs."""

    @hookimpl
    def select_clients(self, server):
        return {client: np.int64(client + 1) for client in (2, 0)}

    @hookimpl
    def end_local(self, client):
        client.state["steps"] = client.steps


def test_select_clients_gives_each_client_its_epochs(go):
    result = go(Epochs, local_epochs=4, rounds=1)
    (line,) = lines(result)
    assert (line["cohort"], line["local_epochs"], line["failures"]) == ([0, 2], {"0": 1, "2": 3}, [])
    one, three = (client_state(result, client)["epochs"]["steps"] for client in (0, 2))
    assert 0 < one <= three / 2
    same = go(Epochs, local_epochs=3, rounds=1)
    assert model_bytes(same) == model_bytes(result), "the run's number is but an upper bound"


def test_the_simulated_system_counts_the_epochs_that_were_asked_for(go):
    system = {"slow": 0.0, "step_seconds": 1.0}
    result = go(Epochs, local_epochs=4, rounds=1, system=system)
    (line,) = lines(result)
    assert line["system"]["partial"] == {}
    whole = go(local_epochs=4, rounds=1, system=system)
    assert line["virtual_time"] < lines(whole)[0]["virtual_time"]


@pytest.mark.parametrize(
    ("cohort", "options", "named"),
    [
        ({0: 5}, {"local_epochs": 4}, ("0", "5", "1", "4")),
        ({0: 1.0}, {}, ("1.0",)),
        ({9: 1}, {}, ()),
        ({0: 1}, {"local_steps": 3}, ("--local-steps",)),
        ({0: Steps(3), 1: 1}, {"local_steps": 3}, ("--local-steps",)),
        ({0: Steps(0)}, {}, ("0", "1")),
        ({0: Steps(3)}, {"system": {"slow": 0.5}}, ("--system",)),
    ],
)
def test_epochs_that_a_client_cannot_train(go, cohort, options, named):
    class Picks(Plugin):
        @hookimpl
        def select_clients(self, server):
            return cohort

    with raises(PluginContractError, *named):
        go(Picks, **options)


def test_epochs_before_an_exchange_are_refused(go):
    with raises(PluginContractError, "3", "4", "2"):
        go(Epochs, "fedcme", local_epochs=4)


class InSteps(Epochs):
    """Client 0 takes 2 steps, client 2 more than an epoch."""

    @hookimpl
    def select_clients(self, server):
        return {2: Steps(9), 0: Steps(2)}


@pytest.mark.parametrize("options", [{"local_epochs": 1}, {"local_steps": 4}])
def test_select_clients_gives_each_client_its_steps(go, options):
    result = go(InSteps, rounds=1, batch_size=64, **options)
    (line,) = lines(result)
    assert (line["cohort"], line["local_steps"], line["failures"]) == ([0, 2], {"0": 2, "2": 9}, [])
    assert [client_state(result, client)["insteps"]["steps"] for client in (0, 2)] == [2, 9]


def test_steps_of_a_whole_epoch_are_that_epoch(go):
    class AllSteps(Plugin):
        @hookimpl
        def select_clients(self, server):
            return {client: Steps(server.config.batches(int(n))) for client, n in enumerate(server.client_sizes)}

    assert model_bytes(go(AllSteps, rounds=2, local_epochs=3)) == model_bytes(go(rounds=2, local_epochs=1))


def test_steps_with_an_exchange_are_refused(go):
    with raises(PluginContractError):
        go(InSteps, "fedcme", local_epochs=4)


def test_steps_with_a_system_that_counts_steps(go):
    slow = {"slow": 0.0, "step_seconds": 1.0}
    (line,) = lines(go(InSteps, rounds=1, local_steps=4, system=slow))
    assert (line["system"]["partial"], line["virtual_time"]) == ({}, 9.0)


# --- samples -----------------------------------------------------------------------------------------------------


class Swap(Plugin):
    """The first two clients train on each other's samples."""

    @hookimpl
    def assign_samples(self, partition):
        first, second, *others = partition.train
        return Partition([second, first, *others], partition.test, partition.info)

    @hookimpl
    def end_local(self, client):
        client.state["counts"] = client.class_counts


def test_clients_train_on_the_samples_that_plugins_assign(go):
    class SwapBack(Swap):
        pass

    result, plain = go(Swap, rounds=1), go(SwapBack, Swap, rounds=1)
    counts = partition_of(result).class_counts(load_dataset("digits").train.labels, 10)
    assert [client_state(result, k)["swap"]["counts"].tolist() for k in (0, 1)] == counts[[1, 0]].tolist()
    assert [client_state(plain, k)["swap"]["counts"].tolist() for k in (0, 1)] == counts[[0, 1]].tolist()
    assert partition_of(result).sha256 == partition_of(plain).sha256, "the directory keeps the run's partition"


def test_a_plugin_that_assigns_no_partition_is_named(go):
    class Lists(Plugin):
        @hookimpl
        def assign_samples(self, partition):
            return list(partition.train)

    with raises(PluginContractError, "'lists'", "assign_samples", "fedcore.data.Partition"):
        go(Lists)
