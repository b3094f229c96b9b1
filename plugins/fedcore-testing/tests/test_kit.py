"""The conformance kit finds what is planted, each defect by a check of its name, and says what to do."""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pydantic import ConfigDict, Field, field_validator
from torch import nn

from fedcore import ClientUpdate, ConfigError, Loss, Plugin, PluginOptions, UnknownNameError, hookimpl, question
from fedcore.engines import ClientFailure, InProcessEngine
from fedcore_functional import proximal_term
from fedcore_testing import (
    CHECKS,
    CheckFailed,
    NotApplicable,
    check_plugin,
    name_of,
    parametrize_with_checks,
    run_checks,
)
from fedcore_testing.checks import runs
from fedcore_testing.trial import Trial
from tests.sentences import raises, refused


def broken(*parents, **contents):
    """Return a plugin class with these attributes; functions become hooks."""
    contents = {name: hookimpl(value) if callable(value) and not isinstance(value, type) else value
                for name, value in contents.items()}  # fmt: skip
    return type("Broken", (*parents, Plugin), contents)


# --- what the class says -----------------------------------------------------------------------------------------


class Unmarked(Plugin):
    def local_loss(self, step):
        return None


class Needy(PluginOptions):
    mu: float


class Lax(PluginOptions):
    model_config = ConfigDict(extra="ignore")


class AcceptsNan(PluginOptions):
    model_config = ConfigDict(allow_inf_nan=True)
    mu: float = 0.0


class Silent(PluginOptions):
    mu: float = Field(default=0.0, ge=0)


class Unbounded(PluginOptions):
    mu: float = Field(default=0.0, description="Strength.")


class Clamps(PluginOptions):
    """Makes what is out of bounds fit, where it should refuse it."""

    mu: float = Field(default=0.0, ge=0, description="Strength.")

    @field_validator("mu", mode="before")
    @classmethod
    def clamp(cls, value):
        return max(value, 0.0)


class Strength(PluginOptions):
    mu: float = Field(default=0.1, ge=0, description="Strength.")


class DrawsWhenMade(Plugin):
    def __init__(self, options):
        super().__init__(options)
        self.start = float(torch.rand(()))


def adds_a_layer_at_random(self, model):
    model.encoder.add_module("extra", nn.Linear(model.feature_dim, model.feature_dim))


# --- what a hook does --------------------------------------------------------------------------------------------


class CachesOnSelf(Plugin):
    def __init__(self, options):
        super().__init__(options)
        self.cache = {}

    @hookimpl
    def begin_local(self, client):
        self.cache[client.id] = client.model.classifier.weight.detach().clone()


class ConstantOnSelf(Plugin):
    def __init__(self, options):
        super().__init__(options)
        self.margin = torch.ones(10)

    @hookimpl
    def begin_local(self, client):
        client.scratch["margin"] = self.margin


class SharesAClassAttribute(Plugin):
    seen = {}

    @hookimpl
    def end_local(self, client):
        self.seen[client.id] = client.n


class SharesACache(Plugin):
    """The same list for a client in every run of the process."""

    @staticmethod
    @functools.lru_cache
    def seen(client):
        return []

    @hookimpl
    def local_loss(self, step):
        seen = self.seen(step.client.id)
        seen.append(step.x)
        return Loss(step.features.square().mean(), weight=0.001 * len(seen))


LOG = []


def logs_to_the_module(self, client):
    LOG.append(client.id)


def in_a_closure():
    notes = []

    def keeps(self, client):
        notes.append(client.id)

    return keeps


def edits_the_batch(self, step):
    step.x.mul_(0.99)


def edits_the_labels_unseen(self, step):
    step.y.data.copy_(step.y)
    step.y.data[0] = 0


def edits_the_weights(self, step):
    for parameter in step.parameters:
        parameter.data.mul_(0.99)


def moves_batch_norm(self, step):
    """A second forward pass in training mode renews BatchNorm's statistics."""
    step.model(step.x)


def edits_what_came_down(self, client):
    client.received["centre"].zero_()


def edits_the_global_model(self, server, mean):
    for name in mean:
        server.model[name].add_(1.0)


def edits_an_update(self, update):
    next(iter(update.model.values())).clamp_(-1, 1)


def renews_the_classifier(self, client):
    client.model.classifier = nn.Linear(client.model.feature_dim, client.num_classes)


def widens_the_classifier(self, client):
    client.model.classifier.weight = nn.Parameter(torch.zeros(12, client.model.feature_dim))


def stops_gradients(self, client):
    client.model.encoder.requires_grad_(False)


def forgets_training_mode(self, step):
    step.model.eval()


def looks_and_switches_back(self, step):
    step.model.eval()
    step.model.train()


def notes_too_late(self, client):
    client.scratch["previous"] = client.id


def notes_the_start_without_a_copy(self, client):
    client.scratch["start"] = client.model.state_dict()


def draws_from_torch(self, step):
    return Loss(step.logits.square().mean() * torch.rand(()))


def draws_from_numpy(self, server):
    server.state["order"] = np.random.permutation(3).tolist()


def detects_anomalies(self, client):
    torch.autograd.set_detect_anomaly(True)


def reads_a_value(self, step):
    return Loss(step.logits.square().mean() / (1 + step.logits.detach().mean().item() ** 2))


def branches(self, step):
    return Loss(step.logits.mean()) if step.logits.sum() > 0 else None


def picks_by_mask(self, step):
    return Loss(step.features[step.y == 3].sum())


def loads_other_weights(self, client):
    with torch.no_grad():
        client.model.classifier.weight.mul_(0.5)


