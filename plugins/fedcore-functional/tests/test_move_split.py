"""The split between encoder and classifier, moved to an earlier linear layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedcore import ConfigError, SplitModel
from fedcore.models import build_model
from fedcore_functional import move_split
from tests.sentences import raises


def build(name, shape=(1, 28, 28), projection=False):
    return build_model(name, num_classes=10, input_shape=shape, seed=0, projection=projection)[0].eval()


@pytest.mark.parametrize(
    ("name", "shape", "projection", "layers", "width", "linear"),
    [
        ("mlp", (1, 8, 8), False, 2, 128, ["Linear", "ReLU", "Linear"]),
        ("fdcl-cnn", (1, 28, 28), False, 2, 1024, ["Linear", "ReLU", "Linear"]),
        ("fedlab-cnn", (1, 28, 28), False, 2, 1024, ["Linear", "ReLU", "Linear"]),
        ("fedlab-alexnet", (3, 32, 32), False, 3, 1024, ["Linear", "ReLU"] * 2 + ["Linear"]),
        ("fedcme-cnn", (1, 28, 28), False, 2, 512, ["Linear", "ReLU", "Linear"]),
        ("simple-cnn", (3, 32, 32), False, 2, 120, ["Linear", "ReLU", "Linear"]),
        ("simple-cnn", (3, 32, 32), False, 3, 400, ["Linear", "ReLU"] * 2 + ["Linear"]),
        ("simple-cnn", (3, 32, 32), True, 2, 84, ["Linear", "Linear"]),
        ("simple-cnn", (3, 32, 32), True, 4, 120, ["Linear", "ReLU", "Linear", "ReLU", "Linear", "Linear"]),
        ("resnet50", (3, 4, 4), True, 3, 2048, ["Linear", "ReLU", "Linear", "Linear"]),
    ],
)
def test_moved_split_computes_the_same(name, shape, projection, layers, width, linear):
    model, x = build(name, shape, projection), torch.randn(3, *shape)
    with torch.no_grad():
        before = model(x).logits
        parameters = [tensor.clone() for tensor in model.parameters()]
        move_split(model, layers, option="toy.layers")
        features, logits = model(x)
        assert torch.equal(logits, before)
        assert features.shape == (3, width)
        assert model.feature_dim == width
        assert torch.equal(model.classifier(features), logits)
    assert [type(layer).__name__ for layer in model.classifier] == linear
    assert len(parameters) == len(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(parameters, model.parameters()))


def test_an_activation_that_is_used_twice_moves_with_its_layer():
    """``named_children`` names a module once: the second ReLU stayed behind, and the logits were others."""
    relu = nn.ReLU()
    model, x = SplitModel(nn.Sequential(nn.Linear(4, 5), relu, nn.Linear(5, 6), relu), 6, 3), torch.randn(9, 4)
    before = model(x).logits
    move_split(model, 2, option="toy.layers")
    assert torch.equal(model(x).logits, before)
    assert [type(layer).__name__ for layer in model.classifier] == ["Linear", "ReLU", "Linear"]


def test_one_layer_changes_nothing():
    model = build("mlp", (1, 8, 8))
    names = list(model.state_dict())
    move_split(model, 1, option="toy.layers")
    assert list(model.state_dict()) == names


def test_dropout_before_the_head_moves_with_it():
    base = nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.ReLU(), nn.Dropout(0.9), nn.Linear(5, 6), nn.Tanh())
    model, x = SplitModel(base, 6, 3).train(), torch.randn(2, 4)
    move_split(model, 2, option="toy.layers")
    assert isinstance(model.classifier[0], nn.Dropout)
    assert torch.equal(model(x).features, model(x).features)


@pytest.mark.parametrize(
    ("name", "shape", "projection", "layers", "most"),
    [
        ("resnet50", (3, 8, 8), False, 2, 1),
        ("fdcl-cnn", (1, 28, 28), False, 3, 2),
        ("simple-cnn", (3, 32, 32), False, 4, 3),
        ("simple-cnn", (3, 32, 32), True, 6, 5),
        ("mlp", (1, 8, 8), False, 3, 2),
    ],
)
def test_too_many_layers_are_refused(name, shape, projection, layers, most):
    model = build(name, shape, projection)
    names = list(model.state_dict())
    with raises(ConfigError, f"toy.layers is {layers}", f"at most {most}"):
        move_split(model, layers, option="toy.layers")
    assert list(model.state_dict()) == names


def test_a_replaced_classifier_is_not_split():
    model = build("mlp", (1, 8, 8))
    model.classifier = nn.Bilinear(1, 1, 1)
    with raises(ConfigError, "toy.layers", "1"):
        move_split(model, 2, option="toy.layers")
