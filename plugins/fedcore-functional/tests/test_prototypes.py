"""What FedProc and FedECCR share, against independent NumPy references in float64."""

from __future__ import annotations

import doctest
from functools import reduce
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedcore import Answer, ClientUpdate, RoundFailedError
from fedcore_functional import PrototypeExchange, PrototypeOptions, prototypes
from fedcore_functional.prototypes import (
    add_prototypes,
    check_prototypes,
    class_prototypes,
    first_prototypes,
    mean_over_holders,
    prototype_distance,
    random_prototypes,
)
from tests.sentences import raises

C, D = 5, 3


def client(seed, labels, weights="clients"):
    """Features (n, D) float32 and labels of a client; what it sends."""
    features = torch.randn(len(labels), D, generator=torch.Generator().manual_seed(seed))
    return features, torch.tensor(labels), class_prototypes(features, torch.tensor(labels), C, weights=weights)


# Class 4 is nobody's, class 3 one client's and one sample, class 0 everybody's.
LABELS = [[0, 0, 1], [0, 2, 2, 2], [0, 1, 3]]
CLIENTS = [client(seed, labels) for seed, labels in enumerate(LABELS, 1)]
BY_SAMPLES = [client(seed, labels, "samples") for seed, labels in enumerate(LABELS, 1)]


def numpy_mean(clients):
    """{class: unweighted mean over the clients that hold it of their class means}."""
    found = {}
    for c in range(C):
        means = [
            np.mean([z for z, y in zip(features.numpy().astype(np.float64), labels.tolist()) if y == c], axis=0)
            for features, labels, _ in clients
            if c in labels.tolist()
        ]
        if means:
            found[c] = sum(means) / len(means)
    return found


def numpy_mean_of_samples(clients):
    """{class: mean of all its samples, whoever holds them}."""
    features = np.concatenate([z.numpy().astype(np.float64) for z, _, _ in clients])
    labels = np.concatenate([y.numpy() for _, y, _ in clients])
    return {c: features[labels == c].mean(axis=0) for c in range(C) if (labels == c).any()}


def global_of(clients, previous=None):
    return mean_over_holders(reduce(add_prototypes, (sent for _, _, sent in clients), {}), previous)


def test_doctests():
    result = doctest.testmod(prototypes)
    assert result.attempted > 4
    assert result.failed == 0


def test_the_mean_is_over_the_holders_and_unweighted():
    result, expected = global_of(CLIENTS), numpy_mean(CLIENTS)
    assert result["known"].tolist() == [c in expected for c in range(C)] == [True, True, True, True, False]
    for c, mean in expected.items():
        np.testing.assert_allclose(result["prototypes"][c].numpy(), mean, rtol=1e-6)
    assert result["prototypes"].dtype == torch.float32


def test_by_samples_it_is_the_mean_of_all_samples_of_the_class():
    result, expected = global_of(BY_SAMPLES), numpy_mean_of_samples(BY_SAMPLES)
    assert result["known"].tolist() == [c in expected for c in range(C)] == [True, True, True, True, False]
    for c, mean in expected.items():
        np.testing.assert_allclose(result["prototypes"][c].numpy(), mean, rtol=1e-6)
    assert result["prototypes"].dtype == torch.float32
    assert not np.allclose(result["prototypes"][0].numpy(), numpy_mean(BY_SAMPLES)[0], rtol=0.01)


def test_three_samples_weigh_three_times_one():
    heavy, light = ({"prototypes": torch.tensor([[x]]), "counts": torch.tensor([n])} for x, n in ((1.0, 3), (5.0, 1)))
    means = mean_over_holders(add_prototypes(add_prototypes({}, heavy), light))
    assert (means["prototypes"].tolist(), means["known"].tolist()) == ([[2.0]], [True])


