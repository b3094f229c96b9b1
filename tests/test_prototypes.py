"""What FedProc and FedECCR share, against independent NumPy references in float64."""

from __future__ import annotations

import doctest
from functools import reduce

import numpy as np
import pytest
import torch

from fedcore import prototypes
from fedcore.errors import RoundFailedError
from fedcore.prototypes import (
    add_prototypes,
    class_prototypes,
    first_prototypes,
    mean_over_holders,
    random_prototypes,
)
from fedcore.types import Answer

C, D = 5, 3


def client(seed, labels):
    """Features (n, D) float32 and labels of a client; what it sends."""
    features = torch.randn(len(labels), D, generator=torch.Generator().manual_seed(seed))
    return features, torch.tensor(labels), class_prototypes(features, torch.tensor(labels), C)


# Class 4 is nobody's, class 3 one client's and one sample, class 0 everybody's.
CLIENTS = [client(1, [0, 0, 1]), client(2, [0, 2, 2, 2]), client(3, [0, 1, 3])]


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


def test_a_class_that_nobody_holds_keeps_its_previous_prototype():
    previous = {"prototypes": torch.full((C, D), 7.0), "known": torch.tensor([True, True, False, False, True])}
    result = global_of(CLIENTS[:1], previous)  # holds 0 and 1
    assert result["known"].tolist() == [True, True, False, False, True]
    assert torch.equal(result["prototypes"][4], previous["prototypes"][4])
    np.testing.assert_allclose(result["prototypes"][1].numpy(), numpy_mean(CLIENTS[:1])[1], rtol=1e-6)


def test_what_stands_in_a_row_that_is_not_known_does_not_matter():
    poisoned = {**CLIENTS[0][2], "prototypes": CLIENTS[0][2]["prototypes"].clone()}
    poisoned["prototypes"][~poisoned["known"]] = torch.nan
    one = mean_over_holders(add_prototypes(add_prototypes({}, poisoned), CLIENTS[1][2]))
    other = global_of(CLIENTS[:2])
    assert torch.equal(one["prototypes"], other["prototypes"])
    assert torch.equal(one["known"], other["known"])


def test_one_client_is_its_own_mean():
    assert torch.equal(global_of(CLIENTS[:1])["prototypes"], CLIENTS[0][2]["prototypes"])


def test_equal_clients_return_exactly_themselves():
    assert torch.equal(global_of([CLIENTS[0]] * 3)["prototypes"], CLIENTS[0][2]["prototypes"])


def test_adding_changes_nothing_that_was_given():
    total = add_prototypes({}, CLIENTS[0][2])
    before = {name: tensor.clone() for name, tensor in total.items()}
    add_prototypes(total, CLIENTS[1][2])
    assert all(torch.equal(total[name], before[name]) for name in total)


def test_first_prototypes_skip_nobody_and_need_somebody():
    answers = (Answer(i, sent) for i, (_, _, sent) in enumerate(CLIENTS))
    assert torch.equal(first_prototypes(answers)["prototypes"], global_of(CLIENTS)["prototypes"])
    with pytest.raises(RoundFailedError, match="no client answered"):
        first_prototypes(iter(()))


def test_random_prototypes_are_unit_vectors_fixed_by_the_generator():
    one, again = (random_prototypes(C, 64, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one["prototypes"], again["prototypes"])
    assert torch.allclose(one["prototypes"].norm(dim=1), torch.ones(C))
    assert one["known"].all()
    assert len(torch.unique(one["prototypes"], dim=0)) == C
