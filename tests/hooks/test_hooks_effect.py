"""What each hook can do: its results reach exactly what they may, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedcore import Loss, Plugin, RejectUpdate, hookimpl
from fedcore.base.errors import FedcoreError, PluginContractError, RoundFailedError
from fedcore.functional import proximal_term
from fedcore.models import SplitModel
from fedcore.runs.directory import RunDirectory
from fedcore.runs.experiment import Interrupted, resume
from fedcore.runs.resolve import resolve_config, resolve_partition
from tests import support
from tests.support import client_state, committed, lines, model_bytes, weights

W = "encoder.base.w"
DROPOUT = {"model": "module:tests.toy.dropout_mlp"}
BATCH_NORM = {"model": "module:tests.toy.batch_norm_mlp"}


def assert_equal(one, other):
    assert set(one) == set(other)
    for name in one:
        assert torch.equal(one[name], other[name]), name


# --- objective -------------------------------------------------------------------------------------------


def test_terms_add_up_and_are_recorded_by_plugin_and_name(toy):
    class Terms(Plugin):
        @hookimpl
        def local_loss(self, step):
            total = step.logits.mean(dim=0).sum()
            return [Loss(total, weight=3.0, name="a"), Loss(total, weight=torch.tensor(2.0)), Loss(total, weight=-1.0)]

    result = toy(Terms, clients=1, dataset="module:tests.toy.one_centre", local_epochs=1)
    assert weights(result)[W].tolist() == [(2.0 - 4.0) * 0.5, -4.0 * 0.5]
    losses = lines(result)[0]["losses"]
    assert losses == {"task": 2.0, "terms": 0.0, "terms.a": 0.0}


def test_task_scale(toy):
    class Scaler(Plugin):
        scales_task = True

        @hookimpl
        def local_loss(self, step):
            return Loss(step.logits.mean(dim=0).sum(), weight=0.0, task_scale=0.25)

    result = toy(Scaler, clients=1, dataset="module:tests.toy.one_centre", local_epochs=1)
    assert weights(result)[W].tolist() == [0.25, 0.0]


class Infinite(Plugin):
    scales_task = True

    @hookimpl
    def local_loss(self, step):
        infinite = (step.logits.sum() * 0 + 1) / 0
        return [Loss(infinite, weight=0.0), Loss(proximal_term(step.parameters, step.reference), name="near")]


def test_a_term_of_weight_zero_is_left_out_even_if_infinite(toy):
    assert weights(toy(Infinite))[W].tolist() == weights(toy(("fedprox", {"mu": 1.0})))[W].tolist()


def test_a_task_of_scale_zero_is_left_out_even_if_infinite(tmp_path):
    class Broken(Plugin):
        scales_task = True

        @hookimpl
        def task_loss(self, step):
            return step.logits.sum() * torch.inf

        @hookimpl
        def local_loss(self, step):
            return Loss(step.logits.mean(dim=0).sum(), task_scale=0.0)

    result = support.run(tmp_path, Broken, **{**support.TOY, "local_epochs": 1})
    assert weights(result)[W].tolist() == [-0.5, -0.5]


def test_an_objective_without_a_gradient_is_refused(tmp_path):
    class Constant(Plugin):
        @hookimpl
        def task_loss(self, step):
            return torch.zeros(())

    with pytest.raises(FedcoreError, match="no part of the local objective that depends on the model"):
        support.run(tmp_path, Constant, **support.TOY)


def test_the_last_short_batch_is_trained(toy):
    class Steps(Plugin):
        @hookimpl
        def end_local(self, client):
            client.state["steps"] = client.steps

    result = toy(Steps, batch_size=2)
    assert [client_state(result, client)["steps"]["steps"] for client in (0, 1)] == [2, 4]


def test_a_step_sees_the_batch(go):
    class Looker(Plugin):
        @hookimpl
        def local_loss(self, step):
            assert step.x.shape == (len(step.y), 1, 8, 8)
            assert torch.equal(step.features, step.model.encoder(step.x))
            assert torch.equal(step.logits, step.model.classifier(step.features))
            seen = step.client.scratch.setdefault("seen", [])
            seen += step.indices.tolist()
            _, _, labels = step.client.forward()
            assert torch.equal(labels[step.indices], step.y)
            assert step.progress == step.round / step.rounds
            names = [name for name, _ in step.model.named_parameters()]
            assert len(step.parameters) == len(step.reference) == len(names)

        @hookimpl
        def end_local(self, client):
            assert sorted(client.scratch["seen"]) == sorted([*range(client.n)] * 2)
            assert int(client.class_counts.sum()) == client.n

    assert lines(go(Looker, local_epochs=2))[0]["failures"] == []


def test_reference_stays_at_the_start_of_the_round(toy):
    class Reference(Plugin):
        @hookimpl
        def observe(self, step):
            assert step.reference[0].tolist() == [0.0, 0.0]
            assert step.epoch == 0 or step.parameters[0].tolist() != [0.0, 0.0]

    assert lines(toy(Reference))[0]["failures"] == []


# --- randomness ------------------------------------------------------------------------------------------


class Drawing(Plugin):
    @hookimpl
    def local_loss(self, step):
        with step.random("noise"):
            step.client.scratch.setdefault("drawn", []).append(torch.rand(()).item())

    @hookimpl
    def end_local(self, client):
        client.state["drawn"] = client.scratch["drawn"]


class DrawingOutside(Plugin):
    @hookimpl
    def local_loss(self, step):
        torch.rand(())


def test_step_random_leaves_the_models_dropout_untouched(go):
    plain = model_bytes(go(**DROPOUT, rounds=2))
    result = go(Drawing, **DROPOUT, rounds=2)
    assert model_bytes(result) == plain
    assert model_bytes(go(DrawingOutside, **DROPOUT, rounds=2)) != plain
    drawn = [client_state(result, client)["drawing"]["drawn"] for client in range(4)]
    flat = [value for values in drawn for value in values]
    assert len(set(flat)) == len(flat), "every client and batch has its own stream"


# --- pauses ----------------------------------------------------------------------------------------------


class Pausing(Plugin):
    exchanges = ("classifier.*",)

    @hookimpl
    def local_epoch_breaks(self, config):
        return {1, 2}

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
    @hookimpl
    def local_epoch_breaks(self, config):
        return None


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


class Swap(Plugin):
    """Swaps the classifiers of clients 0 and 1 at the start of epoch 1, and notes what everyone then has."""

    exchanges = ("classifier.*",)

    @hookimpl
    def local_epoch_breaks(self, config):
        return {1}

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


class PatchHead(Plugin):
    exchanges = ("classifier.*",)

    @hookimpl
    def local_epoch_breaks(self, config):
        return {1}

    @hookimpl
    def mid_local_epoch(self, snapshots):
        return {client: {"classifier.h": torch.full((1,), 5.0)} for client in snapshots}


def test_patched_parameters_lose_their_momentum_and_the_others_keep_it(toy):
    options = {
        "dataset": "module:tests.toy.middle",
        "model": "module:tests.toy.base_and_head",
        "clients": 1,
        "lr": 0.1,
        "momentum": 0.9,
    }
    result = weights(toy(PatchHead, **options))
    base = 0.2 - 0.1 * (0.9 * -2.0 + (0.2 - 2.0))
    assert result[W].item() == pytest.approx(base)
    assert result["classifier.h"].item() == pytest.approx(5.0 - 0.1 * (5.0 - 2.0))


class PatchElsewhere(Plugin):
    exchanges = ("classifier.*",)
    target = "encoder.base.w"
    client = 0

    @hookimpl
    def local_epoch_breaks(self, config):
        return {1}

    @hookimpl
    def mid_local_epoch(self, server):
        return {self.client: {self.target: server.model[self.target]}}


class PatchStranger(PatchElsewhere):
    target = "classifier.h"
    client = 7


@pytest.mark.parametrize(("cls", "words"), [(PatchElsewhere, "may not set"), (PatchStranger, "client 7.*not paused")])
def test_patches_beyond_what_is_exchanged(toy, cls, words):
    with pytest.raises(FedcoreError, match=rf"'{cls.__name__.lower()}' hook mid_local_epoch.*{words}"):
        toy(cls, model="module:tests.toy.base_and_head")


class FailsBeforeTheBreak(Plugin):
    exchanges = ("classifier.*",)

    @hookimpl
    def local_epoch_breaks(self, config):
        return {1}

    @hookimpl
    def begin_local(self, client):
        if client.id == 2:
            raise ValueError("gone")

    @hookimpl
    def mid_local_epoch(self, server, snapshots):
        server.state["seen"] = sorted(snapshots)


def test_clients_that_failed_are_absent_from_snapshots(go):
    result = go(FailsBeforeTheBreak, local_epochs=2)
    assert committed(result).plugins["failsbeforethebreak"]["seen"] == [0, 1, 3]
    assert [failure["client"] for failure in lines(result)[0]["failures"]] == [2]


class Average(Plugin):
    """Averages the exchanged heads of all paused clients; client 0 has diverged by then."""

    exchanges = ("classifier.*",)

    @hookimpl
    def local_epoch_breaks(self, config):
        return {1}

    @hookimpl
    def begin_local(self, client):
        if client.id == 0:
            with torch.no_grad():
                client.model.classifier.weight.fill_(torch.nan)

    @hookimpl
    def mid_local_epoch(self, snapshots):
        names = next(iter(snapshots.values()))
        mean = {name: sum(tensors[name] for tensors in snapshots.values()) / len(snapshots) for name in names}
        return dict.fromkeys(snapshots, mean)


def test_a_client_that_diverged_before_a_pause_does_not_take_the_others_with_it(go):
    result = go(Average, local_epochs=2)
    assert [failure["client"] for failure in lines(result)[0]["failures"]] == [0]


# --- begin_local -----------------------------------------------------------------------------------------


class Extra(Plugin):
    """Trains e on (e - 3)^2 / 2 beside the model."""

    @hookimpl
    def begin_local(self, client):
        client.add_parameters({"e": client.state.get("e", torch.zeros(1))}, lr=1.0, weight_decay=0.0)

    @hookimpl
    def local_loss(self, step):
        return Loss(0.5 * (step.added["e"] - 3).pow(2).sum())

    @hookimpl
    def end_local(self, client):
        client.state["e"] = client.added["e"]


def test_added_parameters_train_and_stay(toy):
    plain = toy()
    result = toy(Extra, local_epochs=2)
    assert_equal(weights(result), weights(plain))
    assert client_state(result, 0)["extra"]["e"].tolist() == [3.0]
    assert committed(result).ledger == committed(plain).ledger


def test_added_parameters_follow_the_rounds_lr_by_default(toy):
    class Follow(Extra):
        @hookimpl
        def begin_local(self, client):
            client.add_parameters({"e": torch.zeros(1)})

    assert client_state(toy(Follow, local_epochs=1), 0)["follow"]["e"].tolist() == [1.5]


class TwoRates(Plugin):
    @hookimpl
    def begin_local(self, client):
        client.add_parameters({"fast": torch.zeros(1)}, lr=1.0)
        client.add_parameters({"usual": torch.zeros(1)})

    @hookimpl
    def local_loss(self, step):
        return Loss(-(step.added["fast"] + step.added["usual"]).sum())

    @hookimpl
    def end_local(self, client):
        client.state["moved"] = [client.added["fast"].item(), client.added["usual"].item()]


def test_each_call_of_add_parameters_has_its_own_rate(toy):
    assert client_state(toy(TwoRates, local_epochs=1), 0)["tworates"]["moved"] == [1.0, 0.5]


class TwoStages(Plugin):
    """Trains the base in the first epoch and everything afterwards."""

    @hookimpl
    def task_loss(self, step):
        x = step.x.flatten(1)
        found, wanted = (step.features, x[:, :1]) if step.epoch == 0 else (step.logits, x)
        return 0.5 * (found - wanted).pow(2).sum(dim=1).mean()


def test_a_parameter_whose_first_gradient_comes_late(tmp_path):
    options = {"dataset": "module:tests.toy.middle", "model": "module:tests.toy.base_and_head", "clients": 1}
    result = weights(support.run(tmp_path, TwoStages, **{**support.TOY, **options, "momentum": 0.5}))
    assert result[W].item() == 2.0  # 1, then - 0.5 * (0.5 * -2 - 1)
    assert result["classifier.h"].item() == 1.0


class Surroundings(Plugin):
    """Notes how the working model is handed over; client 1 freezes a part of it."""

    def note(self, client, where):
        trainable = all(parameter.requires_grad for parameter in client.model.parameters())
        return [where, client.model.training, trainable]

    @hookimpl
    def begin_round(self, server):
        answers = server.ask("q", clients="all")
        server.state["notes"] = [bool(answer.tensors["training"]) for answer in answers]

    @hookimpl
    def answer(self, client):
        return {"training": torch.tensor(client.model.training)}

    @hookimpl
    def begin_local(self, client):
        client.state["notes"] = [*client.state.get("notes", []), self.note(client, "begin_local")]
        if client.id == 1:
            client.freeze(["classifier.*"])


def test_the_working_model_is_handed_over_in_the_same_condition_to_every_client(go):
    result = go(Surroundings, rounds=2)
    notes = [note for client in range(4) for note in client_state(result, client)["surroundings"]["notes"]]
    assert {tuple(note[1:]) for note in notes} == {(notes[0][1], True)}
    assert len(set(committed(result).plugins["surroundings"]["notes"])) == 1


class FreezeEven(Plugin):
    """Freezes the classifier in even rounds."""

    @hookimpl
    def begin_local(self, client):
        if client.round % 2 == 0:
            client.freeze(["classifier.*"])


def test_freeze_lasts_one_round_and_is_exact(go):
    start = support.run(go.args[0], FreezeEven, rounds=1, weight_decay=0.1)
    initial = committed(start).model
    two = weights(go(FreezeEven, rounds=2, weight_decay=0.1))
    reference = go((FreezeAlways, {}), rounds=2, weight_decay=0.1)
    assert torch.equal(initial["classifier.weight"], weights(reference)["classifier.weight"])
    assert not torch.equal(initial["encoder.base.fc1.weight"], two["encoder.base.fc1.weight"])
    assert not torch.equal(initial["classifier.weight"], two["classifier.weight"])


class FreezeAlways(Plugin):
    @hookimpl
    def begin_local(self, client):
        client.freeze(["classifier.*"])


class FreezeOdd(Plugin):
    stop = False

    @hookimpl
    def begin_round(self, server):
        if FreezeOdd.stop and server.round == 1:
            raise KeyboardInterrupt

    @hookimpl
    def begin_local(self, client):
        if client.round % 2 == 1:
            client.freeze(["classifier.*"])


def test_clipping_takes_no_notice_of_gradients_of_another_round(tmp_path, go):
    options = {"rounds": 2, "clip_norm": 0.01}
    plain = model_bytes(go(FreezeOdd, **options))
    FreezeOdd.stop = True
    try:
        with pytest.raises(Interrupted):
            go(FreezeOdd, out=tmp_path / "stopped", **options)
    finally:
        FreezeOdd.stop = False
    assert model_bytes(resume(tmp_path / "stopped", allow_code=True)) == plain


# --- the way up ------------------------------------------------------------------------------------------


class Halve(Plugin):
    """Sends half of what the client learned."""

    @hookimpl
    def begin_local(self, client):
        client.scratch["start"] = {name: tensor.clone() for name, tensor in client.model.state_dict().items()}

    @hookimpl
    def pre_upload(self, client, update):
        start = client.scratch["start"]
        return replace(update, model={name: start[name] + (w - start[name]) / 2 for name, w in update.model.items()})


def test_pre_upload_changes_what_goes_up(toy):
    assert weights(toy(Halve))[W].tolist() == [0.375 / 2, 2.25 / 2]
    assert weights(toy(Halve, (type("Again", (Halve,), {}), {})))[W].tolist() == [0.375 / 4, 2.25 / 4]


def test_previous_is_the_trained_model_before_pre_upload_and_end_local_edit_it(toy):
    class Editor(Halve):
        reads = ("previous",)

        @hookimpl
        def end_local(self, client):
            with torch.no_grad():
                client.model.encoder.base.w.fill_(9.0)

    result = toy(Editor)
    assert client_state(result, 0)["fedcore"][f"previous.{W}"].tolist() == [1.5, 0.0]
    assert weights(result)[W].tolist() == [4.5, 4.5], "what end_local wrote into the model goes up"


class Payload(Plugin):
    @hookimpl
    def end_local(self, client):
        return {"n": torch.tensor([float(client.n)]), "id": torch.tensor([client.id])}

    @hookimpl
    def accumulate(self, server, update):
        server.state["order"] = [*server.state.get("order", []), int(update.payload.pop("id"))]
        server.state["n"] = server.state.get("n", 0.0) + float(update.payload["n"])
        server.state["left"] = sorted(update.payload)


def test_accumulate_in_dispatch_order_with_its_own_payload(go):
    result = go(Payload)
    kept = committed(result).plugins["payload"]
    assert kept["n"] == 1437
    assert kept["left"] == ["n"]
    assert sorted(kept["order"]) == [0, 1, 2, 3]
    partition = resolve_partition(*resolve_config(RunDirectory(result.directory).read_config()))
    assert kept["order"] == sorted(range(4), key=lambda k: (-len(partition.train[k]), k))
    counted = lines(result)[0]["bytes"]["by_plugin"]["payload"]
    assert counted == {"down": 0, "up": 4 * (4 + 8)}


class PayloadKeeper(Plugin):
    """Sends a number up, doubles it in pre_upload and adds one in pre_aggregate."""

    @hookimpl
    def end_local(self, client):
        return {"n": torch.tensor([1.0])}

    @hookimpl
    def pre_upload(self, update):
        return replace(update, payload={"n": update.payload["n"] * 2})

    @hookimpl
    def pre_aggregate(self, update):
        return replace(update, payload={"n": update.payload["n"] + 1})

    @hookimpl
    def accumulate(self, server, update):
        server.state["n"] = float(update.payload["n"])


def test_payload_through_pre_upload_and_pre_aggregate(toy):
    assert committed(toy(PayloadKeeper)).plugins["payloadkeeper"]["n"] == 3.0


class Inspecting(Plugin):
    """Looks at the update on both sides and leaves it as it is."""

    @hookimpl
    def end_local(self, client):
        return {"n": torch.tensor([1.0])}

    @hookimpl
    def pre_upload(self, update):
        return None

    @hookimpl
    def pre_aggregate(self, update):
        return None

    @hookimpl
    def accumulate(self, server, update):
        server.state["seen"] = sorted(update.payload)


def test_pre_upload_that_only_looks(toy):
    plain = toy()
    result = toy(Inspecting)
    assert_equal(weights(result), weights(plain))
    assert committed(result).plugins["inspecting"]["seen"] == ["n"]


class OthersPayload(Plugin):
    @hookimpl
    def pre_aggregate(self, update):
        return replace(update, payload={})

    @hookimpl
    def accumulate(self, server, update):
        server.state["seen"] = sorted(update.payload)


def test_a_plugin_cannot_touch_anothers_payload(toy):
    kept = committed(toy(OthersPayload, Payload)).plugins
    assert kept["otherspayload"]["seen"] == []
    assert kept["payload"]["n"] == 4.0


# --- on the server ---------------------------------------------------------------------------------------


class Choose(Plugin):
    @hookimpl
    def select_clients(self, server):
        return [0, 1, 3]


class Refuse(Plugin):
    @hookimpl
    def pre_aggregate(self, server, update):
        if update.client == 2:
            raise RejectUpdate("too odd")


class Traces(Plugin):
    """Leaves a trace of every update it sees wherever it can."""

    reads = ("previous",)

    @hookimpl
    def begin_local(self, client):
        client.state["rounds"] = client.state.get("rounds", 0) + 1

    @hookimpl
    def accumulate(self, server, update):
        server.state[str(update.client)] = server.state.get(str(update.client), 0) + 1


def test_a_rejected_update_leaves_no_trace(go):
    without, result = go(Choose, Traces, rounds=2), go(Refuse, Traces, rounds=2)
    assert model_bytes(result) == model_bytes(without)
    assert committed(result).plugins == committed(without).plugins
    assert 2 not in committed(result).manifest
    assert client_state(result, 2) == {}
    for record, other in zip(lines(result), lines(without)):
        assert record["failures"] == [{"client": 2, "kind": "rejected", "message": "too odd"}]
        assert record["accepted"] == 3
        assert record["losses"] == other["losses"]
        assert record["cohort"] == [0, 1, 2, 3]


def test_a_client_rejected_once_starts_from_its_last_accepted_state(go):
    class RefuseOnce(Plugin):
        @hookimpl
        def pre_aggregate(self, server, update):
            if update.client == 2 and server.round == 1:
                raise RejectUpdate("not now")

    kept = client_state(go(RefuseOnce, Traces, rounds=3), 2)["traces"]
    assert kept == {"rounds": 2}


class Counting(Plugin):
    @hookimpl
    def pre_aggregate(self, server, update):
        server.state["seen"] = server.state.get("seen", 0) + 1


def test_what_pre_aggregate_wrote_about_a_rejected_update_is_gone_too(go):
    assert committed(go(Counting, Refuse)).plugins["counting"]["seen"] == 3


class LateRefusal(Plugin):
    @hookimpl
    def accumulate(self, server, update):
        if update.client == 2:
            raise RejectUpdate("too late")


def test_a_rejection_after_the_fold_is_no_half_accepted_update(go):
    try:
        late = model_bytes(go(LateRefusal))
    except FedcoreError as error:
        assert "laterefusal" in str(error)  # noqa: PT017 - either is right
    else:
        assert late == model_bytes(go(Choose))


class Replace(Plugin):
    @hookimpl
    def pre_aggregate(self, server, update):
        return replace(update, model={**update.model, W: server.model[W] + update.client})


def test_pre_aggregate_replaces(toy):
    assert weights(toy(Replace))[W].tolist() == [0.75, 0.75]


@pytest.mark.parametrize("fault", ["nan", "missing", "client", "samples"])
def test_a_replaced_update_is_checked_again(toy, fault):
    class Damage(Plugin):
        @hookimpl
        def pre_aggregate(self, server, update):
            if update.client == 1:
                return {
                    "nan": replace(update, model={W: torch.tensor([torch.nan, 0.0])}),
                    "missing": replace(update, model={}),
                    "client": replace(update, client=0),
                    "samples": replace(update, samples=0),
                }[fault]
            return None

    result = toy(Damage)
    kind = "diverged" if fault == "nan" else "rejected"
    assert [(f["client"], f["kind"]) for f in lines(result)[0]["failures"]] == [(1, kind)]
    assert weights(result)[W].tolist() == [1.5, 0.0]


def test_weight(toy):
    class Weigh(Plugin):
        @hookimpl
        def weight(self, update):
            return {0: 3.0, 1: None}[update.client]  # None: the default, its three samples

    assert weights(toy(Weigh))[W].tolist() == [0.75, 1.5]


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_rejects_that_update(toy, bad):
    class Weigh(Plugin):
        @hookimpl
        def weight(self, update):
            return bad if update.client == 1 else 1.0

    result = toy(Weigh)
    assert weights(result)[W].tolist() == [1.5, 0.0]
    assert [failure["client"] for failure in lines(result)[0]["failures"]] == [1]


def test_weights_that_are_all_zero_stop_the_run(toy):
    class Weigh(Plugin):
        @hookimpl
        def weight(self):
            return 0.0

    with pytest.raises(RoundFailedError, match="weights of all accepted updates are 0"):
        toy(Weigh)


class OwnClassifier(Plugin):
    owns = ("classifier.*",)

    @hookimpl
    def aggregate(self, server, updates):
        assert all(sorted(update.model) == ["classifier.bias", "classifier.weight"] for update in updates)
        assert [update.client for update in updates] == list(server.accepted)
        return {"classifier.bias": sum(update.model["classifier.bias"] for update in updates)}


def test_aggregate_fills_a_part_and_the_mean_the_rest(go):
    plain, result = weights(go()), weights(go(OwnClassifier))
    different = [name for name in plain if not torch.equal(plain[name], result[name])]
    assert different == ["classifier.bias"]


class OwnMean(Plugin):
    """The core's mean, asked for: of all updates, or of two of them."""

    owns = ("*",)
    clients = (0, 1, 2, 3)

    @hookimpl
    def aggregate(self, server, updates):
        assert server.mean_of([]) == {}
        return server.mean_of([update for update in updates if update.client in self.clients])