@pytest.mark.parametrize("clients", [CLIENTS, BY_SAMPLES], ids=["clients", "samples"])
def test_a_class_that_nobody_holds_keeps_its_previous_prototype(clients):
    previous = {"prototypes": torch.full((C, D), 7.0), "known": torch.tensor([True, True, False, False, True])}
    result = global_of(clients[:1], previous)  # holds 0 and 1
    assert result["known"].tolist() == [True, True, False, False, True]
    assert torch.equal(result["prototypes"][4], previous["prototypes"][4])
    np.testing.assert_allclose(result["prototypes"][1].numpy(), numpy_mean(clients[:1])[1], rtol=1e-6)


@pytest.mark.parametrize("clients", [CLIENTS, BY_SAMPLES], ids=["clients", "samples"])
def test_what_stands_in_a_row_that_is_not_held_does_not_matter(clients):
    poisoned = {**clients[0][2], "prototypes": clients[0][2]["prototypes"].clone()}
    poisoned["prototypes"][[2, 3, 4]] = torch.nan
    one = mean_over_holders(add_prototypes(add_prototypes({}, poisoned), clients[1][2]))
    other = global_of(clients[:2])
    assert torch.equal(one["prototypes"], other["prototypes"])
    assert torch.equal(one["known"], other["known"])


@pytest.mark.parametrize("clients", [CLIENTS, BY_SAMPLES], ids=["clients", "samples"])
def test_one_client_is_its_own_mean(clients):
    assert torch.equal(global_of(clients[:1])["prototypes"], clients[0][2]["prototypes"])


@pytest.mark.parametrize("clients", [CLIENTS, BY_SAMPLES], ids=["clients", "samples"])
def test_equal_clients_return_exactly_themselves(clients):
    assert torch.equal(global_of([clients[0]] * 3)["prototypes"], clients[0][2]["prototypes"])


def test_adding_changes_nothing_that_was_given():
    total = add_prototypes({}, CLIENTS[0][2])
    before = {name: tensor.clone() for name, tensor in total.items()}
    add_prototypes(total, CLIENTS[1][2])
    assert all(torch.equal(total[name], before[name]) for name in total)


def test_first_prototypes_skip_nobody_and_need_somebody():
    answers = (Answer(i, sent) for i, (_, _, sent) in enumerate(CLIENTS))
    assert torch.equal(first_prototypes(answers)["prototypes"], global_of(CLIENTS)["prototypes"])
    with raises(RoundFailedError):
        first_prototypes(iter(()))


def test_random_prototypes_are_unit_vectors_fixed_by_the_generator():
    one, again = (random_prototypes(C, 64, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one["prototypes"], again["prototypes"])
    assert torch.allclose(one["prototypes"].norm(dim=1), torch.ones(C))
    assert one["known"].all()
    assert len(torch.unique(one["prototypes"], dim=0)) == C


# --- what a client may send -----------------------------------------------------------------------------------

SENT = BY_SAMPLES[1][2]  # 4 samples: one of class 0, three of class 2


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"counts": torch.tensor([5, 0, -1, 0, 0])}, ("'counts'", -1, 0)),
        ({"counts": torch.tensor([1, 0, 900, 0, 0])}, ("'counts'", 901, 4)),
        ({"counts": torch.zeros(C, dtype=torch.int64)}, ("'counts'", 0, 4)),
        ({"counts": torch.full((C,), 2**62)}, ("'counts'", C * 2**62, 4)),
        ({"counts": torch.tensor([1.0, 0, 3, 0, 0])}, ("'counts'", "(5,) torch.float32", "(5,) torch.int64")),
        ({"counts": torch.tensor(4)}, ("'counts'", "() torch.int64", "(5,) torch.int64")),
        ({"prototypes": torch.zeros(C, D + 1)}, ("'prototypes'", "(5, 4)", "(5, 3)")),
        ({"known": SENT["counts"] > 0}, ("'known'",)),
    ],
)
def test_counts_that_no_client_can_have(changed, named):
    check_prototypes(SENT, C, D, weights="samples", samples=4)
    with raises(ValueError, *named):
        check_prototypes({**SENT, **changed}, C, D, weights="samples", samples=4)


