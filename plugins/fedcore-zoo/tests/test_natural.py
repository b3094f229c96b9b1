"""Clients by the data's own sources."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedcore import ConfigError, RunConfig
from fedcore.data import load_dataset, make_partition
from tests.sentences import raises

DIGITS = load_dataset("digits")
SOURCES = (torch.arange(len(DIGITS.train)) * 7) % 9 * 100  # nine writers, numbered 0, 100, ...
DATASET = replace(DIGITS, sources=SOURCES)


def parts(clients, dataset=DATASET, **changes):
    found = make_partition(dataset, RunConfig(partition="natural", clients=clients, **{"seed": 3, **changes}))
    return [SOURCES[part] for part in found.train], found


def test_as_many_clients_as_sources_have_one_each_in_order():
    found, _ = parts(9)
    assert [part.unique().tolist() for part in found] == [[100 * k] for k in range(9)]
    assert sum(map(len, found)) == len(DIGITS.train)


def test_fewer_clients_share_whole_sources_evenly_and_at_random():
    found, _ = parts(4)
    held = [set(part.tolist()) for part in found]
    assert sorted(map(len, held)) == [2, 2, 2, 3]
    assert set.union(*held) == set(SOURCES.tolist())
    assert sum(map(len, held)) == 9  # nobody's samples are with two clients
    assert parts(4)[1].sha256 == parts(4)[1].sha256 != parts(4, seed=4)[1].sha256


def test_clients_have_the_names_of_their_sources():
    hospitals = [f"hospital {k}" for k in range(9)]
    named = replace(DATASET, sources=SOURCES // 100, source_names=tuple(hospitals))
    found, partition = parts(9, dataset=named)
    assert partition.names == partition.info["names"] == hospitals
    found, partition = parts(4, dataset=named)
    assert partition.names == ["+".join(f"hospital {k // 100}" for k in part.unique().tolist()) for part in found]
    assert "names" not in parts(2, dataset=named)[1].info, "nine names of two clients are no names"
    unseen = parts(9, dataset=named, unseen_clients="hospital 7,hospital 2", client_test_fraction=0.2)[1]
    assert unseen.names[7:] == ["hospital 2", "hospital 7"]
    assert (named.sources[unseen.test[7]] == 2).all()


def test_with_samples_and_hold_outs_the_sources_stay_apart():
    found, partition = parts(9, samples=300, client_test_fraction=0.2)
    assert [part.unique().tolist() for part in found] == [[100 * k] for k in range(9)]
    assert [SOURCES[part].unique().tolist() for part in partition.test] == [[100 * k] for k in range(9)]


def test_what_cannot_be_dealt_is_refused():
    with raises(ConfigError, "--clients", "10", "9"):
        parts(10)
    with raises(ConfigError):
        parts(4, dataset=DIGITS)
    with raises(ConfigError, 8, "3 sources"):
        parts(9, dataset=replace(DATASET, sources=SOURCES // 100, source_names=("Basel", "Bern", "Zug")))