class TwoClients(OwnMean):
    clients = (1, 3)


class Squared(Plugin):
    """Another weight than samples; 0 for some clients."""

    without = ()

    @hookimpl
    def weight(self, update):
        return 0.0 if update.client in self.without else float(update.samples) ** 2


class WithoutOthers(Squared):
    without = (0, 2)


def test_the_mean_of_all_updates_is_the_cores_bit_by_bit(go):
    assert model_bytes(go(OwnMean, Squared, **BATCH_NORM)) == model_bytes(go(Squared, **BATCH_NORM))


def test_the_mean_of_some_updates_has_the_cores_weights(go):
    some, core = weights(go(TwoClients, Squared, rounds=1)), weights(go(WithoutOthers, rounds=1))
    assert_equal(some, core)


def test_the_mean_of_updates_without_a_weight_is_empty(go):
    """Then this plugin returns nothing, and the core's mean stays."""

    class Nobody(OwnMean):
        clients = (0, 2)

    assert model_bytes(go(Nobody, WithoutOthers)) == model_bytes(go(WithoutOthers))


def test_mean_of_is_for_aggregate_only(go):
    class Early(Plugin):
        @hookimpl
        def begin_round(self, server):
            server.mean_of([])

    with pytest.raises(PluginContractError, match=r"'early' calls server.mean_of, which works in aggregate only"):
        go(Early)


