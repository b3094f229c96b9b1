"""Networks that give logits: their last linear layer becomes the classifier."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedcore
from fedcore import ConfigError, PluginContractError
from fedcore.base import registry
from fedcore.models import build_model
from tests.sentences import raises


class Branches(nn.Module):
    """The classifier is registered first, and has no bias."""

    def __init__(self, num_classes):
        super().__init__()
        self.head = nn.Linear(6, num_classes, bias=False)
        self.one, self.two = nn.Linear(5, 4), nn.Linear(5, 2)

    def forward(self, x):
        return self.head(torch.cat([self.one(x).relu(), self.two(x).tanh()], dim=1))


class Doubled(Branches):
    def forward(self, x):
        return 2 * super().forward(x)


class Fixed(nn.Sequential):
    """Without arguments that a factory is called with."""

    def __init__(self, hidden=7):
        super().__init__(nn.Linear(5, hidden), nn.ReLU(), nn.Linear(hidden, 3))


def build(factory, **options):
    with registry.lent({("model", "object:Net"): factory}):
        defaults = {"num_classes": 3, "input_shape": (5,), "seed": 1, "projection": False}
        return build_model("object:Net", **(defaults | options))[0]


def test_the_same_logits_from_features_and_classifier():
    model = build(Branches).eval()
    x = torch.randn(4, 5)
    features, logits = model(x)
    base = model.encoder.base
    assert torch.equal(features, torch.cat([base.one(x).relu(), base.two(x).tanh()], dim=1))
    assert torch.equal(logits, features @ model.classifier.weight.T)
    assert model.classifier.bias is None
    assert isinstance(base.head, nn.Identity)


@pytest.mark.parametrize(
    "factory",
    [Fixed, lambda classes, shape: nn.Sequential(nn.Linear(shape[0], 7), nn.ReLU(), nn.Linear(7, classes))],
)
def test_factories_with_and_without_arguments(factory):
    assert build(factory)(torch.randn(2, 5)).features.shape == (2, 7)


def lazy():
    return nn.Sequential(nn.LazyLinear(7), nn.ReLU(), nn.LazyLinear(3))


@pytest.mark.parametrize("factory", [Fixed, lazy])
def test_weights_depend_on_the_seed_alone(factory):
    torch.manual_seed(5)
    one = build(factory).state_dict()
    torch.manual_seed(6)
    before = torch.get_rng_state()
    assert all(torch.equal(tensor, one[name]) for name, tensor in build(factory).state_dict().items())
    assert torch.equal(before, torch.get_rng_state())


class Alias(nn.Module):
    """Lists the last layer a second time."""

    def __init__(self, num_classes):
        super().__init__()
        self.fc = nn.Linear(5, num_classes)
        self.layers = nn.ModuleList([nn.Linear(5, 5), self.fc])

    def forward(self, x):
        return self.layers[1](self.layers[0](x))


def static(num_classes):
    norm = nn.BatchNorm1d(7, track_running_stats=False)
    return nn.Sequential(nn.Linear(5, 7), norm, nn.Linear(7, num_classes))


class Named(nn.Linear):
    """Returns a mapping, as many libraries' networks do."""

    def forward(self, x):
        return {"logits": super().forward(x)}


@pytest.mark.parametrize(
    ("factory", "named"),
    [
        (Alias, ("'fc'", "'layers.1'")),
        (static, ()),
        (Doubled, ()),
        (
            lambda: nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.LogSoftmax(dim=1)),
            ("log_softmax",),
        ),
        (lambda: torch.jit.trace(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), torch.zeros(1, 5)), ("torch.jit",)),
        (lambda num_classes: nn.Linear(5, num_classes), ()),
        (lambda: nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 4)), ("4", "3")),
        (lambda: nn.Linear(8, 3), ("5",)),
        (lambda: nn.Sequential(nn.Linear(5, 7), Named(7, 3)), ("dict",)),
    ],
)
def test_other_networks_are_refused(factory, named):
    with raises(ConfigError, *named):
        build(factory)


