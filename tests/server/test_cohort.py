"""Pauses in the training of a cohort, and the layers that plugins exchange in them."""

from __future__ import annotations

import pytest
import torch

from fedcore import Exchange, Loss, Plugin, hookimpl
from fedcore.base.errors import FedcoreError
from fedcore_testing import W
from tests.exchanges import PausesOnce
from tests.sentences import raises
from tests.support import client_state, committed, lines, model_bytes, weights


class Pausing(Plugin):
    exchanges = Exchange(("classifier.*",), lambda epochs: {1, 2})

    @hookimpl
    def mid_local_epoch(self):
        return None

    @hookimpl
    def begin_local(self, client):
        client.scratch["noted"] = [client.id]
        client.add_parameters({"extra": torch.zeros(1)})

    @hookimpl
    def local_loss(self, step):
        return Loss((step.added["extra"] - 1).pow(2).sum())

    @hookimpl
    def observe(self, step):
        step.client.scratch["noted"].append(step.epoch)

    @hookimpl
    def end_local(self, client):
        client.state["noted"] = client.scratch["noted"]
        client.state["extra"] = client.added["extra"]
        client.state["steps"] = client.steps


class Unpaused(Pausing):
    exchanges = Exchange(("classifier.*",), lambda epochs: ())


@pytest.mark.parametrize("model", ["dropout_mlp", "batch_norm_mlp"])
def test_a_pause_without_patches_changes_nothing(go, model):
    options = {"model": f"module:tests.toy.{model}", "rounds": 2, "local_epochs": 3}
    paused, plain = go(Pausing, **options), go(Unpaused, **options)
    assert model_bytes(paused) == model_bytes(plain)
    for client in range(4):
        kept = client_state(paused, client)["pausing"]
        assert kept["noted"][0] == client, "scratch is the client's own"
        assert sorted(set(kept["noted"][1:])) == [0, 1, 2]
        assert kept["steps"] == len(kept["noted"]) - 1
        assert torch.equal(kept["extra"], client_state(plain, client)["unpaused"]["extra"])


class Swap(PausesOnce):
    """Swaps the classifiers of clients 0 and 1 at the start of epoch 1, and notes what everyone then has."""

    @hookimpl
    def mid_local_epoch(self, server, epoch, snapshots):
        for client, tensors in snapshots.items():
            server.state[f"{client}"] = tensors["classifier.weight"]
        return {0: snapshots[1], 1: snapshots[0]}

    @hookimpl
    def observe(self, step):
        if step.epoch == 1 and "after" not in step.client.scratch:
            step.client.scratch["after"] = step.model.classifier.weight.clone()

    @hookimpl
    def end_local(self, client):
        client.state["after"] = client.scratch["after"]


def test_a_swap_of_classifiers(go):
    result = go(Swap, local_epochs=2)
    before = committed(result).plugins["swap"]
    for client, source in ((0, 1), (1, 0), (2, 2), (3, 3)):
        assert torch.equal(client_state(result, client)["swap"]["after"], before[str(source)])
    assert not torch.equal(before["0"], before["1"])
    counts = lines(result)[0]["bytes"]["by_plugin"]["swap"]
    size = 4 * (64 * 10 + 10)
    assert counts == {"down": 2 * size, "up": 4 * size}


class PatchHead(PausesOnce):
    @hookimpl
    def mid_local_epoch(self, snapshots):
        return {client: {"classifier.h": torch.full((1,), 5.0)} for client in snapshots}


def test_patched_parameters_lose_their_momentum_and_the_others_keep_it(toy):
    options = {
        "dataset": "module:tests.toy.middle",
        "model": "module:fedcore_testing.base_and_head",
        "clients": 1,
        "lr": 0.1,
        "momentum": 0.9,
    }
    result = weights(toy(PatchHead, **options))
    base = 0.2 - 0.1 * (0.9 * -2.0 + (0.2 - 2.0))
    assert result[W].item() == pytest.approx(base)
    assert result["classifier.h"].item() == pytest.approx(5.0 - 0.1 * (5.0 - 2.0))


class PatchElsewhere(PausesOnce):
    target = "encoder.base.w"
    client = 0

    @hookimpl
    def mid_local_epoch(self, server):
        return {self.client: {self.target: server.model[self.target]}}


class PatchStranger(PatchElsewhere):
    target = "classifier.h"
    client = 7


@pytest.mark.parametrize(("cls", "named"), [(PatchElsewhere, "set"), (PatchStranger, "client 7")])
def test_patches_beyond_what_is_exchanged(toy, cls, named):
    with raises(FedcoreError, f"'{cls.__name__.lower()}'", "mid_local_epoch", named):
        toy(cls, model="module:fedcore_testing.base_and_head")


class FailsBeforeTheBreak(PausesOnce):
    @hookimpl
    def begin_local(self, client):
        if client.id == 2:
            raise ValueError("gone")

    @hookimpl
    def mid_local_epoch(self, server, snapshots):
        server.state["seen"] = sorted(snapshots)


def test_clients_that_failed_are_absent_from_snapshots(go):
    ended = {}

    def notify(event, details):
        if event == "client":
            ended[details["client"]] = details["failed"]

    result = go(FailsBeforeTheBreak, local_epochs=2, notify=notify)
    assert committed(result).plugins["failsbeforethebreak"]["seen"] == [0, 1, 3]
    assert ended == {0: False, 1: False, 2: True, 3: False}
    assert [failure["client"] for failure in lines(result)[0]["failures"]] == [2]


class Average(PausesOnce):
    """Averages the exchanged heads of all paused clients; client 0 has diverged by then."""

    starts = ("classifier.weight",)

    @hookimpl
    def begin_local(self, client):
        weight = client.model.classifier.weight
        return {"classifier.weight": torch.full_like(weight, torch.nan)} if client.id == 0 else None

    @hookimpl
    def mid_local_epoch(self, snapshots):
        names = next(iter(snapshots.values()))
        mean = {name: sum(tensors[name] for tensors in snapshots.values()) / len(snapshots) for name in names}
        return dict.fromkeys(snapshots, mean)


def test_a_client_that_diverged_before_a_pause_does_not_take_the_others_with_it(go):
    result = go(Average, local_epochs=2)
    assert [failure["client"] for failure in lines(result)[0]["failures"]] == [0]