class OwnEncoder(Plugin):
    owns = ("encoder.*",)

    @hookimpl
    def aggregate(self, updates):
        return {}


def test_owned_names_that_stay_on_the_clients(go):
    assert model_bytes(go(OwnEncoder, buffers="local", **BATCH_NORM)) == model_bytes(go(buffers="local", **BATCH_NORM))


class Identity(Plugin):
    @hookimpl
    def server_step(self, server, mean):
        assert all(server.model[name].shape == tensor.shape for name, tensor in mean.items())
        assert all(tensor.is_floating_point() for tensor in mean.values())
        return mean


def test_the_identity_as_server_step_is_fedavg_bit_by_bit(go):
    assert model_bytes(go(Identity, rounds=2, **BATCH_NORM)) == model_bytes(go(rounds=2, **BATCH_NORM))


class NextModel(Plugin):
    """Puts the next model together in server_step."""

    made: dict = {}

    @hookimpl
    def begin_round(self, server):
        assert server.buffers == {}

    @hookimpl
    def accumulate(self, server):
        assert server.buffers == {}

    @hookimpl
    def server_step(self, server, mean):
        NextModel.made = server.network({**mean, **server.buffers}).state_dict()


def test_the_mean_and_the_averaged_buffers_are_the_next_model(go):
    result = go(NextModel, rounds=2, **BATCH_NORM)
    assert_equal(NextModel.made, weights(result))
    assert any("running" in name for name in NextModel.made)


