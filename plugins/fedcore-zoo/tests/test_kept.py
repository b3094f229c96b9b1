"""Networks that keep objects, in which a client finds what the clients before it in its process left."""

import warnings

import pytest
import torch
from torch import nn

import fedcore
from tests.sentences import warns

OPTIONS = {"dataset": "digits", "clients": 2, "samples": 100, "rounds": 1, "progress": False}


class Meter:
    total = 0


class KeepsAMeter(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
        self.meter = Meter()

    def forward(self, x):
        self.meter.total += len(x)
        return super().forward(x)


class KeepsAGenerator(KeepsAMeter):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        noise = torch.rand(64, generator=self.generator) if self.training else 0
        return nn.Sequential.forward(self, self[0](x) + noise)


class KeepsANumber(KeepsAMeter):
    def __init__(self):
        super().__init__()
        self.calls, self.sizes = 0, []

    def forward(self, x):
        self.calls += 1
        self.sizes.append(len(x))
        return nn.Sequential.forward(self, x)


@pytest.mark.parametrize(("network", "name"), [(KeepsAMeter, "KeepsAMeter.meter"), (KeepsAGenerator, "generator")])
def test_an_object_that_training_changes_is_noted(tmp_path, network, name):
    with warns(RuntimeWarning, name):
        fedcore.run(model=network, out=tmp_path / "run", **OPTIONS)


def test_what_each_client_has_anew_is_not_noted(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fedcore.run(model=KeepsANumber, out=tmp_path / "run", **OPTIONS)
