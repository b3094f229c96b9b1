"""Every module has its mode back after an evaluation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedcore.models.split import evaluating, tried


class Merges(nn.Linear):
    def train(self, mode=True):
        self.merged = not mode
        return super().train(mode)


def model(last):
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Dropout()), last)


@pytest.mark.parametrize("last", [nn.Linear(4, 2), Merges(4, 2)])
@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_an_evaluation_gives_every_module_its_mode_back(last, frozen):
    looked = model(last).train()
    looked[frozen].eval()
    before = [module.training for module in looked.modules()]

    def fails():
        with evaluating(looked):
            assert not any(module.training for module in looked.modules())
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fails()
    assert [module.training for module in looked.modules()] == before
    assert getattr(last, "merged", not last.training) is not last.training


def test_a_frozen_part_of_a_module_with_its_own_switch_stays_frozen():
    class Parent(nn.Sequential):
        def train(self, mode=True):
            return super().train(mode)

    looked = Parent(nn.Linear(4, 4), nn.BatchNorm1d(4)).train()
    looked[1].eval()
    with evaluating(looked):
        pass
    assert [module.training for module in looked.modules()] == [True, True, False]


class Remembers(nn.Linear):
    """Keeps a list of what it saw, and the last of it."""

    def __init__(self):
        super().__init__(4, 2)
        self.seen = []

    def forward(self, x):
        self.seen.append(x)
        self.last = x
        return super().forward(x)


def test_a_trial_leaves_nothing_in_a_network():
    network = Remembers()
    seen = network.seen
    with tried(network):
        network(torch.zeros(1, 4))
        assert len(seen) == 1
    assert network.seen is seen
    assert seen == []
    assert not hasattr(network, "last")