def edits_the_gradients(self, gradients):
    next(iter(gradients.values())).mul_(0.5)


def branches_on_the_norm(self, gradients):
    return gradients if sum(g.square().sum() for g in gradients.values()) > 0 else None


def divides_by_the_norm_of_what_is_frozen(self, gradients):
    return {name: g / torch.zeros_like(g).norm() for name, g in gradients.items()}


def counts_in_a_term(self, step):
    batches = step.client.scratch.setdefault("batches", [])
    batches.append(len(step.y))
    return Loss(step.features.square().mean(), weight=0.01 * len(batches))


def gives_nan(self, step):
    return Loss((step.features * float("inf") * 0).mean())


def gives_a_vector(self, step):
    return Loss(step.features.mean(dim=1))


def gives_no_gradient(self, step):
    return Loss(step.features.detach().mean())


def sends_a_number(self, client):
    return {"n": client.n}


def sends_nan(self, client):
    return {"variance": torch.full((3,), float("nan"))}


def sends_inputs(self, client):
    return {"replay": client._session.data.inputs(torch.arange(4))}


class SpoilsAnAnswer(Plugin):
    @hookimpl
    def begin_round(self, server):
        list(server.ask("all", self.one))

    @question
    def one(self, client):
        return {"one": torch.ones(1)}

    @hookimpl
    def pre_answer(self, answer):
        return {"one": answer["one"] * torch.nan}


class AsksAndEdits(Plugin):
    @hookimpl
    def begin_round(self, server):
        list(server.ask("all", self.one))

    @question
    def one(self, client):
        loads_other_weights(self, client)
        return {"one": torch.ones(1)}


def counts_broadcasts(self, server):
    server.state["sent"] = server.state.get("sent", 0) + 1
    return {"sent": torch.tensor(server.state["sent"])}


def numbers_broadcasts_to_one_client(self, server, client):
    server.state["sent"] = server.state.get("sent", 0) + 1
    return {"sent": torch.tensor(server.state["sent"])}


def sends_the_client_before():
    last = [-1]

    def sends(self, client):
        sent = {"before": torch.tensor(last[-1])}
        last.append(client)
        return sent

    return sends


def trains_for_no_epoch(self, server):
    return {client: client for client in server.available}


def asks_while_updates_arrive(self, server, update):
    list(server.ask("all", self.accumulate))


class NTD(Plugin):
    """FedNTD's term: the global model's logits of the classes that a sample is not of, distilled into ours."""

    reads = ("global",)

    def distilled(self, step, student):
        own = torch.arange(student.shape[1]) == step.y.unsqueeze(1)
        teacher = step.frozen("global").logits.masked_fill(own, -1e9)
        return nn.functional.kl_div(
            student.masked_fill(own, -1e9).log_softmax(dim=1), teacher.softmax(dim=1), reduction="batchmean"
        )

    @hookimpl
    def local_loss(self, step):
        return Loss(self.distilled(step, step.logits))


class DetachedStudent(NTD):
    @hookimpl
    def local_loss(self, step):
        return Loss(self.distilled(step, step.logits.detach()))


class DetachedStudentBesideAFactor0(NTD):
    """It has a gradient, of 0."""

    @hookimpl
    def local_loss(self, step):
        return Loss(self.distilled(step, step.logits.detach() + 1) + 0 * step.logits.sum())


class TrainsTheTeacher(NTD):
    """It has a gradient, to something that nobody trains."""

    @hookimpl
    def begin_local(self, client):
        client.scratch["scale"] = torch.ones((), requires_grad=True)

    @hookimpl
    def local_loss(self, step):
        return Loss(self.distilled(step, step.logits.detach()) * step.client.scratch["scale"])


class TeachersInADict(NTD):
    def __init__(self, options):
        super().__init__(options)
        self.teachers = {}

    @hookimpl
    def local_loss(self, step):
        self.teachers[step.client.id, step.epoch] = step.frozen("global").logits
        return super().local_loss(step)


class MarginsInADict(NTD):
    """Nothing changes it, but it is a tensor that stays on one device."""

    def __init__(self, options):
        super().__init__(options)
        self.margins = {"all": [torch.ones(10)]}


class ReadsItsTerm(NTD):
    @hookimpl
    def local_loss(self, step):
        term = self.distilled(step, step.logits)
        return Loss(term, weight=min(1.0, term.item()))


class ListsItsTerm(NTD):
    @hookimpl
    def local_loss(self, step):
        term = self.distilled(step, step.logits)
        return Loss(term, weight=min(1.0, term.tolist()))


class AsksNumpy(NTD):
    @hookimpl
    def local_loss(self, step):
        return Loss(self.distilled(step, step.logits), weight=1.0 + np.asarray(step.y).max())


class NoisyTeacher(NTD):
    @hookimpl
    def local_loss(self, step):
        return Loss(self.distilled(step, step.logits + torch.randn_like(step.logits)))


class PicksSamplesToDistil(NTD):
    @hookimpl
    def begin_local(self, client):
        client.scratch["order"] = torch.randperm(client.n)


# --- what a run shows --------------------------------------------------------------------------------------------


def raises_in_round_1(self, client):
    if client.round == 1:
        raise KeyError("previous")


def draws_from_the_system(self, step):
    return Loss(step.logits.square().mean(), weight=os.urandom(1)[0] / 255 + 0.1)


def pulls_a_bit_more(self, step):
    return Loss(proximal_term(step.parameters, step.reference), weight=self.options.mu + 1e-3)


ROUNDS = {}