class Double(Plugin):
    @hookimpl
    def server_step(self, server, mean):
        return {W: mean[W] * 2}


class PlusOne(Plugin):
    @hookimpl
    def server_step(self, server, mean):
        return {W: mean[W] + 1}


def test_server_steps_build_on_each_other_in_user_order(toy):
    assert weights(toy(Double, PlusOne))[W].tolist() == [1.75, 5.5]
    assert weights(toy(PlusOne, Double))[W].tolist() == [2.75, 6.5]


def test_server_step_starts_from_the_current_model(toy):
    class Stay(Plugin):
        server_optimizer = True

        @hookimpl
        def server_step(self, server, mean):
            return {name: server.model[name] for name in mean}

    assert weights(toy(Stay, rounds=2))[W].tolist() == [0.0, 0.0]


# --- broadcast, ask, state -------------------------------------------------------------------------------


class Sender(Plugin):
    value = 1.0

    @hookimpl
    def begin_round(self, server):
        total = 0.0
        for answer in server.ask("n", clients="all"):
            total += float(answer.tensors["n"])
        server.state["total"] = torch.tensor([total])

    @hookimpl
    def answer(self, client, question):
        assert question == "n"
        return {"n": torch.tensor([client.n * self.value])}

    @hookimpl
    def broadcast(self, server):
        return {"x": server.state["total"]}

    @hookimpl
    def begin_local(self, client):
        client.state["got"] = client.received["x"]
        client.state["names"] = sorted(client.received)


