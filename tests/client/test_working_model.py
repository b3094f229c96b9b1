"""The working model: switching it as torch does, whatever its modules do at a switch, and what clients keep of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedcore.client.working_model import KeptModels, Modes
from fedcore.storage.serial import dumps, loads


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


def test_kept_models():
    weight, bias = torch.arange(6.0).reshape(2, 3), torch.tensor([1, 2])
    kept = KeptModels({"encoder.weight": weight}, {"classifier.bias": bias})
    again = KeptModels.unpack(loads(dumps(kept.pack(), None))[0])
    assert torch.equal(again.previous.pop("encoder.weight"), weight)
    assert torch.equal(again.personal.pop("classifier.bias"), bias)
    assert again == KeptModels.unpack({}) == KeptModels()