class RemembersByObject(Plugin):
    """What it knows about earlier rounds is gone when the run goes on with new objects."""

    @hookimpl
    def begin_round(self, server):
        ROUNDS[id(self)] = ROUNDS.get(id(self), 0) + 1
        server.state["rounds"] = ROUNDS[id(self)]

    @hookimpl
    def end_local(self, client):
        client.state["round"] = client.round

    @hookimpl
    def broadcast(self, server):
        return {"rounds": torch.tensor(float(server.state.get("rounds", 0)))}


def clears_everybodys_notes(self, client):
    for notes in client._session.scratch.values():
        notes.clear()


def adds_up(self, updates):
    return {name: sum(update.model[name] for update in updates) for name in updates[0].model}


def divides_by_all(self, server, updates):
    return {name: tensor / server.num_clients for name, tensor in adds_up(self, updates).items()}


def sends_counts(self, client):
    return {"counts": client.class_counts}


def empties_rows(self, updates):
    """Averages each row over the samples of its class: the row of a class without samples becomes 0."""
    counts = torch.stack([update.payload["counts"] for update in updates])
    shares = counts / counts.sum(dim=0).clamp(min=1)
    sent = {name: torch.stack([update.model[name] for update in updates]) for name in updates[0].model}
    return {name: torch.einsum("kc,kc...->c...", shares, stack) for name, stack in sent.items()}


def takes_the_first(self, updates):
    return dict(updates[0].model)


def pairs_clients(self, server):
    server.state["pair"] = server.cohort[:2]
    if len(server.cohort) < 2:
        raise IndexError("nobody to pair with")


def divides_by_one_less(self, client):
    return {"variance": torch.tensor(client.n / (client.n - 1))}


def spreads_the_batch(self, step):
    return Loss(step.features.std(dim=0).mean(), weight=0.01)


def means_of_all_classes(self, client):
    features, _, labels = client.forward()
    return {"means": torch.stack([features[labels == c].mean(dim=0) for c in range(client.num_classes)])}


class AveragesZeros(Plugin):
    """Absent classes are rows of zeros, and the server divides by the number of clients."""

    @hookimpl
    def end_local(self, client):
        features, _, labels = client.forward()
        hot = torch.nn.functional.one_hot(labels, client.num_classes).to(features.dtype)
        return {"means": hot.T @ features / hot.sum(dim=0).clamp(min=1).unsqueeze(1)}

    @hookimpl
    def accumulate(self, server, update):
        means = update.payload.pop("means")
        server.state["sum"] = server.state.get("sum", torch.zeros_like(means)) + means
        held = (means.reshape(len(means), -1) != 0).any(dim=1).to(means.dtype)
        server.state["held"] = server.state.get("held", torch.zeros_like(held)) + held

    @hookimpl
    def broadcast(self, server):
        return {"prototypes": self.means(server)} if "sum" in server.state else None

    def means(self, server):
        return server.state["sum"] / server.num_clients


class AveragesZerosAmongNumbers(AveragesZeros):
    """The same with a number for each class."""

    @hookimpl
    def end_local(self, client):
        return {"means": super().end_local(client)["means"].norm(dim=1)}


class AveragesShares(AveragesZeros):
    """The share of a class among a client's samples is 0 where the client lacks it."""

    @hookimpl
    def end_local(self, client):
        return {"means": client.class_counts / client.n}


class AveragesHolders(AveragesZeros):
    """The same done well."""

    def means(self, server):
        return server.state["sum"] / server.state["held"].clamp(min=1).unsqueeze(1)


def sends_every_parameters_norm(self, client, update):
    names = [name for name, _ in client.model.named_parameters()]
    return replace(update, payload={"norms": torch.stack([update.model[name].norm() for name in names])})


class Encodes(Plugin):
    """Sends the model in its payload, as 16-bit numbers."""

    encodes = ("*",)

    def form(self, update):
        return {name: tensor.half() for name, tensor in update.model.items()}

    @hookimpl
    def pre_upload(self, update):
        return replace(update, model={}, payload=self.form(update))

    @hookimpl
    def pre_aggregate(self, update):
        return replace(update, model={name: tensor.float() for name, tensor in update.payload.items()})


class EncodesWide(Encodes):
    def form(self, update):
        return {name: tensor.double() for name, tensor in update.model.items()}


class ForgetsOne(Encodes):
    def form(self, update):
        return {name: tensor for name, tensor in update.model.items() if name != "classifier.bias"}


def expects_everybody(self, server, mean):
    if len(server.accepted) != server.num_clients:
        raise ValueError(f"{len(server.accepted)} of {server.num_clients} updates")


class ForgetsToBeStale(Plugin):
    """Lets clients start from the newest model; declares that it does not."""

    reads = ("staleness",)


class IsLateByOne(Plugin):
    """Starts late clients from the model of one step ago, however late they are."""

    starts = ("*",)
    reads = ("staleness",)

    most = 1

    @hookimpl
    def broadcast_to(self, server, client):
        stale = min(server.staleness.get(client, 0), self.most)
        return {name: server.state[f"{server.round - stale}:{name}"] for name in server.shared} if stale else None

    @hookimpl
    def begin_round(self, server):
        server.state.update({f"{server.round}:{name}": server.model[name] for name in server.shared})

    @hookimpl
    def begin_local(self, client):
        return client.received or None


class IsAsLateAsItShould(IsLateByOne):
    most = 100


def halves_what_travels(self, step, gradients):
    """Leaves out what is personal, as step.parameters do: it does not move."""
    return {name: gradient / 2 for (name, gradient), _ in zip(gradients.items(), step.parameters)}


