"""Whole runs: attackers that break FedAvg and not the rules, buffers, company, too few updates."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedcore import Plugin, PluginConflictError, generator, hookimpl
from fedcore_testing import (
    EqualWeights,
    OwnsClassifier,
    PersonalClassifier,
    StepsOnServer,
    federations,
    model_bytes,
    records,
    weights,
    with_batch_norm,
)
from tests.sentences import raises, warns

FIVE = {"clients": 5, "rounds": 1}
ARENA = {"clients": 10, "rounds": 4, "local_epochs": 3, "batch_size": 32, "partition": "iid", "eval_every": 4}
ATTACKERS = (0, 4, 7)
RULES = ["median", "trimmed-mean", "krum"]
go = federations(**FIVE)


def accuracy(result) -> float:
    return result.metrics["global"]["accuracy"]


# --- attacks -----------------------------------------------------------------------------------------------------


class Attack(Plugin):
    """Sends w_t + boost * (y - w_t)."""

    boost = 1.0

    @hookimpl
    def begin_local(self, client):
        client.scratch["start"] = {name: tensor.clone() for name, tensor in client.model.state_dict().items()}

    @hookimpl
    def pre_upload(self, client, update):
        if client.id not in ATTACKERS:
            return None
        start = client.scratch["start"]
        return replace(
            update,
            model={
                name: start[name] + self.boost * (tensor - start[name]) if tensor.is_floating_point() else tensor
                for name, tensor in update.model.items()
            },
        )


class SignFlip(Attack):
    boost = -4.0


class LabelFlip(Attack):
    """Trains on 9 - y, and sends what it learnt sixfold."""

    boost = 6.0

    @hookimpl
    def task_loss(self, step):
        return F.cross_entropy(step.logits, 9 - step.y if step.client.id in ATTACKERS else step.y)


@pytest.fixture(scope="module")
def arena(go):
    """Run with an attack and a defence, once each."""
    known = {}

    def run(attack, defence):
        key = (attack, repr(defence))
        if key not in known:
            attacks = {attack: {}} if attack else {}
            known[key] = go({**attacks, **defence}, **ARENA)
        return known[key]

    return run


DEFENCES = [
    {"median": {}},
    {"trimmed-mean": {"fraction": 0.3}},
    {"krum": {"fraction": 0.3}},
    {"krum": {"fraction": 0.3, "select": 5}},
    {"norm-clip": {"bound": 1.0}},
    {"norm-clip": {"bound": 1.0}, "median": {}},
]


def test_fedavg_learns_where_nobody_attacks(arena):
    assert accuracy(arena(None, {})) > 0.85


@pytest.mark.parametrize("attack", [SignFlip, LabelFlip])
def test_the_attack_breaks_fedavg(arena, attack):
    assert accuracy(arena(attack, {})) < 0.5


@pytest.mark.sampled(5)
@pytest.mark.parametrize("attack", [SignFlip, LabelFlip])
@pytest.mark.parametrize("defence", DEFENCES, ids=str)
def test_the_defence_holds(arena, attack, defence):
    alone = set(defence) == {"norm-clip"}  # every attacker still has a vote, of the same length as the others
    assert accuracy(arena(attack, defence)) > (0.7 if alone else 0.85)


# --- what a run folds, against NumPy -----------------------------------------------------------------------------

SEEN: list = []


class Spy(Plugin):
    """Keeps what arrives, and where the round started."""

    @hookimpl
    def accumulate(self, server, update):
        SEEN.append((dict(server.model), update.model))


class BadBuffers(Plugin):
    """Client 2 sends good weights and absurd buffers."""

    @hookimpl
    def pre_upload(self, client, update):
        if client.id != 2:
            return None
        bad = {
            name: torch.full_like(tensor, 2**40 if name.endswith("tracked") else -1e6)
            for name, tensor in update.model.items()
            if "running" in name or "tracked" in name
        }
        return replace(update, model={**update.model, **bad})


def observed(go, plugins, **options):
    """Run; return the model, where it started, and the clients' values stacked by name."""
    SEEN.clear()
    result = go({**plugins, Spy: {}}, **{"model": with_batch_norm, **options})
    start = {name: tensor.double().numpy() for name, tensor in SEEN[0][0].items()}
    stacks = {name: np.stack([model[name].double().numpy() for _, model in SEEN]) for name in SEEN[0][1]}
    return {name: tensor.double().numpy() for name, tensor in weights(result).items()}, start, stacks