class Cosine(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(nn.functional.normalize(x), nn.functional.normalize(self.weight))


class SameAsLinear(nn.Linear):
    """As timm's and others' subclasses."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (Cosine(7, 3), "Cosine"),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(7, 3)), "ParametrizedLinear"),
        (nn.Linear(7, 3).requires_grad_(False), "frozen"),
        (SameAsLinear(7, 3), ""),
    ],
)
def test_a_head_that_a_fresh_layer_would_lose_is_refused(layer, named):
    def network():
        return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), layer)

    if not named:
        assert build(network).classifier is layer
        return
    with raises(ConfigError, "'2'", named, "model.classifier = layer"):
        build(network)


def test_images_that_are_too_small_are_told():
    def pooled(num_classes):
        return nn.Sequential(nn.Conv2d(1, 2, 9), nn.Flatten(), nn.Linear(2, num_classes))

    with raises(ConfigError, "1", "8"):
        build(pooled, input_shape=(1, 8, 8))


@pytest.mark.parametrize(
    ("factory", "sample", "named"),
    [
        (Fixed, torch.zeros(1, 5, dtype=torch.float64), ("x.float",)),
        (lambda: nn.Sequential(nn.Conv1d(3, 2, 3)), torch.zeros(1, 1, 3, 9), ()),
    ],
)
def test_samples_that_the_network_does_not_take_are_told(factory, sample, named):
    with raises(ConfigError, *named):
        build(factory, sample=sample, input_shape=tuple(sample.shape[1:]))


def test_arguments_of_other_names_are_told():
    with raises(PluginContractError, "3", "5"):
        build(lambda features, outputs: nn.Sequential(nn.Linear(features, outputs)))


def test_a_network_in_the_place_of_its_class_is_told():
    with raises(PluginContractError):
        build(Fixed())


@pytest.mark.parametrize("network", [Fixed(), fedcore.SplitModel(nn.Identity(), 5, 3)])
def test_a_factory_that_returns_one_network_again_is_told(network):
    """A second run would start from the weights of the first; and a network that was split has no last layer."""
    build(lambda: network)
    with raises(PluginContractError):
        build(lambda: network)


def test_a_network_starts_with_the_weights_of_its_last_layer():
    """A trained network that is given as an object would else lose its head."""

    def network():
        trained = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
        with torch.no_grad():
            trained[2].weight.fill_(0.5)
        return trained

    model = build(network)
    assert torch.equal(model.classifier.weight, torch.full((3, 7), 0.5))
    assert torch.equal(model.network()[2].weight, model.classifier.weight)


class Auxiliary(Fixed):
    """Returns a second output in training mode."""

    def forward(self, x):
        logits = super().forward(x)
        return (logits, logits) if self.training else logits


def split_auxiliary(num_classes, input_shape):
    return fedcore.SplitModel(Auxiliary(), 3, num_classes)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.last = nn.Embedding(5, 7, sparse=True), nn.Linear(7, 3)

    def forward(self, x):
        return self.last(self.rows((x > 0).long()).mean(1))


class Extra(Fixed):
    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        pass


@pytest.mark.parametrize(
    ("network", "named"),
    [
        (Auxiliary, ("aux_logits=False",)),
        (split_auxiliary, ("aux_logits=False",)),
        (Sparse, ("'encoder.base.rows'", "sparse=False")),
        (Extra, ("'encoder.base._extra_state'", "get_extra_state")),
    ],
)
def test_networks_that_clients_cannot_train_are_refused_before_the_run(network, named):
    x = torch.randn(40, 5)
    labels = torch.arange(40) % 3
    with raises(ConfigError, *named):
        fedcore.run(model=network, dataset=(x, labels, x, labels), clients=2, rounds=1, workers=0, progress=False)