def pairs_gradients_with_what_travels(self, step, gradients):
    pairs = zip(gradients.items(), step.reference, strict=True)
    return {name: gradient + 0.01 * reference for (name, gradient), reference in pairs}


SENDS_A_CENTRE = {"broadcast": lambda self, server: {"centre": torch.ones(3)}}
OWNS = {"owns": ("classifier.*",)}


def fails_on_client_1(self, client):
    if client.id == 1:
        raise OSError("no such file")


class Nan(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        features, logits = self.model(x)
        return features, logits * torch.nan


DEFECTS = [
    ("is_a_plugin_class", object, "not derived from fedcore.Plugin"),
    ("is_a_plugin_class", print, "no class"),
    ("hooks_are_known_and_marked", Unmarked, "@hookimpl"),
    ("hooks_are_known_and_marked", broken(local_los=lambda self, step: None), "Did you mean 'local_loss'"),
    ("hooks_are_known_and_marked", broken(local_loss=lambda self, step, mu=0.1: None), "default value"),
    ("options_have_defaults", broken(Options=Needy), "mu"),
    ("options_refuse_what_they_do_not_know", broken(Options=Lax), "no_such_option"),
    ("options_refuse_what_they_do_not_know", broken(Options=AcceptsNan), "mu=nan"),
    ("options_are_described", broken(Options=Silent), "'mu' has no description"),
    ("options_are_bounded", broken(Options=Unbounded), "'mu' is a number without any bound"),
    ("options_are_bounded", broken(Options=Clamps), "'mu' accepts -0.5"),
    ("is_documented", broken(), "docstring"),
    ("declarations_fit_the_hooks", broken(**OWNS), "does not implement aggregate"),
    ("declarations_fit_the_hooks", broken(starts=("classifier.*",)), "does not implement begin_local"),
    ("declarations_fit_the_hooks", broken(neutral={"nu": 0}), "'nu'"),
    ("creation_has_no_side_effects", DrawsWhenMade, "torch"),
    ("configures_the_same_model_each_time", broken(configure_model=adds_a_layer_at_random), "encoder.extra"),
    ("keeps_nothing_on_self", CachesOnSelf, "begin_local changes self.cache"),
    ("keeps_nothing_on_self", ConstantOnSelf, "finds a Tensor in self.margin"),
    ("shares_nothing_between_processes", SharesAClassAttribute, "SharesAClassAttribute.seen"),
    ("shares_nothing_between_processes", SharesACache, "the cache of SharesACache.seen changed"),
    ("shares_nothing_between_processes", broken(begin_local=logs_to_the_module), "LOG"),
    ("shares_nothing_between_processes", broken(begin_local=in_a_closure()), "notes in the closure"),
    ("edits_nothing_in_place", broken(local_loss=edits_the_batch), "local_loss edits step.x"),
    ("edits_nothing_in_place", broken(observe=edits_the_labels_unseen), "observe edits step.y"),
    ("edits_nothing_in_place", broken(observe=edits_the_weights), "classifier.weight in place"),
    ("edits_nothing_in_place", broken(local_loss=moves_batch_norm), "running_mean"),
    ("edits_nothing_in_place", broken(begin_local=edits_what_came_down, **SENDS_A_CENTRE), "client.received['centre']"),
    ("edits_nothing_in_place", broken(server_step=edits_the_global_model), "server_step edits server.model"),
    ("edits_nothing_in_place", broken(begin_local=loads_other_weights), "begin_local edits client.model['classifier.w"),
    ("edits_nothing_in_place", broken(end_local=loads_other_weights), "end_local edits client.model['classifier.w"),
    ("edits_nothing_in_place", AsksAndEdits, "question edits client.model['classifier.w"),
    ("edits_nothing_in_place", broken(gradients=edits_the_gradients), "gradients edits gradients["),
    ("edits_nothing_in_place", broken(pre_aggregate=edits_an_update), "pre_aggregate edits update.model"),
    ("leaves_the_models_layout_alone", broken(begin_local=renews_the_classifier), "weight by another object"),
    ("leaves_the_models_layout_alone", broken(begin_local=widens_the_classifier), "from (10, 16) to (12, 16)"),
    ("leaves_the_models_layout_alone", broken(begin_local=stops_gradients), "requires_grad from True to False"),
    ("leaves_the_models_layout_alone", broken(observe=forgets_training_mode), "from training to eval"),
    ("loses_no_notes", broken(end_local=notes_too_late), "client.scratch['previous']"),
    ("loses_no_notes", broken(begin_local=notes_the_start_without_a_copy), "weight in client.scratch['start']"),
    ("uses_no_global_random_state", broken(local_loss=draws_from_torch), "local_loss draws from torch"),
    ("uses_no_global_random_state", broken(begin_round=draws_from_numpy), "begin_round draws from NumPy"),
    ("changes_no_global_settings", broken(begin_local=detects_anomalies), "anomaly detection from False to True"),
    ("never_waits_for_the_device", broken(local_loss=reads_a_value), ".item()"),
    ("never_waits_for_the_device", broken(local_loss=branches), "a branch on it"),
    ("never_waits_for_the_device", broken(gradients=branches_on_the_norm), "hook gradients waits"),
    ("gradients_are_finite", broken(gradients=divides_by_the_norm_of_what_is_frozen), "not finite"),
    ("never_waits_for_the_device", broken(local_loss=picks_by_mask), "boolean index"),
    ("loss_terms_are_scalars_that_train", broken(local_loss=gives_nan), "returns nan"),
    ("loss_terms_are_scalars_that_train", broken(local_loss=gives_a_vector), "forgot .mean()"),
    ("loss_terms_are_scalars_that_train", broken(local_loss=gives_no_gradient), "without a gradient"),
    ("loss_terms_are_scalars_that_train", DetachedStudent, "without a gradient to the local model"),
    ("loss_terms_are_scalars_that_train", DetachedStudentBesideAFactor0, "without a gradient to the local model"),
    ("loss_terms_are_scalars_that_train", TrainsTheTeacher, "without a gradient to the local model"),
    ("keeps_nothing_on_self", TeachersInADict, "local_loss changes self.teachers"),
    ("keeps_nothing_on_self", MarginsInADict, "finds a Tensor in the dict self.margins"),
    ("never_waits_for_the_device", ReadsItsTerm, "local_loss waits for the device: aten::_local_scalar_dense"),
    ("never_waits_for_the_device", ListsItsTerm, "tolist copies a tensor's values to the host"),
    ("never_waits_for_the_device", AsksNumpy, "numpy.asarray copies a tensor's values to the host"),
    ("uses_no_global_random_state", NoisyTeacher, "local_loss draws from torch's global random state"),
    ("uses_no_global_random_state", PicksSamplesToDistil, "begin_local draws from torch's global random state"),
    ("sends_only_finite_tensors", broken(end_local=sends_a_number), "'n': int"),
    ("sends_only_finite_tensors", broken(end_local=sends_nan), "'variance' with values that are not finite"),
    ("sends_only_finite_tensors", SpoilsAnAnswer, "pre_answer sends 'one' with values that are not finite"),
    ("sends_no_samples", broken(end_local=sends_inputs), "'replay'"),
    ("broadcast_is_a_function_of_the_state", broken(broadcast_to=sends_the_client_before()), "other tensors"),
    ("trains", broken(personal_model=fails_on_client_1), "evaluation: client 1 raised: plugin 'broken' hook"),
    ("trains", broken(personal_model=lambda self, client: Nan(client.model)), "its logits are nan"),
    ("trains", broken(broadcast=counts_broadcasts), "state is read-only in broadcast"),
    ("trains", broken(broadcast_to=numbers_broadcasts_to_one_client), "state is read-only in broadcast_to"),
    ("trains", broken(select_clients=trains_for_no_epoch), "gives client 0 0 local epochs, expected a whole number"),
    ("trains", broken(accumulate=asks_while_updates_arrive), "server.ask, which works in select_clients"),
    ("trains", broken(begin_local=raises_in_round_1), "begin_local (round 2"),
    ("trains_with_batch_norm", broken(begin_local=raises_in_round_1), "begin_local (round 2"),
    ("same_seed_gives_the_same_bits", broken(local_loss=draws_from_the_system), "run twice with the same seed"),
    ("same_seed_gives_the_same_bits", SharesACache, "in a cache, a class or a module the next run finds it"),
    ("neutral_options_are_fedavg", broken(Options=Strength, neutral={"mu": 0}, local_loss=pulls_a_bit_more), "FedAvg"),
    ("resumes_to_the_same_bits", RemembersByObject, "server.state differs"),
    ("runs_beside_another_plugin", broken(end_local=clears_everybodys_notes), "client.scratch of another plugin"),
    ("a_second_pass_changes_nothing", broken(local_loss=counts_in_a_term), "the model differs"),
    ("mean_of_equal_updates_is_that_update", broken(aggregate=adds_up, **OWNS), "classifier"),
    ("mean_of_equal_updates_is_that_update", broken(aggregate=divides_by_all, **OWNS), "classifier"),
    ("mean_of_equal_updates_is_that_update", broken(end_local=sends_counts, aggregate=empties_rows, **OWNS), "class"),
    ("order_of_clients_does_not_matter", broken(aggregate=takes_the_first, **OWNS), "classifier"),
    ("works_with_one_client", broken(begin_round=pairs_clients), "nobody to pair with"),
    ("works_with_a_client_of_one_sample", broken(end_local=divides_by_one_less), "ZeroDivisionError"),
    ("works_with_a_last_batch_of_one", broken(local_loss=spreads_the_batch), "became nan"),
    ("works_with_absent_classes", broken(end_local=means_of_all_classes), "not finite"),
    ("declarations_fit_the_hooks", broken(encodes=("*",)), "does not implement pre_upload"),
    ("trains", ForgetsOne, "'classifier.bias' is missing"),
    ("encoding_saves_bytes", EncodesWide, "FedAvg's clients"),
    ("works_with_a_frozen_backbone", broken(pre_upload=sends_every_parameters_norm), "KeyError"),
    ("works_with_a_frozen_backbone", broken(observe=looks_and_switches_back), "backbone from eval to training"),
    ("works_with_partial_participation", broken(server_step=expects_everybody), "1 of 3 updates"),
    ("works_with_stale_updates", ForgetsToBeStale, "server steps ago, but did not begin with"),
    ("works_with_stale_updates", IsLateByOne, "server steps ago, but did not begin with"),
    ("works_beside_personal_parameters", broken(gradients=halves_what_travels), "was never trained"),
    ("works_beside_personal_parameters", broken(gradients=pairs_gradients_with_what_travels), "argument 2 is shorter"),
    ("absent_classes_are_not_averaged_as_zeros", AveragesZeros, "divided by the number of clients"),
    ("absent_classes_are_not_averaged_as_zeros", AveragesZerosAmongNumbers, "divided by the number of clients"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _anomaly_detection_off():
    yield
    torch.autograd.set_detect_anomaly(False)


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:std\\(\\)")
@pytest.mark.parametrize(("check", "plugin", "words"), DEFECTS, ids=[f"{row[0]}-{i}" for i, row in enumerate(DEFECTS)])
def test_a_planted_defect_is_found_by_its_check(check, plugin, words):
    with pytest.raises(AssertionError) as caught:
        CHECKS[f"check_{check}"].function(plugin)
    text = str(caught.value)
    assert words in text, text
    assert text.startswith(f"plugin {plugin.__name__.lower()!r} fails check_{check}: ")
    assert len(re.split(r"\nWhat to do: |\. Hint: ", text, maxsplit=1)[1]) > 20


def install(folder, monkeypatch, group, **points):
    """Install a package with entry points."""
    info = folder / "draws_package-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: draws-package\nVersion: 1.0\n")
    lines = "".join(f"{name} = {value}\n" for name, value in points.items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{lines}")
    monkeypatch.syspath_prepend(folder)


def test_the_hooks_of_an_installed_plugin_are_watched_too(tmp_path, monkeypatch):
    class Draws(Plugin):
        """A class in the module of its entry point, as in a new package."""

        __module__, __qualname__ = "draws_package", "Draws"

        @hookimpl
        def local_loss(self, step):
            return Loss(step.features.square().mean() * torch.rand(()))

    install(tmp_path, monkeypatch, "fedcore.plugins", draws="draws_package:Draws")
    monkeypatch.setitem(sys.modules, "draws_package", SimpleNamespace(Draws=Draws))
    assert name_of(Draws) == "draws"
    with raises(CheckFailed, "'draws'", "check_uses_no_global_random_state", "local_loss"):
        CHECKS["check_uses_no_global_random_state"].function("draws")


def test_what_a_library_draws_when_it_is_imported_is_not_the_hooks(tmp_path, monkeypatch):
    (tmp_path / "draws_at_import.py").write_text("import random\nrandom.random()\n")
    monkeypatch.syspath_prepend(tmp_path)

    def imports_late(self, client):
        importlib.import_module("draws_at_import")

    CHECKS["check_uses_no_global_random_state"].function(broken(end_local=imports_late))
    assert sys.modules.pop("draws_at_import")


def test_fedavg_passes_though_nothing_else_may_have_its_name():
    names = ["check_trains_with_batch_norm", "check_works_with_a_frozen_backbone"]
    assert {verdict.status for verdict in run_checks("fedavg", only=names)} == {"passed"}


def test_every_quick_check_has_a_planted_defect():
    planted = {f"check_{row[0]}" for row in DEFECTS}
    # The first needs an installed package: see test_scaffold.py. The second has its own in test_kit_aggregation.py.
    without = {"check_package_is_complete", "check_the_same_as_one_by_one"}
    assert {check.name for check in CHECKS.values() if not check.slow} - planted == without
    assert len(DEFECTS) >= 20


def test_the_same_done_well_passes():
    CHECKS["check_absent_classes_are_not_averaged_as_zeros"].function(AveragesHolders)
    with raises(NotApplicable):
        CHECKS["check_absent_classes_are_not_averaged_as_zeros"].function(AveragesShares)
    CHECKS["check_encoding_saves_bytes"].function(Encodes)
    CHECKS["check_works_with_stale_updates"].function(IsAsLateAsItShould)
    for name in ("loss_terms_are_scalars_that_train", "keeps_nothing_on_self", "never_waits_for_the_device"):
        CHECKS[f"check_{name}"].function(NTD)


SHARING = """
from fedcore import Plugin, hookimpl

rounds = []


class Sharing(Plugin):
    @hookimpl
    def begin_round(self, server):
        rounds.append(server.round)

    @hookimpl
    def end_local(self, client):
        client.state["rounds"] = len(rounds)
"""


@pytest.mark.slow
def test_what_clients_read_from_the_servers_memory_is_found_by_the_engines(tmp_path, monkeypatch):
    (tmp_path / "sharing_module.py").write_text(SHARING)
    monkeypatch.syspath_prepend(tmp_path)
    with raises(CheckFailed, "check_worker_processes_give_the_same_bits", "workers=1", "client"):
        CHECKS["check_worker_processes_give_the_same_bits"].function("module:sharing_module.Sharing")


def check_engines(trial, engines, folder, monkeypatch, but=""):
    """Run the check as if these engines were installed, and no others. ``but``: the module lacks this one."""
    with monkeypatch.context() as patch:
        install(
            folder, patch, "fedcore.engines", **{name: f"engines_package:{name}" for name in engines if name != "local"}
        )
        patch.setitem(
            sys.modules,
            "engines_package",
            SimpleNamespace(**{name: engine for name, engine in engines.items() if name != but}),
        )
        alone = SimpleNamespace(available=lambda kind: engines, resolve=runs.registry.resolve)
        patch.setattr(runs, "registry", alone)
        CHECKS["check_every_engine_gives_the_same_bits"].function(trial)


class OfAFederation:
    simulates = False


class NeverStarts:
    def __init__(self, spec):
        raise TimeoutError("no node within 30 s")


class Loses(InProcessEngine):
    def run(self, tasks, *, window=None):
        for task, _ in super().run(tasks, window=window):
            yield task, ClientFailure("worker_lost", "the machine was busy")


class Rounds(InProcessEngine):
    """Sends the model with fewer digits."""

    def run(self, tasks, *, window=None):
        for task, outcome in super().run(tasks, window=window):
            if isinstance(outcome, ClientUpdate):
                fewer = {name: tensor.bfloat16().to(tensor.dtype) for name, tensor in outcome.model.items()}
                outcome = replace(outcome, model=fewer)
            yield task, outcome


@pytest.fixture
def trial():
    found = Trial("fedavg")
    assert found.usual
    return found


@pytest.mark.parametrize(
    ("engine", "named"),
    [(NeverStarts, "30"), (Loses, "worker_lost")],
)
def test_an_engine_that_does_not_run_here_is_no_fault_of_the_plugin(trial, tmp_path, monkeypatch, engine, named):
    with raises(NotApplicable, named):
        check_engines(trial, {"local": None, "far": engine}, tmp_path, monkeypatch)


def test_an_engine_that_cannot_be_imported_hides_no_other(trial, tmp_path, monkeypatch):
    engines = {"local": None, "broken": None, "far": InProcessEngine}
    with raises(NotApplicable, "'broken'"):
        check_engines(trial, engines, tmp_path, monkeypatch, but="broken")
    with raises(CheckFailed, "engine=far"):
        check_engines(trial, {**engines, "far": Rounds}, tmp_path, monkeypatch, but="broken")


def test_engines_that_run_are_compared(trial, tmp_path, monkeypatch):
    check_engines(trial, {"local": None, "far": InProcessEngine, "federation": OfAFederation}, tmp_path, monkeypatch)
    with raises(CheckFailed, "engine=far"):
        check_engines(trial, {"local": None, "far": Rounds}, tmp_path, monkeypatch)
    with raises(NotApplicable):
        check_engines(trial, {"local": None, "federation": OfAFederation}, tmp_path, monkeypatch)


# --- the kit as a whole ------------------------------------------------------------------------------------------


class Undocumented(Plugin):
    Options = Silent


def test_check_plugin_names_everything_that_fails():
    with pytest.raises(CheckFailed) as caught:
        check_plugin(Undocumented, slow=False)
    failed = re.findall(r"^plugin 'undocumented' fails (\w+): ", str(caught.value), re.MULTILINE)
    assert failed == ["check_options_are_described", "check_is_documented"]


def test_expected_failures_are_strict():
    reasons = {"check_is_documented": "a test", "check_options_are_described": "a test"}
    only = [*reasons]
    verdicts = list(run_checks(Undocumented, only=only, expected_failed_checks=reasons))
    assert [(v.status, v.message) for v in verdicts] == [("failed as expected", "a test")] * 2
    reasons = {"check_options_have_defaults": "it has"}
    (verdict,) = run_checks(Undocumented, only=[*reasons], expected_failed_checks=reasons)
    assert verdict.status == "failed"
    assert "expect it no longer (expected_failed_checks" in verdict.message


def test_unknown_checks_and_plugins():
    with raises(UnknownNameError, "'check_trains'"):
        list(run_checks("fedprox", only=["check_train"]))
    with raises(UnknownNameError, "'fedprox'"):
        list(run_checks("fedprx"))


def test_without_a_plugin_class_nothing_else_is_tried():
    verdicts = list(run_checks(object, slow=False))
    assert [v.status for v in verdicts].count("failed") == 1
    assert {v.message for v in verdicts[1:]} == {"check_is_a_plugin_class failed"}


@pytest.mark.parametrize("expected", [{"check_trains": "why"}, lambda plugin: {"check_trains": "why"}])
def test_parametrize_with_checks(expected):
    mark = parametrize_with_checks([Undocumented], expected_failed_checks=expected).mark
    cases = {case.id: case for case in mark.args[1]}
    assert set(cases) == {f"undocumented-{name}" for name in CHECKS}
    marks = {id_: {m.name for m in case.marks} for id_, case in cases.items()}
    assert marks["undocumented-check_worker_processes_give_the_same_bits"] == {"slow"}
    assert marks["undocumented-check_every_engine_gives_the_same_bits"] == {"slow"}
    assert marks["undocumented-check_trains"] == {"xfail"}
    plugin, check = cases["undocumented-check_is_documented"].values
    with raises(CheckFailed, "'undocumented'", "check_is_documented"):
        check(plugin)
    plugin, check = cases["undocumented-check_package_is_complete"].values
    with raises(pytest.skip.Exception):
        check(plugin)


def test_checks_are_plain_functions_that_take_a_class():
    from fedcore_testing.checks.contract import check_is_documented

    with raises(CheckFailed, "'undocumented'", "check_is_documented"):
        check_is_documented(Undocumented)
    check_is_documented(type("Documented", (Undocumented,), {"__doc__": "Does nothing."}))


# --- fedcore plugins check ---------------------------------------------------------------------------------------


@pytest.fixture
def check(cli):
    return lambda *arguments: cli("plugins", "check", *arguments)


def test_the_command_passes(check):
    result = check("fedprox", "--only", "check_trains", "--only", "check_is_documented")
    assert result.exit_code == 0, result.output
    assert re.search(r"passed +check_trains +Two rounds", result.output)
    assert "fedprox keeps the contract: 2 passed in" in result.output


def test_the_command_fails_with_what_to_do(check):
    result = check(name_of(Undocumented), "--only", "check_is_documented")
    assert result.exit_code == 1
    assert re.search(r"FAILED +check_is_documented", result.output)
    assert "What to do: write a docstring" in result.output
    assert "breaks the contract: 1 failed" in result.output
    assert "--expect CHECK=REASON" in result.output
    result = check(name_of(Undocumented), "--only", "check_is_documented", "--expect", "check_is_documented=a=b")
    assert result.exit_code == 0
    assert re.search(r"known +check_is_documented .*\n +a=b\n", result.output)
    assert "keeps the contract: 1 failed as expected" in result.output


def test_the_command_in_json(check):
    result = check(
        name_of(Undocumented), "--only", "check_is_documented", "--only", "check_options_have_defaults", "--json"
    )
    assert result.exit_code == 1
    assert [(row["check"], row["status"]) for row in json.loads(result.stdout)] == [
        ("check_options_have_defaults", "passed"),
        ("check_is_documented", "failed"),
    ]


def test_the_command_starts_processes_only_if_it_is_asked_to(check, monkeypatch):
    ran = []
    monkeypatch.setattr("fedcore_testing.run_checks", lambda name, **options: iter(ran.append(options) or ()))
    assert check("fedprox").exit_code == check("fedprox", "--thorough").exit_code == 0
    assert [options["slow"] for options in ran] == [False, True]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["fedprx"], "'fedprox'"),
        (["fedprox", "--only", "check_train"], "'check_trains'"),
        (["fedprox", "--expect", "check_train=it cannot"], "'check_trains'"),
    ],
)
def test_the_command_refuses_unknown_names(check, arguments, named):
    refused(check(*arguments), named)


