"""Parameters sent in another form: what each side sees, what it costs, what is refused; and the model on the server."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedcore import Plugin, PluginConflictError, PluginContractError, hookimpl
from fedcore_testing import client_state, interrupted
from tests.sentences import raises
from tests.support import committed, lines, model_bytes

SEEN = []


class Halves(Plugin):
    """Sends the classifier as 16-bit numbers, and keeps what they lost for the next round."""

    encodes = ("classifier.*",)

    @hookimpl
    def pre_upload(self, client, update):
        payload, model = {}, dict(update.model)
        for name in ("classifier.weight", "classifier.bias"):
            wanted = model.pop(name) + client.state.get(name, 0)
            payload[name] = wanted.half()
            client.state[name] = wanted - payload[name].float()
        return replace(update, model=model, payload=payload)

    @hookimpl
    def pre_aggregate(self, update):
        decoded = {name: tensor.float() for name, tensor in update.payload.items()}
        return replace(update, model={**update.model, **decoded}, payload={})


class Looks(Plugin):
    """Stands before the encoder: sees the update before it on the client, behind it on the server."""

    @hookimpl
    def pre_upload(self, update):
        assert "classifier.weight" in update.model

    @hookimpl
    def pre_aggregate(self, update):
        SEEN.append(sorted(update.model))
        assert update.model["classifier.weight"].dtype == torch.float32


def test_others_see_whole_models_and_the_ledger_what_was_sent(go):
    SEEN.clear()
    result = go(Looks, Halves, "median", clients=3, rounds=2)
    whole = go("median", clients=3, rounds=2)
    assert len(SEEN) == 6
    assert all("classifier.weight" in names for names in SEEN)
    up = lines(result)[0]["bytes"]["by_plugin"]
    classifier = client_state(result, 0)["halves"]["classifier.weight"].numel() + 10
    assert up["model"]["up"] == lines(whole)[0]["bytes"]["up"] - 3 * 4 * classifier
    assert up["halves"]["up"] == 3 * 2 * classifier
    assert lines(result)[0]["failures"] == []


def test_memory_commits_with_an_accepted_update_only(go):
    class RejectsClient1(Plugin):
        @hookimpl
        def pre_aggregate(self, server, update):
            if update.client == 1 and server.round == 1:
                raise ValueError("no")

    result, first = go(Halves, RejectsClient1, clients=3, rounds=2), go(Halves, clients=3, rounds=1)
    kept, before = (client_state(run, 1)["halves"]["classifier.weight"] for run in (result, first))
    assert torch.equal(kept, before)
    assert not torch.equal(
        client_state(result, 0)["halves"]["classifier.weight"], client_state(first, 0)["halves"]["classifier.weight"]
    )


def test_a_stopped_run_goes_on_to_the_same_bits(go, tmp_path):
    options = {"clients": 3, "rounds": 3, "samples": 300}
    assert model_bytes(go(Halves, **options)) == model_bytes(interrupted(tmp_path, Halves, after=1, **options))


def test_conflicts(go):
    class Both(Halves):
        encodes = ("*",)

    with raises(PluginConflictError):
        go(Halves, Both)
    with raises(PluginConflictError, "'halves'", "'local-dp'"):
        go(Halves, "local-dp")
    assert lines(go(Halves, ("dp", {"seed_noise": True}), clients=3))[0]["failures"] == []


def test_what_nobody_encodes_cannot_be_absent(go):
    class Drops(Halves):
        encodes = ("classifier.weight",)

    failures = lines(go(Drops, min_clients=0))[0]["failures"]
    assert {failure["message"].partition(": ")[2] for failure in failures} == {"'classifier.bias' is missing"}


# --- the model on the server -------------------------------------------------------------------------------------


class Measures(Plugin):
    """Compares the server's network with the client's own outputs."""

    @hookimpl
    def end_local(self, client):
        return {"logits": client.forward(torch.arange(4))[1], "inputs": client._session.data.inputs(torch.arange(4))}

    @hookimpl
    def accumulate(self, server, update):
        network = server.network(update.model)
        assert not network.training
        assert all(p.requires_grad for p in network.parameters())
        with torch.no_grad():
            logits = network(update.payload["inputs"])[1]
            other = server.network()(update.payload["inputs"])[1]
        server.state["same"] = torch.equal(logits, update.payload["logits"]) and not torch.equal(logits, other)
        with torch.no_grad():
            next(network.parameters()).fill_(0)
        assert server.network().classifier.weight.abs().sum() > 0


@pytest.mark.parametrize("model", ["mlp", "module:tests.toy.batch_norm_mlp"])
def test_a_network_of_given_weights_gives_the_clients_outputs(go, model):
    assert committed(go(Measures, model=model)).plugins["measures"]["same"] is True


@pytest.mark.parametrize(
    ("name", "named"),
    [("classifier.wait", "server.network"), ("classifier.weight", "server.net")],
)
def test_a_network_of_unknown_names_or_wrong_shapes(go, name, named):
    class Wrong(Plugin):
        @hookimpl
        def begin_round(self, server):
            server.network({name: torch.zeros(1)})

    with raises(PluginContractError, name, named):
        go(Wrong)