def is_buffer(name):
    return "running" in name or "tracked" in name


def near(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_the_median_of_everything_buffers_too(go):
    found, _, stacks = observed(go, {BadBuffers: {}, "median": {}})
    assert len([name for name in stacks if is_buffer(name)]) == 3
    for name, values in stacks.items():
        near(found[name], np.median(values, axis=0))
    assert np.abs(found["encoder.base.norm.running_mean"]).max() < 100


def test_the_trimmed_mean_of_everything_buffers_too(go):
    found, _, stacks = observed(go, {BadBuffers: {}, "trimmed-mean": {}})
    for name, values in stacks.items():
        whole = name.endswith("tracked")
        near(found[name], np.median(values) if whole else np.sort(values, axis=0)[1:-1].mean(axis=0))
    assert (found["encoder.base.norm.running_var"] > 0).all()


@pytest.mark.parametrize("select", [1, 3, 99])
def test_krum_takes_the_best_by_weights_and_the_median_of_buffers(go, select):
    found, _, stacks = observed(go, {BadBuffers: {}, "krum": {"select": select}})
    vectors = np.concatenate([values.reshape(5, -1) for name, values in stacks.items() if not is_buffer(name)], axis=1)
    distances = np.square(vectors[:, None] - vectors[None]).sum(axis=2)
    scores = np.sort(distances + np.diag([np.inf] * 5), axis=1)[:, : 5 - 1 - 2].sum(axis=1)
    chosen = np.argsort(scores, kind="stable")[: min(select, 4)]
    for name, values in stacks.items():
        near(found[name], np.median(values, axis=0) if is_buffer(name) else values[chosen].mean(axis=0))


class Rounds(Plugin):
    """Keeps of each round w_t, what each client computed, and the model that came of it."""

    own: list = []

    @hookimpl
    def all_updates(self, server, updates):
        models = {update.client: {**update.model} for update in updates}
        self.own.append((dict(server.model), models, list(server.trainable), server.round))

    @hookimpl
    def end_round(self, server):
        self.own[-1] += (dict(server.model),)


@pytest.mark.parametrize("rule", ["trimmed-mean", "krum"])
def test_an_attack_buckets_and_a_rule_in_a_row(go, rule):
    """ALIE, buckets of two and the rule: ten of twelve clients, which keep their classifiers. Buffers are not mixed."""
    pytest.importorskip("fedcore_attacks")
    Rounds.own.clear()
    evil = [1, 4, 7]
    attack = {"kind": "alie", "strength": 1.5, "clients": evil}
    plugins = {Rounds: {}, "attack": attack, rule: {"before": "bucketing", "fraction": 0.1}, PersonalClassifier: {}}
    size = {"clients": 12, "participation": 10 / 12, "rounds": 2, "client_test_fraction": 0.2}
    seed = go(plugins, **size, model=with_batch_norm).config.seed
    for start, models, trainable, number, end in Rounds.own:
        own, started, ended = (joined(model, trainable) for model in (models, start, end))
        moves = own - started
        malicious = np.isin([*models], evil)
        honest = moves[~malicious]
        moves[malicious] = honest.mean(axis=0) - 1.5 * honest.std(axis=0, ddof=1)
        order = torch.randperm(10, generator=generator(seed, f"{rule}/buckets", round=number)).numpy()
        buckets = moves[order].reshape(5, 2, -1).mean(axis=1)
        near_ones = np.sort(np.square(buckets[:, None] - buckets).sum(axis=2), axis=1)[:, 1:3]  # f = 1: two others
        best, middle = buckets[near_ones.sum(axis=1).argmin()], np.sort(buckets, axis=0)[1:-1].mean(axis=0)
        np.testing.assert_allclose(ended - started, best if rule == "krum" else middle, atol=1e-6)
        mean = np.sort([model["encoder.base.norm.running_mean"].numpy() for model in models.values()], axis=0)
        kept = mean[4:6] if rule == "krum" else mean[1:-1]  # median of ten, or without one at either end
        near(end["encoder.base.norm.running_mean"].numpy(), kept.mean(axis=0, dtype=np.float64))
        tracked = sorted(int(model["encoder.base.norm.num_batches_tracked"]) for model in models.values())
        assert int(end["encoder.base.norm.num_batches_tracked"]) == tracked[4]
    assert len(Rounds.own) == 2


def joined(models, names):
    """Return a model's tensors as one vector; of several models by client a row each."""
    if isinstance(next(iter(models.values())), dict):
        return np.stack([joined(model, names) for model in models.values()])
    return np.concatenate([models[name].double().numpy().ravel() for name in names])


def test_norm_clip_shortens_to_the_bound(go):
    options = {"clients": 1, "partition": "iid"}
    plain, start, stacks = observed(go, {}, **options)
    trainable = [name for name in stacks if not is_buffer(name)]
    norm = np.sqrt(sum(np.square(plain[name] - start[name]).sum() for name in trainable))
    clipped, _, _ = observed(go, {"norm-clip": {"bound": norm / 4}}, **options)
    for name in trainable:
        np.testing.assert_allclose(clipped[name] - start[name], (plain[name] - start[name]) / 4, atol=1e-6)
    mean = "encoder.base.norm.running_mean"
    np.testing.assert_allclose(clipped[mean], plain[mean] / 4, atol=1e-6)
    assert clipped["encoder.base.norm.num_batches_tracked"] == plain["encoder.base.norm.num_batches_tracked"]


@pytest.mark.parametrize("rule", RULES)
def test_buffers_that_stay_on_the_clients_are_no_ones_business(go, rule):
    result = go({rule: {}}, model=with_batch_norm, buffers="local")
    assert records(result)[0]["failures"] == []
    assert weights(result)["encoder.base.norm.running_mean"].abs().max() == 0


# --- few clients -------------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("clients", [1, 2, 3])
def test_few_clients(go, rule, clients):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*outvote")
        result = go({rule: {}}, clients=clients, partition="iid")
    assert records(result)[0]["accepted"] == clients
    assert all(torch.isfinite(tensor).all() for tensor in weights(result).values())
    if clients == 1:
        assert model_bytes(result) == model_bytes(go({}, clients=1, partition="iid"))


@pytest.mark.parametrize(
    ("plugins", "named"),
    [
        ({"krum": {"fraction": 0.4}}, ("krum, round 1", "5 updates", "1 attackers", 0.4, 2)),
        ({"trimmed-mean": {"fraction": 0.45}}, ("trimmed-mean, round 1", "5 updates", "2 attackers", 0.45, 3)),
    ],
)
def test_too_few_updates_for_the_assumed_attackers_are_warned_of(go, plugins, named):
    with warns(RuntimeWarning, *named):
        go(plugins)


@pytest.mark.parametrize("plugins", [{"krum": {}}, {"trimmed-mean": {}}, {"median": {}}], ids=str)
def test_enough_updates_are_not(go, plugins):
    assert not any("notes" in record for record in records(go(plugins)))


# --- options and company -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "other",
    [
        OwnsClassifier,
        EqualWeights,
        StepsOnServer,
    ],
)
def test_other_owners_are_refused_with_both_names_and_the_reason(go, rule, other, order):
    with raises(PluginConflictError, repr(rule), repr(other.__name__.lower())):
        go({name: {} for name in [rule, other][::order]})