# --- other options than the defaults -----------------------------------------------------------------------------


class Teaching(PluginOptions):
    share: float = Field(default=0.5, ge=0, description="Weight of the public samples.")


class NeedsPublicByOption(Plugin[Teaching]):
    """Declares in ``__init__`` that it uses public samples, and does."""

    def __init__(self, options):
        super().__init__(options)
        self.reads = ("public",) if options.share > 0 else ()

    @hookimpl
    def begin_local(self, client):
        if self.options.share > 0:
            client.scratch["public"] = client.public.inputs(torch.arange(4))


@pytest.mark.slow
def test_a_plugin_that_declares_in_init_that_it_uses_public_samples_passes():
    found = list(run_checks(NeedsPublicByOption, slow=False))
    assert [v.message for v in found if v.status == "failed"] == []
    assert {"check_trains", "check_configures_the_same_model_each_time"} <= {
        v.check.name for v in found if v.status == "passed"
    }


class Notes(PluginOptions):
    wrong: bool = Field(default=False, description="Sends a number that is no tensor.")


RUNS = []


class BadByOption(Plugin[Notes]):
    """Breaks the contract with one of its options, and notes what it is run with."""

    @hookimpl
    def check_run(self, setup):
        RUNS.append((setup.config.dataset, setup.config.model, setup.config.public))

    @hookimpl
    def end_local(self, client):
        return {"n": client.n} if self.options.wrong else None