class OtherSender(Sender):
    value = 10.0


def test_ask_state_broadcast_and_received_have_their_own_namespaces(toy):
    result = toy(Sender, OtherSender, rounds=2)
    for client in (0, 1):
        kept = client_state(result, client)
        assert kept["sender"]["got"].tolist() == [4.0]
        assert kept["othersender"]["got"].tolist() == [40.0]
        assert kept["sender"]["names"] == ["x"]
    counted = lines(result)[0]["bytes"]["by_plugin"]
    assert counted["sender"] == counted["othersender"] == {"down": 2 * 4, "up": 2 * 4}
    assert counted["model"] == {"down": 8 * (2 + 2 + 2), "up": 8 * 2}


def test_ask_for_some(toy):
    class Asker(Plugin):
        @hookimpl
        def begin_round(self, server):
            server.state["some"] = [answer.client for answer in server.ask("q", clients=[1, 0, 1])]
            server.state["cohort"] = [answer.client for answer in server.ask("q", clients="cohort")]

        @hookimpl
        def answer(self):
            return None

    result = toy(Asker, participation=0.5)
    kept = committed(result).plugins["asker"]
    assert kept["some"] == [0, 1]
    assert kept["cohort"] == lines(result)[0]["cohort"]


def test_state_of_a_client_lasts_and_is_the_clients_own(go):
    class Diary(Plugin):
        @hookimpl
        def begin_local(self, client):
            client.state["rounds"] = [*client.state.get("rounds", []), client.round]
            client.state["sum"] = client.state.get("sum", torch.zeros(1)) + client.id
            client.scratch.setdefault("fresh", []).append(1)
            assert client.scratch["fresh"] == [1], "scratch lasts one round"

    result = go(Diary, rounds=3, participation=0.5)
    cohorts = [record["cohort"] for record in lines(result)]
    for client in range(4):
        rounds = [number for number, cohort in enumerate(cohorts) if client in cohort]
        kept = client_state(result, client).get("diary", {"rounds": [], "sum": torch.zeros(1)})
        assert kept["rounds"] == rounds
        assert kept["sum"].item() == client * len(rounds)
    assert len({tuple(cohort) for cohort in cohorts}) > 1


