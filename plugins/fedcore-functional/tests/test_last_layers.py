"""Which layers are the last ones of a model."""

from __future__ import annotations

from torch import nn

from fedcore import ConfigError, SplitModel
from fedcore.models import build_model
from fedcore_functional import may_draw, names_of_last_layers
from tests.sentences import raises


def model_of(name, projection=False, shape=(3, 32, 32)):
    return build_model(name, num_classes=10, input_shape=shape, seed=0, projection=projection)[0]


def names(model, count):
    return names_of_last_layers(model, count, option="toy.layers")


def layers(model, count):
    return sorted({name.rpartition(".")[0] for name in names(model, count)})


def test_the_layers_of_moons_network():
    model = model_of("simple-cnn", projection=True)
    assert names(model, 0) == []
    assert names(model, 1) == ["classifier.weight", "classifier.bias"]
    assert layers(model, 2) == ["classifier", "encoder.projection.l2"]
    assert layers(model, 3) == ["classifier", "encoder.projection.l1", "encoder.projection.l2"]
    assert layers(model, 4) == [*layers(model, 3)[:1], "encoder.base.fc2", *layers(model, 3)[1:]]
    assert names(model, 7) == list(model.state_dict())
    with raises(ConfigError, "toy.layers", "8", "7"):
        names(model, 8)


def test_a_residual_block_is_a_layer():
    model = model_of("resnet50", shape=(3, 8, 8))
    assert all(name.startswith(("classifier.", "encoder.base.layer4.2.")) for name in names(model, 2))
    assert "encoder.base.layer4.2.bn3.running_mean" in names(model, 2)
    assert any(name.startswith("encoder.base.layer4.1.") for name in names(model, 3))


def normalised(num_classes, input_shape):
    base = nn.Sequential(
        nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8), nn.PReLU()
    )
    return SplitModel(base, 8, num_classes)


def test_a_normalisation_belongs_to_the_layer_before_it():
    model = normalised(10, (1, 8, 8))
    assert layers(model, 2) == ["classifier", "encoder.base.5", "encoder.base.6"]
    assert names(model, 3) == list(model.state_dict()), "the first layer takes what is before it"


class Elsewhere(nn.Module):
    pass


def test_which_models_may_draw_random_numbers():
    for name, draws in (("mlp", False), ("simple-cnn", False), ("resnet50", False), ("alexnet", True)):
        assert may_draw(model_of(name, shape=(3, 16, 16))) == draws, name
    assert may_draw(SplitModel(Elsewhere(), 2, 2)), "nothing is known of a module from elsewhere"
