"""Clients by the data's own sources."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedcore import ConfigError, RunConfig
from fedcore.data import load_dataset, make_partition

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


def test_with_samples_and_hold_outs_the_sources_stay_apart():
    found, partition = parts(9, samples=300, client_test_fraction=0.2)
    assert [part.unique().tolist() for part in found] == [[100 * k] for k in range(9)]
    assert [SOURCES[part].unique().tolist() for part in partition.test] == [[100 * k] for k in range(9)]


def test_what_cannot_be_dealt_is_refused():
    with pytest.raises(ConfigError, match=r"--clients is 10, but the samples come from 9 sources; write --clients 9"):
        parts(10)
    with pytest.raises(ConfigError, match="does not say where its samples come from"):
        parts(4, dataset=DIGITS)