def test_the_options_of_the_check_reach_its_runs(check):
    name, only = name_of(BadByOption), ["--only", "check_trains", "--only", "check_sends_only_finite_tensors"]
    assert check(name, *only).exit_code == 0
    result = check(name, *only, "--set", "BadByOption.wrong=true")
    assert result.exit_code == 1
    assert re.search(r"FAILED +check_trains", result.output)
    assert re.search(r"FAILED +check_sends_only_finite_tensors", result.output)
    RUNS.clear()
    assert check(name, *only, "--model", "mlp", "--public", "0.1").exit_code == 0
    assert {run[1:] for run in RUNS} == {("mlp", "0.1")}
    RUNS.clear()
    assert check(name, *only, "--dataset", "breast-cancer", "--samples", "100").exit_code == 0
    assert {run[0] for run in RUNS} == {"breast-cancer"}


class RefusesMomentum(Plugin):
    """Trains only without momentum."""

    @hookimpl
    def check_run(self, setup):
        if setup.config.momentum:
            raise ConfigError("momentum spoils the correction; --momentum 0")


def test_options_of_training_reach_the_checks(check):
    name, only = name_of(RefusesMomentum), ["--only", "check_trains", "--only", "check_sends_only_finite_tensors"]
    refused = check(name, *only)
    assert refused.exit_code == 1
    assert "momentum spoils the correction" in refused.output
    result = check(name, *only, "--momentum", "0", "--optimizer", "sgd", "--local-steps", "2")
    assert result.exit_code == 0, result.output
    assert check(name, "--rounds", "1").exit_code == 2, "the checks set the rounds"


