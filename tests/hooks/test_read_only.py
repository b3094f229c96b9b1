"""What hooks are given is read-only: setting an attribute or editing a shared tensor is refused, not lost or kept."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from fedcore import Loss, Plugin, hookimpl
from fedcore.base.errors import PluginContractError
from fedcore_testing import records
from tests.sentences import raises


def plugin(hook, body):
    return type("Pushy", (Plugin,), {hook: hookimpl(body), "reads": ("global",)})


def sets_the_input(self, step):
    step.x = step.x * 0


def sets_the_labels(self, step):
    step.y = step.y * 0


def sets_the_model(self, step):
    step.model = None


def sets_the_state(self, client):
    client.state = {"mean": torch.zeros(2)}


def keeps_a_list(self, client):
    client.state["seen"] = [torch.zeros(2)]


def sets_the_rate(self, server):
    server.lr = 0.1


def sets_the_model_on_the_server(self, server):
    server.model = {}


@pytest.mark.parametrize(
    ("hook", "body", "named"),
    [
        ("local_loss", sets_the_input, ("step.x",)),
        ("observe", sets_the_labels, ("step.y",)),
        ("local_loss", sets_the_model, ("step.model",)),
        ("begin_local", sets_the_state, ("client.state", "'name'")),
        ("end_local", keeps_a_list, ("'seen'",)),
        ("begin_round", sets_the_rate, ("server.lr", "server.state", "'name'")),
        ("server_step", sets_the_model_on_the_server, ("server.model",)),
    ],
)
def test_an_attribute_cannot_be_set(toy, hook, body, named):
    with raises(PluginContractError, "'pushy'", hook, "1", *named):
        toy(plugin(hook, body))


@pytest.mark.parametrize("hook", ["begin_round", "server_step", "end_round", "post_train"])
def test_the_server_s_model_takes_no_other_tensor(toy, hook):
    def sets_a_tensor(self, server):
        server.model["encoder.w"] = torch.zeros(2)

    with raises(PluginContractError, "'pushy'", hook):
        toy(plugin(hook, sets_a_tensor))


def test_the_server_s_model_is_copied_as_a_dict(toy):
    def copies(self, server):
        own = copy.deepcopy(server.model)
        own["extra"] = torch.ones(1)
        torch.save(server.model, io.BytesIO())
        assert type(own) is dict
        assert "extra" not in server.model

    toy(plugin("end_round", copies))


def test_the_server_s_lists_of_clients_are_copies(toy):
    def drops_clients(self, server):
        server.cohort.clear()
        server.accepted.clear()

    for hook in ("begin_round", "end_round"):
        (record,) = records(toy(plugin(hook, drops_clients)))
        assert (record["cohort"], record["accepted"]) == ([0, 1], 2)


def flips_the_labels(self, step):
    step.y.zero_()


def scales_the_logits(self, step):
    with torch.no_grad():
        step.logits.mul_(2)


def sharpens_the_received_model(self, step):
    logits = step.frozen("global").logits
    logits /= 0.5


def halves_the_model(self, client):
    for parameter in client.parameters.values():
        parameter.detach().mul_(0.5)


@pytest.mark.parametrize(
    ("hook", "body", "named"),
    [
        ("task_loss", flips_the_labels, ("step.y", "step.y.clone")),
        ("local_loss", scales_the_logits, ("step.logits",)),
        ("local_loss", sharpens_the_received_model, ("step.frozen('global').logits",)),
        ("begin_local", halves_the_model, ("client.model",)),
    ],
)
def test_a_shared_tensor_cannot_be_edited(go, hook, body, named):
    """The first plugin that edits is named, not the one that is called after it."""
    with raises(PluginContractError, "'pushy'", hook, "1", *named):
        go(plugin(hook, body), ("moon", {}))


def moves_the_model(self, client):
    for parameter in client.model.parameters():
        parameter.data = parameter.data.clone()


def moves_it_in_a_step(self, step):
    moves_the_model(self, step.client)


@pytest.mark.parametrize(
    ("hook", "body"),
    [("begin_local", moves_the_model), ("observe", moves_it_in_a_step), ("personal_model", moves_the_model)],
)
def test_other_memory_for_the_model_is_refused(go, hook, body):
    """As PFLlib's clients take weights: this client and those after it trained what was neither loaded nor sent."""
    with raises(PluginContractError, "client.model"):
        go(plugin(hook, body), client_test_fraction=0.2)


class EditsItsOwn(Plugin):
    @hookimpl
    def local_loss(self, step):
        scale = step.features.exp()
        value = scale.square().mean()
        scale += 1
        return Loss(value)


class KeepsTheGraph(Plugin):
    """A running mean of the features, without ``detach``."""

    @hookimpl
    def local_loss(self, step):
        notes, mean = step.client.scratch, step.features.mean(dim=0)
        notes["mean"] = mean + notes.get("mean", 0)
        return Loss(notes["mean"].square().sum())


@pytest.mark.parametrize(
    ("cls", "remedy"),
    [(EditsItsOwn, "Hint: clone"), (KeepsTheGraph, "= mean.detach()")],
)
def test_autograds_error_is_told_with_the_hook_and_the_remedy(go, cls, remedy):
    with raises(PluginContractError, f"'{cls.__name__.lower()}'", "local_loss", remedy):
        go(cls)
