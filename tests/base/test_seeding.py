"""Random streams depend on what they are for and on nothing else."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest
import torch

from fedcore.base import seeding


def test_each_purpose_round_and_client_has_a_seed_of_its_own():
    seeds = [
        seeding.derive_seed(seed, purpose, round=number, client=client)
        for seed in (0, 1)
        for purpose in ("shuffle", "cohort")
        for number in (None, 0, 1)
        for client in (None, 0, 1)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_seed_stays_what_it_is():
    """Runs of earlier versions are resumed with it."""
    assert seeding.derive_seed(0, "partition") == seeding.derive_seed(0, "partition", round=None, client=None)
    key = b"7|shuffle|3|1"
    expected = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
    assert seeding.derive_seed(7, "shuffle", round=3, client=1) == expected


def test_streams_begin_anew():
    draws = [torch.rand(3, generator=seeding.generator(0, "a", client=1)).tolist() for _ in range(2)]
    assert draws[0] == draws[1]
    assert seeding.numpy_generator(0, "a").random() == seeding.numpy_generator(0, "a").random()
    assert seeding.numpy_generator(0, "a").random() != seeding.numpy_generator(0, "b").random()


@pytest.mark.parametrize("population", [10, 5_000, 100_000])
@pytest.mark.parametrize("count", [1, 3, 10])
def test_a_draw_is_the_head_of_a_permutation_whatever_the_size(population, count):
    expected = torch.randperm(population, generator=torch.Generator().manual_seed(5))[:count].tolist()
    assert seeding.choose(population, count, torch.Generator().manual_seed(5)) == expected


def test_the_global_generators_are_left_as_they_were():
    before = torch.get_rng_state()
    with seeding.random_stream(3):
        inside = torch.rand(2)
        assert torch.initial_seed() == 3
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(KeyError), seeding.random_stream(3):
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(2), inside)
    torch.set_rng_state(before)


def test_where_nobody_draws_outside_only_the_blocks_around_are_restored(monkeypatch):
    monkeypatch.setattr(seeding, "_nobody_outside", True)

    def draws():
        return random.random(), np.random.rand(), float(torch.rand(()))

    with seeding.host_generators_kept(), torch.random.fork_rng(devices=[]):
        with seeding.random_stream(1):
            whole = draws(), draws()
        with seeding.random_stream(1):
            first = draws()
            with seeding.random_stream(2):
                other = draws()
            assert (first, draws()) == whole
        with seeding.random_stream(2):
            assert draws() == other