def test_two_classes_can_be_absent_from_clients():
    only = ["check_works_with_absent_classes", "check_absent_classes_are_not_averaged_as_zeros"]
    verdicts = run_checks("fedproc", only=only, run={"dataset": "breast-cancer"})
    assert "failed" not in {verdict.status for verdict in verdicts}


def test_neutral_options_are_compared_with_fedavg_on_the_same_run():
    only = ["check_neutral_options_are_fedavg"]
    (verdict,) = run_checks("fedprox", only=only, run={"model": "mlp", "public": "0.1"})
    assert verdict.status == "passed", verdict.message


def test_parametrized_checks_take_options():
    mark = parametrize_with_checks([BadByOption], only=["check_trains"], options={"wrong": True}).mark
    plugin, check = mark.args[1][0].values
    with raises(CheckFailed, "'badbyoption'", "check_trains", "'n': int"):
        check(plugin)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--set", "moon.mu=5"], ("--set fedprox.OPTION=VALUE",)),
        (["--set", "mu=5"], ("--set fedprox.mu=5",)),
        (["--set", "fedprox.muu=5"], ("'muu'", "'mu'")),
        (["--set", "fedprox.mu=-5"], ("'fedprox'", "mu", -5)),
        (["--model", "mpl"], ("'mpl'", "'mlp'")),
        (["--public", "2"], ("--public",)),
    ],
)
def test_options_that_cannot_be_used_are_refused_before_any_check(check, arguments, named):
    result = check("fedprox", *arguments)
    refused(result, *named)
    assert not result.stdout