# --- evaluation and the end ------------------------------------------------------------------------------


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


class Retrain(Plugin):
    corrects = ("classifier.*",)

    @hookimpl
    def post_train(self, server):
        features = torch.eye(10, 64).repeat(5, 1)
        labels = torch.arange(10).repeat(5)
        server.retrain_classifier(features, labels, epochs=30, lr=0.5, batch_size=16)


def test_retrain_classifier(go):
    plain, result, again = go(), go(Retrain), go(Retrain)
    before, after = weights(plain), weights(result)
    different = [name for name in before if not torch.equal(before[name], after[name])]
    assert sorted(different) == ["classifier.bias", "classifier.weight"]
    assert model_bytes(again) == model_bytes(result)
    assert result.metrics["global_before_correction"] == plain.metrics["global"]
    assert result.metrics["global"] != plain.metrics["global"]
    logits = torch.eye(10, 64) @ after["classifier.weight"].T + after["classifier.bias"]
    assert logits.argmax(1).tolist() == list(range(10))


def test_post_train_that_changes_nothing_reports_no_correction(go):
    class Idle(Plugin):
        @hookimpl
        def post_train(self, server):
            server.state["done"] = True

    result = go(Idle)
    assert "global_before_correction" not in result.metrics
    assert committed(result).plugins["idle"] == {"done": True}
    assert committed(result).phase == "done"


