"""The projection head, and the classifier behind it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fedcore import SplitModel, run
from fedcore.base import registry
from fedcore.base.errors import PluginConflictError
from tests import support
from tests.models.built import build, equal_states
from tests.sentences import raises


def test_projection_head_is_moons() -> None:
    model, task = build("simple-cnn", projection=True)
    head = model.encoder.projection
    assert [type(layer) for layer in head.children()] == [nn.Linear, nn.ReLU, nn.Linear]
    assert (head.l1.weight.shape, head.l2.weight.shape) == ((84, 84), (256, 84))
    assert model.classifier.weight.shape == (10, 256)
    assert (model.feature_dim, model.projection_width) == (256, 256)
    before = copy.deepcopy(model)
    task.ensure_projection(model)
    assert equal_states(before, model)


def test_another_width_conflicts() -> None:
    model, task = build(projection=True)
    with raises(PluginConflictError, "128", "256"):
        task.ensure_projection(model, 128)


def test_projection_does_not_overwrite_a_replaced_classifier() -> None:
    model, task = build()
    copied = copy.deepcopy(model)
    task.ensure_projection(copied)  # a copy still knows its classifier for its own
    model.classifier = nn.Sequential(nn.Linear(64, 20), nn.Linear(20, 10))
    with raises(PluginConflictError):
        task.ensure_projection(model)
    frozen, task = build()
    frozen.classifier.requires_grad_(False)
    with raises(PluginConflictError):
        task.ensure_projection(frozen)
    copied.classifier = nn.Sequential(nn.Linear(256, 20), nn.Linear(20, 10))
    task.ensure_projection(copied)  # nothing to do, so nothing to lose


class OfDoubles(nn.Module):
    """A network of float64 that takes images of float32."""

    def __init__(self, last=10) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, last)).double()

    def forward(self, x):
        return self.layers(x.double())


def split_of_doubles(num_classes, input_shape):
    return SplitModel(OfDoubles(12), 12, num_classes).double()


@pytest.mark.parametrize("factory", [OfDoubles, split_of_doubles])
def test_the_head_has_the_dtype_of_the_network(factory, monkeypatch, tmp_path) -> None:
    """A head of float32 ended in the advice to convert the network, whose forward pass then failed on its own."""
    monkeypatch.chdir(tmp_path)
    result = run(model=factory, projection=True, rounds=1, clients=2, workers=0, device="cpu", progress=False)
    head = [*result.model.encoder.projection.parameters(), *result.model.classifier.parameters()]
    assert {parameter.dtype for parameter in head} == {torch.float64}


class OfOneDtype(nn.Linear):
    """A network of any dtype that takes images of float32."""

    def forward(self, x):
        return super().forward(x.flatten(1).to(self.weight.dtype)).relu()


def of_doubles(num_classes, input_shape):
    return SplitModel(OfOneDtype(64, 16), 16, num_classes).double()


def of_bfloat16(num_classes, input_shape):
    return SplitModel(OfOneDtype(64, 16), 16, num_classes).bfloat16()


def of_float16(num_classes, input_shape):
    return SplitModel(OfOneDtype(64, 16), 16, num_classes).half()


@pytest.mark.sampled(46)
@pytest.mark.parametrize("factory", [of_doubles, of_bfloat16, of_float16])
@pytest.mark.parametrize("name", sorted({*registry.available("plugin")} - {"fedavg"}))
def test_every_method_trains_a_network_of_another_dtype(name, factory, tmp_path) -> None:
    """What methods add to the model or send is made in float32."""
    options = {"rounds": 2, "samples": 300, "local_epochs": 2, "public": "0.1"}
    method = (name, {"noise_multiplier": 0.0}) if name == "dp" else support.brief(name)  # refuses noise on two bytes
    model = support.run(tmp_path, method, model=factory, **options).model
    assert {parameter.dtype for parameter in model.parameters()} == {factory(10, ()).classifier.weight.dtype}
