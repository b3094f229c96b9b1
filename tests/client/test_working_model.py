"""The working model: what clients keep of it."""

from __future__ import annotations

import torch

from fedcore.base.serial import dumps, loads
from fedcore.client.working_model import KeptModels


def test_kept_models():
    weight, bias = torch.arange(6.0).reshape(2, 3), torch.tensor([1, 2])
    kept = KeptModels({"encoder.weight": weight}, {"classifier.bias": bias})
    again = KeptModels.unpack(loads(dumps(kept.pack(), None))[0])
    assert torch.equal(again.previous.pop("encoder.weight"), weight)
    assert torch.equal(again.personal.pop("classifier.bias"), bias)
    assert again == KeptModels.unpack({}) == KeptModels()