def test_post_train_asks_with_the_final_model(toy):
    class Final(Plugin):
        @hookimpl
        def post_train(self, server):
            for answer in server.ask("w", clients="all"):
                server.state[str(answer.client)] = answer.tensors["w"]

        @hookimpl
        def answer(self, client):
            return {"w": client.model.state_dict()[W].clone()}

    result = toy(Final, rounds=2)
    kept = committed(result).plugins["final"]
    assert kept["0"].tolist() == kept["1"].tolist() == weights(result)[W].tolist()


# --- frozen models ---------------------------------------------------------------------------------------

SEEN: dict[str, list] = {}


class Frozen(Plugin):
    reads = ("global", "previous")

    @hookimpl
    def begin_local(self, client):
        client.scratch["global"] = client.forward()[:2]
        previous = client.previous_model
        client.scratch["previous"] = None if previous is None else client.forward(model=previous)[:2]
        client.scratch["model"] = {name: tensor.clone() for name, tensor in client.model.state_dict().items()}

    @hookimpl
    def local_loss(self, step):
        for name in ("global", "previous"):
            expected, found = step.client.scratch[name], step.frozen(name)
            SEEN.setdefault(name, []).append(found is not None)
            assert (expected is None) == (found is None)
            if found is not None:
                torch.testing.assert_close(found.features, expected[0][step.indices], rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(found.logits, expected[1][step.indices], rtol=1e-5, atol=1e-5)
                assert not found.features.requires_grad
                assert step.frozen(name) is found, "computed once per batch, whoever asks"
        assert not step.global_model.training
        assert not any(parameter.requires_grad for parameter in step.global_model.parameters())
        assert_equal(dict(step.global_model.state_dict()), step.client.scratch["model"])

    @hookimpl
    def end_local(self, client):
        trained = {name: tensor.clone() for name, tensor in client.model.state_dict().items()}
        if client.previous_model is not None:
            kept = {name: client.state[name] for name in trained}
            assert_equal(dict(client.previous_model.state_dict()), kept)
        for name, tensor in trained.items():
            client.state[name] = tensor


@pytest.mark.parametrize("model", [DROPOUT, BATCH_NORM], ids=["dropout", "batch norm"])
def test_frozen_outputs_are_those_of_a_plain_forward(go, model):
    SEEN.clear()
    options = {**model, "rounds": 3, "participation": 0.5, "local_epochs": 2}
    result = go(Frozen, **options)
    assert all(record["failures"] == [] for record in lines(result))
    assert all(SEEN["global"])
    assert {True, False} == set(SEEN["previous"]), "None on the first participation, the model afterwards"
    assert model_bytes(result) == model_bytes(go(**options)), "looking changes nothing"


class CountForwards(Plugin):
    reads = ("global", "previous")
    samples = 0

    @hookimpl
    def local_loss(self, step):
        if step.round == 0 and not hasattr(step.global_model, "_counted"):
            step.global_model._counted = True
            step.global_model.encoder.register_forward_pre_hook(self._count)
        step.frozen("global")
        step.frozen("global")

    @staticmethod
    def _count(module, inputs):
        CountForwards.samples += len(inputs[0])


def test_frozen_outputs_are_computed_once_per_sample_and_round(go):
    CountForwards.samples = 0
    go(CountForwards, local_epochs=3, rounds=2)
    assert CountForwards.samples == 2 * 1437