@pytest.mark.parametrize("pair", [("median", "krum"), ("krum", "trimmed-mean")])
def test_two_rules_are_refused(go, pair):
    with raises(PluginConflictError):
        go({name: {} for name in pair})


class Sees(Plugin):
    models: list = []

    @hookimpl
    def pre_aggregate(self, server, update):
        self.models.append(update.model)


def test_beside_a_method_that_keeps_parameters_it_aggregates_the_others(go):
    Sees.models.clear()
    result = go({"median": {}, PersonalClassifier: {}, Sees: {}})
    first = go({"median": {}, PersonalClassifier: {}}, participation=0.2)
    found, of_one = weights(result), weights(first)
    assert len(Sees.models) == 5
    for name in Sees.models[0]:
        assert name.startswith("encoder.")
        expected = np.median(np.stack([model[name].numpy() for model in Sees.models]).astype(np.float64), axis=0)
        np.testing.assert_allclose(found[name], expected, rtol=1e-6, atol=1e-8)
    for name in found.keys() - Sees.models[0].keys():
        np.testing.assert_array_equal(found[name], of_one[name])  # the initial values


def test_beside_a_local_term(go):
    pytest.importorskip("fedcore_fedprox")
    result = go({"fedprox": {"mu": 0.5}, "norm-clip": {}, "median": {}})
    assert set(records(result)[0]["losses"]) == {"task", "fedprox.proximal"}