@pytest.mark.parametrize(("weights", "named"), [("clients", "'counts'"), ("samples", "'counts'")])
def test_each_way_to_weigh_refuses_the_others_message(weights, named):
    other = client(1, [0], {"clients": "samples", "samples": "clients"}[weights])[2]
    with raises(ValueError, named):
        check_prototypes(other, C, D, weights=weights, samples=1)


# --- the exchange ---------------------------------------------------------------------------------------------


def server_of(**given):
    return SimpleNamespace(**{"state": {}, "num_classes": C, "feature_dim": D, **given})


def update_of(sent, samples):
    return ClientUpdate(client=0, model={}, samples=samples, steps=1, lr=0.1, momentum=0.0, payload=dict(sent))


@pytest.mark.parametrize(("weights", "clients"), [("clients", CLIENTS), ("samples", BY_SAMPLES)])
def test_a_first_round_of_the_task_sends_nothing_down_and_collects(weights, clients):
    """The server has nobody to ask, so it would fail if it did."""
    exchange = PrototypeExchange(PrototypeOptions(first_round="task", prototype_weights=weights))
    server = server_of()
    exchange.begin_round(server)
    assert exchange.broadcast(server) is None
    for _, labels, sent in clients:
        exchange.accumulate(server, [update_of(sent, len(labels))])
    exchange.end_round(server)
    assert set(server.state) == {"prototypes", "known"}
    expected = global_of(clients)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in exchange.broadcast(server).items())


def test_a_round_that_nothing_came_of_leaves_the_prototypes_as_they_are():
    exchange, server = PrototypeExchange(PrototypeOptions(first_round="task")), server_of()
    exchange.end_round(server)
    assert server.state == {}
    server.state.update(global_of(CLIENTS))
    exchange.end_round(server)
    assert torch.equal(server.state["prototypes"], global_of(CLIENTS)["prototypes"])


def test_counts_beyond_the_clients_samples_are_refused_before_they_are_added():
    exchange, server = PrototypeExchange(PrototypeOptions(prototype_weights="samples")), server_of()
    with raises(ValueError, "4", "3"):
        exchange.accumulate(server, [update_of(SENT, 3)])
    assert server.state == {}


def test_a_client_that_received_nothing_has_nothing_to_contrast_with():
    exchange = PrototypeExchange(PrototypeOptions(first_round="task"))
    idle = SimpleNamespace(received={}, scratch={})
    exchange.begin_local(idle)
    assert exchange.ready(idle) is None
    busy = SimpleNamespace(received=global_of(CLIENTS), scratch={})
    exchange.begin_local(busy)
    assert exchange.ready(busy).known.tolist() == [True, True, True, True, False]


def test_first_prototypes_of_no_use_are_refused():
    with pytest.raises(ValueError, match="init=random says what first_round=contrast starts from; give both, or leave"):
        PrototypeOptions(first_round="task", init="random")
    PrototypeOptions(first_round="contrast", init="random")


# --- the distance from prototypes ---------------------------------------------------------------------------


@pytest.mark.parametrize("known", [None, [True, False, True, True, False]])
def test_distance_and_gradient_against_numpy(known):
    """Unknown rows may hold NaN; their samples contribute nothing, but count in the mean."""
    rng = np.random.default_rng(0)
    z, c, y = rng.standard_normal((6, D)), rng.standard_normal((C, D)), np.array([0, 1, 1, 2, 3, 4])
    held = np.ones(6) if known is None else np.array(known)[y]
    if known is not None:
        c[~np.array(known)] = np.nan
    features = torch.tensor(z, requires_grad=True)
    mask = None if known is None else torch.tensor(known)
    value = prototype_distance(features, torch.tensor(y), torch.tensor(c), mask)
    value.backward()
    apart = np.where(held[:, None] > 0, z - c[y], 0.0)
    assert value.item() == pytest.approx((apart**2).sum() / (6 * D), rel=1e-12)
    np.testing.assert_allclose(features.grad, 2 * apart / (6 * D), rtol=1e-12)
