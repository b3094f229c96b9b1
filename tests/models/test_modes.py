"""Modes of modules: switched as torch does, whatever modules do at a switch, and restored after an evaluation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedcore.models.modes import Modes, evaluating


class Merges(nn.Linear):
    def train(self, mode=True):
        self.merged = not mode
        return super().train(mode)


def model(last):
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Dropout()), last)


@pytest.mark.parametrize("last", [nn.Linear(4, 2), Merges(4, 2)])
def test_all_modules_are_switched(last):
    switched = model(last)
    modes = Modes(switched)
    for training in (False, True, False):
        modes.switch(training=training)
        assert {module.training for module in switched.modules()} == {training}
    assert torch.equal(switched(torch.ones(3, 4)), switched(torch.ones(3, 4)))  # no dropout


def test_what_modules_do_at_a_switch_is_done():
    last = Merges(4, 2)
    modes = Modes(model(last))
    modes.switch(training=False)
    assert last.merged
    modes.switch(training=True)
    assert not last.merged


def test_a_switch_replaced_on_the_object_is_called():
    last, calls = nn.Linear(4, 2), []
    last.train = lambda mode=True: calls.append(mode)
    Modes(model(last)).switch(training=True)
    assert calls == [True]


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
