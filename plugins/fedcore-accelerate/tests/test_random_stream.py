"""A stream of random numbers that goes on from block to block."""

from __future__ import annotations

import pytest
import torch

from fedcore.client import random_stream
from fedcore_accelerate.random_stream import RandomStream


def test_a_stream_in_blocks_draws_what_one_block_draws():
    with random_stream(7):
        whole = torch.rand(6)
    stream, outside = RandomStream(7), torch.get_rng_state()
    parts = []
    for _ in range(3):
        with stream.running():
            parts.append(torch.rand(2))
        torch.rand(1)  # somebody else
    torch.set_rng_state(outside)
    assert torch.equal(torch.cat(parts), whole)


def test_a_stream_restores_the_generator_when_its_block_raises():
    stream, outside = RandomStream(7), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="shape"), stream.running():
        torch.rand(3).view(2)
    assert torch.equal(torch.get_rng_state(), outside)
