"""SOLO: nobody sends, nobody averages; how its clients are evaluated."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import fedcore
from fedcore import Plugin, PluginConflictError, SplitModel, UnknownNameError, hookimpl
from fedcore.client import evaluate
from fedcore.data import Dataset, ResidentSamples, load_dataset
from fedcore_functional import proximal_term
from fedcore_testing import (
    Cohorts,
    CorrectsClassifier,
    OwnsClassifier,
    PersonalClassifier,
    Quadratic,
    W,
    analytic_federation,
    committed,
    federations,
    installed,
    linear,
    partition_of,
    personal_state,
    same_tensors,
    steps_without_host_sync,
    weights,
    with_batch_norm,
)
from tests.sentences import raises

TOY = {**analytic_federation([[2.0, 0.0], [0.0, 4.0]], [1, 3]), "local_epochs": 2, "lr": 0.5}  # two quadratics
go = federations()


# --- training ----------------------------------------------------------------------------------------------------


def test_the_toy_by_hand(go):
    """K = 2 steps of lr 0.5 per round: each client goes 3/4 of the way to its own centre, from where it was."""
    for rounds, first, second in ((1, [1.5, 0.0], [0.0, 3.0]), (2, [1.875, 0.0], [0.0, 3.75])):
        result = go({Quadratic: {}, "solo": {}}, **TOY, rounds=rounds)
        assert personal_state(result, 0)[W].tolist() == first
        assert personal_state(result, 1)[W].tolist() == second
        assert weights(result)[W].tolist() == [0.0, 0.0]


def test_one_client_is_the_fedavg_of_one_client(go):
    """Nothing is lost by being alone: the same batches, the same steps, the same bits."""
    options = {"clients": 1, "rounds": 3, "momentum": 0.9, "lr_decay": 0.9}
    assert same_tensors(personal_state(go({"solo": {}}, **options), 0), weights(go({}, **options)))


def test_what_others_hold_does_not_reach_a_client(go):
    """Client 0 trains to the same bits beside two clients and beside two that make other steps altogether."""
    beside = personal_state(go({"solo": {}}), 0)
    assert same_tensors(personal_state(go({"solo": {}, Different: {}}), 0), beside)
    assert not same_tensors(personal_state(go({"solo": {}, Different: {}}), 1), personal_state(go({"solo": {}}), 1))


class Different(Plugin):
    """Clients other than 0 add a term of their own."""

    @hookimpl
    def local_loss(self, step):
        return fedcore.Loss(step.logits.square().mean()) if step.client.id else None


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_long_round_is_many_short_ones_but_for_momentum(go, momentum):
    """MOON trains in one call: --rounds 1. Here with full batches, whose order does not matter."""
    options = {"batch_size": 5000, "momentum": momentum, "model": linear}
    long, short = (
        go({"solo": {}}, **options, local_epochs=6, rounds=1),
        go({"solo": {}}, **options, local_epochs=2, rounds=3),
    )
    differences = [
        (a - b).abs().max()
        for a, b in zip(personal_state(long, 0).values(), personal_state(short, 0).values(), strict=True)
    ]
    assert (max(differences) < 1e-5) == (momentum == 0.0)


def test_nothing_travels_and_the_global_model_stays_the_initial_one(go):
    result = go({"solo": {}}, model=with_batch_norm)
    assert committed(result).ledger["up"] == committed(result).ledger["down"] == 0
    start = go({"solo": {}}, model=with_batch_norm, rounds=1, lr=1e-30)
    assert same_tensors(weights(result), weights(start))
    statistics = [personal_state(result, client)["encoder.base.norm.running_mean"] for client in range(3)]
    assert not any(torch.equal(a, b) for a, b in pairwise(statistics))
    assert personal_state(result, 0)["encoder.base.norm.num_batches_tracked"] > 0


def test_a_client_keeps_its_model_over_rounds_of_absence(go):
    cohorts = {"rounds": [[0, 1], [1], [1], [0]]}
    found = {rounds: go({"solo": {}, Cohorts: cohorts}, rounds=rounds, lr=0.01) for rounds in (1, 3, 4)}
    assert same_tensors(personal_state(found[3], 0), personal_state(found[1], 0))
    assert not same_tensors(personal_state(found[4], 0), personal_state(found[3], 0))
    distance = [
        sum((w - weights(found[1])[name]).square().sum() for name, w in personal_state(result, 0).items())
        for result in (found[1], found[4])
    ]
    assert distance[1] > distance[0] > 0, "the second participation goes on from the first"
    assert 2 not in committed(found[4]).manifest


# --- evaluation --------------------------------------------------------------------------------------------------


def one_hot(data_dir=None):
    """Four classes whose samples are their one-hot vectors; the test set holds 3, 1, 2 and 4 of them."""

    def samples(labels):
        labels = torch.tensor(labels)
        return ResidentSamples(torch.eye(4)[labels].view(-1, 1, 1, 4), labels, [0.0], [1.0])

    train = samples([3] * 4 + [3, 1] * 4 + [3, 2] * 4)
    return Dataset("one-hot", train, samples([0] * 3 + [1] + [2] * 2 + [3] * 4), num_classes=4, input_shape=(1, 1, 4))


def by_blocks(labels, num_clients, **_):
    """Classes {3}, {3, 1} and {3, 2}: 4, 5 and 6 of 10 test samples."""
    return [np.arange(4), np.arange(4, 12), np.arange(12, 20)][:num_clients]


def on_one_hot(num_classes, input_shape):
    return SplitModel(nn.Sequential(nn.Flatten()), 4, num_classes)


def test_the_figure_of_moon_by_hand(go):
    """Accuracies .4, .5 and .6 on the global test set: .5 +- .0816497 (ddof 0); missing classes cap them."""
    options = {"dataset": one_hot, "partition": by_blocks, "model": on_one_hot}
    result = go({"solo": {}}, **options, rounds=1, local_epochs=200, lr=0.5)
    found = result.metrics["personal_global"]
    assert found["accuracy"] == pytest.approx(0.5, abs=1e-12)
    assert found["std"] == pytest.approx(0.0816497, abs=1e-7)
    assert found["clients"] == 3
    assert found["untrained"] == 0


def test_each_client_is_evaluated_with_its_own_model_and_untrained_ones_with_the_initial(go):
    result = go({"solo": {}, Cohorts: {"rounds": [[0], [0]]}}, client_test_fraction=0.3, rounds=2, local_epochs=3)
    data = load_dataset("digits", None)
    partition = partition_of(result)
    start, trained = weights(result), personal_state(result, 0)
    hits, totals, on_test = 0, 0, []
    for client, part in enumerate(partition.test):
        model = result.model
        model.load_state_dict(start if client else trained)
        counts = evaluate(model, data.train, 10, torch.device("cpu"), indices=part)
        hits, totals = hits + int(counts.correct.sum()), totals + int(counts.total.sum())
        on_test.append(evaluate(model, data.test, 10, torch.device("cpu")).rates()["accuracy"])
    metrics = result.metrics
    assert metrics["personal"]["accuracy"] == pytest.approx(hits / totals, abs=1e-12)
    assert metrics["personal_global"]["accuracy"] == pytest.approx(np.mean(on_test), abs=1e-12)
    assert metrics["personal_global"]["std"] == pytest.approx(np.std(on_test), abs=1e-12)
    assert metrics["personal"]["untrained"] == metrics["personal_global"]["untrained"] == 2
    assert on_test[0] > on_test[1]
    assert on_test[1] == on_test[2]


def test_there_is_no_global_model_to_evaluate(go):
    metrics = go({"solo": {}}, client_test_fraction=0.2, rounds=1).summary["metrics"]
    assert metrics["global"] is None
    assert "stay on the clients" in metrics["global_reason"]
    assert "global_local" not in metrics


# --- beside other plugins ----------------------------------------------------------------------------------------


def test_a_step_does_not_wait_for_the_device(go):
    with steps_without_host_sync() as looked:
        go({"solo": {}}, rounds=1)
    assert looked
    assert not any(looked)


class Proximal(Plugin):
    @hookimpl
    def local_loss(self, step):
        return fedcore.Loss(proximal_term(step.parameters, step.reference))


class MovesTheMean(Plugin):
    server_optimizer = True


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (PersonalClassifier, ("'personalclassifier'", "'solo'")),
        (OwnsClassifier, ("'solo'",)),
        (CorrectsClassifier, ("'solo'",)),
        (Proximal, ("'solo'",)),
        (MovesTheMean, ("'solo'",)),
        ("norm-clip", ("'solo'",)),
        ("dp", ("'solo'",)),
    ],
)
def test_what_needs_a_shared_model_is_refused(go, other, named):
    with raises(PluginConflictError, *named):
        go({"solo": {}, (installed(other) if isinstance(other, str) else other): {}})


def test_there_are_no_options(go):
    with raises(UnknownNameError, "solo", "'mu'"):
        go({"solo": {"mu": 1}})
