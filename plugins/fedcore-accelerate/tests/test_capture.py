"""Training steps that can be captured: what hooks look at, and that none waits for the device (on CPU).

What needs a GPU is in test_cuda.py.
"""

import pytest
import torch

from fedcore import Loss, Plugin, hookimpl
from fedcore.client import OneByOne
from fedcore_accelerate.captured_steps import take_watched_step
from fedcore_testing import HostSync, forbid_host_sync, steps_without_host_sync
from fedcore_testing.checks.runners import steps_taken_by
from fedcore_testing.problems import few_digits
from tests.support import brief

LOOKS = {  # methods whose packages do not ask this themselves
    (): set(),
    ("fedprox",): set(),
    ("moon",): {"client"},
    ("fedproc",): {"client", "round"},
    ("fedeccr",): {"client", "round"},
    ("fdcl",): {"client"},
    ("fedcme",): {"client"},
    ("fedcd",): {"client", "round"},
    ("ccvr",): set(),
    ("fedavgm",): set(),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("plugins", LOOKS, ids="+".join)
def test_a_step_neither_waits_for_the_device_nor_looks_at_more_than_it_needs(go, plugins):
    one_by_one = steps_taken_by(lambda config, dataset: OneByOne())  # in a series they are not looked at
    with one_by_one, steps_without_host_sync() as looked:
        go(*map(brief, plugins), dataset=few_digits, batch_size=8, rounds=2, local_epochs=2)
    assert max(looked, key=len) == LOOKS[plugins]


@pytest.mark.parametrize(
    ("read", "found"),
    [
        (lambda step: step.progress, {"round"}),
        (lambda step: step.epoch, {"epoch"}),
        (lambda step: step.client.n, {"client"}),
        (lambda step: step.client.steps, {"client", "batch"}),
        (lambda step: step.client.forward(), {"client", "batch"}),
        (lambda step: step.random("noise").__enter__(), {"batch"}),
        (lambda step: step.reference[0], set()),
        (lambda step: (step.x, step.y, step.features, step.logits, step.indices, step.model, step.rounds), set()),
    ],
)
def test_what_a_hook_looks_at_is_noted(go, monkeypatch, read, found):
    seen = []

    class Looks(Plugin):
        @hookimpl
        def local_loss(self, step):
            read(step)
            return Loss(step.features.square().mean())

    def watching(*arguments):
        seen.append(take_watched_step(*arguments))

    monkeypatch.setattr("fedcore.client.runner.take_step", watching)
    go(Looks)
    assert seen[0] == found


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: torch.bincount(x.long()),
        lambda x: x.unique(),
        lambda x: 1 if x.sum() > 0 else 0,
        lambda x: torch.equal(x, x),
        lambda x: x * torch.tensor([1.0, 2.0]),
    ],
)
def test_waiting_for_the_device_is_found(compute):
    x = torch.ones(2)
    compute(x)
    with forbid_host_sync(), pytest.raises(HostSync, match=r"aten::|made from Python"):
        compute(x)
