"""A tensor's memory is the same for every client, as long as its shape is."""

from __future__ import annotations

import torch

from fedcore.client.fixed_tensors import FixedTensors


def test_values_are_renewed_in_the_same_memory():
    held = FixedTensors()
    first = held.fixed("y", torch.tensor([1, 2]))
    again = held.fixed("y", torch.tensor([3, 4]))
    assert again is first
    assert first.tolist() == [3, 4]
    assert held.fixed("x", torch.tensor([3, 4])) is not first
    wider = held.fixed("y", torch.tensor([5, 6, 7]))
    assert wider is not first
    assert wider.tolist() == [5, 6, 7]
