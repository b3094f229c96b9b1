"""``--local-steps``: exactly K optimizer steps for every client, over reshuffled passes; what it is refused beside."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedcore import Exchange, Plugin, PluginOptions, RunConfig, hookimpl
from fedcore.base.errors import ConfigError
from fedcore.client.working_model import FrozenModel
from fedcore_testing import committed, federate, interrupted, model_bytes, records, weights
from fedcore_testing.problems import one_sample, with_batch_norm
from tests.sentences import check, raises

UNEQUAL = {"clients": 6, "alpha": 0.1, "batch_size": 32, "rounds": 2, "eval_every": 99}
EQUAL = {"partition": "iid", "clients": 3, "batch_size": 64, "rounds": 2, "eval_every": 99}
"""Three clients of 479 samples: eight mini-batches a pass."""


class Notes(Plugin):
    """Keeps what each update says, and the samples of every step in training order."""

    @hookimpl
    def observe(self, step):
        note = torch.full((64,), -1, dtype=torch.int64)
        note[0], note[1 : 1 + len(step.y)] = step.epoch, step.indices
        notes = step.client.scratch.setdefault("notes", [])
        notes.append(note)

    @hookimpl
    def end_local(self, client):
        return {"notes": torch.stack(client.scratch["notes"])}

    @hookimpl
    def accumulate(self, server, update):
        server.state[f"steps/{server.round}/{update.client}"] = update.steps
        server.state[f"n/{server.round}/{update.client}"] = update.samples
        server.state[f"notes/{server.round}/{update.client}"] = update.payload.pop("notes")


def noted(result, kind):
    (state,) = [state for state in committed(result).plugins.values() if any(n.startswith("steps/") for n in state)]
    return {name.partition("/")[2]: value for name, value in state.items() if name.startswith(f"{kind}/")}


# --- how many, and which -------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 7, 40])
def test_every_client_takes_exactly_k_steps_whatever_its_size(tmp_path, steps):
    result = federate(tmp_path, Notes, **UNEQUAL, local_steps=steps)
    sizes = set(noted(result, "n").values())
    assert min(sizes) < 7 * 32 < max(sizes), "7 steps are several passes of one and part of one of another"
    assert set(noted(result, "steps").values()) == {steps}
    assert {len(notes) for notes in noted(result, "notes").values()} == {steps}


def test_the_batches_are_those_of_epochs_cut_off_after_k_steps(tmp_path):
    one = {**UNEQUAL, "rounds": 1}
    epochs = noted(federate(tmp_path, Notes, **one, local_epochs=5), "notes")
    steps = noted(federate(tmp_path, Notes, **one, local_steps=20), "notes")
    assert len(epochs) == 6
    for client, notes in steps.items():
        assert torch.equal(notes, epochs[client][:20]), "same order in each pass, same passes"
    assert {int(notes[-1, 0]) for notes in steps.values()} == {2, 3}, "the small ones are in a later pass by then"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("method", ["fedavg", "moon", "scaffold", "fednova"])
def test_as_many_steps_as_epochs_have_are_these_epochs_to_the_bit(tmp_path, method):
    epochs, steps = (federate(tmp_path, method, **EQUAL, **work) for work in ({"local_epochs": 2}, {"local_steps": 16}))
    assert model_bytes(epochs) == model_bytes(steps)
    assert records(epochs) == records(steps)


def test_a_client_of_one_sample_takes_them_too(tmp_path):
    result = federate(tmp_path, Notes, clients=4, partition=one_sample, rounds=1, local_steps=5)
    assert noted(result, "n")["0/0"] == 1
    assert set(noted(result, "steps").values()) == {5}
    assert noted(result, "notes")["0/0"][:, 0].tolist() == [0, 1, 2, 3, 4]


def first_has_one_left_over(labels, num_clients, **_):
    """33 samples and the rest: with batches of 16 the third batch of the first client has one."""
    return [range(33), range(33, len(labels))]


def test_batches_that_batch_norm_skips_do_not_count(tmp_path):
    options = {"clients": 2, "model": with_batch_norm, "batch_size": 16, "rounds": 1, "local_steps": 5}
    result = federate(tmp_path, Notes, partition=first_has_one_left_over, **options)
    assert set(noted(result, "steps").values()) == {5}
    assert noted(result, "notes")["0/0"][:, 0].tolist() == [0, 0, 1, 1, 2]
    for batch_size in (1, 16):  # the single sample, and every batch of size 1
        options |= {"clients": 4, "batch_size": batch_size, "local_steps": 10**9 if batch_size == 1 else 5}
        result = federate(tmp_path, partition=one_sample, **options, min_clients=0)
        failures = {f["client"]: f["kind"] for f in records(result)[0]["failures"]}
        assert failures == dict.fromkeys(range(4) if batch_size == 1 else [0], "no_steps")


class FreezesTheBase(Plugin):
    @hookimpl
    def configure_model(self, model):
        model.encoder.requires_grad_(False)


def test_a_frozen_batch_norm_needs_no_second_sample(tmp_path):
    options = {"clients": 4, "model": with_batch_norm, "batch_size": 16, "rounds": 1, "partition": one_sample}
    result = federate(tmp_path, FreezesTheBase, Notes, **options)
    assert records(result)[0]["failures"] == []
    assert noted(result, "steps")["0/0"] == 1


def test_the_last_batch_of_an_epoch_is_left_out_unless_it_is_the_only_one(tmp_path):
    options = {"clients": 4, "partition": one_sample, "batch_size": 16, "rounds": 1, "local_epochs": 2}
    kept_all, dropped = (federate(tmp_path, Notes, **options, drop_last=drop) for drop in (False, True))
    sizes, notes = noted(kept_all, "n"), noted(kept_all, "notes")
    assert sizes["0/0"] == 1
    assert any(size % 16 for size in sizes.values() if size > 16)
    for client, size in sizes.items():
        assert noted(dropped, "steps")[client] == 2 * max(1, size // 16)
        in_batch = (notes[client][:, 1:] >= 0).sum(1)
        kept = notes[client][in_batch == min(size, 16)]
        assert torch.equal(noted(dropped, "notes")[client], kept), "the same batches, without the small ones"


# --- the same bits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["moon", "scaffold"])
def test_a_resumed_run_has_the_same_bits(tmp_path, method):
    options = {**UNEQUAL, "rounds": 3, "participation": 0.5, "local_steps": 9}
    resumed = interrupted(tmp_path, method, after=1, **options)
    assert model_bytes(resumed) == model_bytes(federate(tmp_path, method, **options))


@pytest.mark.slow
def test_worker_processes_give_the_same_bits(tmp_path):
    one, two = (federate(tmp_path, "moon", **UNEQUAL, local_steps=9, workers=workers) for workers in (1, 2))
    assert model_bytes(one) == model_bytes(two)


# --- frozen models -------------------------------------------------------------------------------------------


def test_a_frozen_model_does_not_read_samples_that_no_step_asks_for(tmp_path, monkeypatch):
    read = []
    cached = FrozenModel.cached_outputs
    monkeypatch.setattr(
        FrozenModel,
        "cached_outputs",
        lambda self, positions, data: read.append(len(data)) or cached(self, positions, data),
    )
    few = federate(tmp_path, "moon", **UNEQUAL, local_steps=6)
    assert read
    assert max(read) <= 6 * 32, "clients whose steps cover all of their samples, in one pass each"
    monkeypatch.setattr("fedcore.client.context.Batch.frozen", everything_cached)
    for name, tensor in weights(federate(tmp_path, "moon", **UNEQUAL, local_steps=6)).items():
        torch.testing.assert_close(tensor, weights(few)[name])


def everything_cached(batch, name):
    model = batch.session.working.frozen[name]
    return model.cached_outputs(batch.picked.positions, batch.session.data) if model.present else None


# --- the simulated system ------------------------------------------------------------------------------------


def simulator(**system):
    config = RunConfig(clients=200, local_steps=10, batch_size=16, seed=3, system=system)
    return config.simulated(lambda client: client + 1)


def test_stragglers_complete_fewer_steps_in_the_same_time():
    simulated = [simulator(stragglers=0.5).simulated(0, c) for c in range(200)]
    assert {simulated.completed for simulated in simulated} == set(range(1, 11))
    assert all(simulated.seconds == pytest.approx(10) for simulated in simulated), (
        "a step takes a second, whatever the client's size"
    )


def test_a_deadline_cuts_steps():
    simulated = simulator(deadline=7.5).simulated(0, 199)
    assert (simulated.completed, simulated.seconds, simulated.failure) == (7, 7.0, None)
    simulated = simulator(deadline=7.5, partial="drop").simulated(0, 0)
    assert simulated.failure == ("deadline", "completed 7 of 10 local steps; partial work is dropped")
    assert "no local step within" in simulator(deadline=0.5).simulated(0, 0).failure[1]


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_three_of_five_steps_are_what_three_steps_are(tmp_path, method):
    whole = federate(tmp_path, method, **UNEQUAL, local_steps=3)
    cut = federate(tmp_path, method, **UNEQUAL, local_steps=5, system={"deadline": 3.0})
    assert model_bytes(cut) == model_bytes(whole)
    assert records(cut)[0]["system"]["partial"] == {str(client): 3 for client in range(6)}


# --- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, -1, 2.5, "many"])
def test_it_is_a_count(steps):
    with raises(ConfigError, "--local-steps"):
        RunConfig.create({"local_steps": steps})


def test_one_step_has_no_stragglers():
    with raises(ConfigError, "--local-steps", "2"):
        RunConfig.create({"local_steps": 1, "system": {"stragglers": 0.5}})
    RunConfig.create({"local_steps": 2, "local_epochs": 1, "system": {"stragglers": 0.5}})


class PausesOptions(PluginOptions):
    """At which epochs."""

    epochs: list[int] = []


class Pauses(Plugin):
    Options = PausesOptions

    def __init__(self, options):
        super().__init__(options)
        self.exchanges = Exchange(("classifier.*",), lambda epochs: options.epochs)

    @hookimpl
    def mid_local_epoch(self):
        return {}


def test_a_pause_amid_the_epochs_is_refused(tmp_path):
    with raises(ConfigError, "'pauses'", "--local-steps"):
        federate(tmp_path, (Pauses, {"epochs": [1]}), local_steps=5)
    federate(tmp_path, (Pauses, {"epochs": []}), local_steps=5, rounds=1)


class TooMany(Plugin):
    """Client 0 claims a step more than was asked for."""

    @hookimpl
    def pre_upload(self, client, update):
        return replace(update, steps=update.steps + (client.id == 0))


def test_a_client_that_claims_more_steps_is_rejected(tmp_path):
    failures = records(federate(tmp_path, TooMany, **UNEQUAL, local_steps=5))[0]["failures"]
    assert [(f["client"], f["kind"]) for f in failures] == [(0, "rejected")]
    check(failures[0]["message"], "client 0", 6, 5)
