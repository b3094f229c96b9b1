"""Building the model: what plugins make of it fits together, or is refused before the run starts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedcore import Loss, Plugin, SplitModel, hookimpl
from fedcore.base.errors import ConfigError, PluginContractError
from tests.sentences import raises
from tests.support import model_bytes


class Critic(Plugin):
    """Has a module beside encoder and classifier, for the features as they are when it is built."""

    @hookimpl
    def configure_model(self, model, task):
        with task.random("critic"):
            model.critic = nn.Linear(model.feature_dim, 1)

    @hookimpl
    def local_loss(self, step):
        return Loss(step.model.critic(step.features).mean())


class Forgets(Plugin):
    """Makes the features narrower and leaves the classifier as it is."""

    @hookimpl
    def configure_model(self, model, task):
        with task.random("narrow"):
            model.encoder.add_module("narrow", nn.Linear(model.feature_dim, 6))


class Hides(Plugin):
    """Makes the features narrower, with a classifier that fits, and does not tell ``feature_dim``."""

    @hookimpl
    def configure_model(self, model, task):
        with task.random("narrow"):
            model.encoder.add_module("narrow", nn.Linear(model.feature_dim, 6))
            model.classifier = nn.Linear(6, task.num_classes)


def test_a_width_that_feature_dim_does_not_tell(go):
    with raises(PluginContractError, "6", "'hides'", "'critic'"):
        go(Hides, Critic, rounds=1)


def test_an_encoder_that_the_classifier_does_not_fit_names_the_plugin(go):
    with raises(ConfigError, "'forgets'"):
        go(Forgets, rounds=1)


class Moved(nn.Module):
    """A module around the encoder, which adds a vector to its features."""

    def __init__(self, base, width):
        super().__init__()
        self.base, self.by = base, nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return self.base(x) + self.by


class Moves(Plugin):
    @hookimpl
    def configure_model(self, model):
        model.encoder = Moved(model.encoder, model.feature_dim)


def test_an_encoder_that_does_not_run_what_is_appended_to_it_is_refused(go):
    """The unit length of FedNH's features, or a projection of their own width, would be left out without a word."""
    with raises(PluginContractError, "'moves'", "nn.Sequential"):
        go(Moves, rounds=1)


class Scaled(SplitModel):
    """Does something between encoder and classifier, which methods that call the classifier would leave out."""

    def forward(self, x):
        features, logits = super().forward(x)
        return features, 10 * logits


def scaled(num_classes, input_shape):
    return Scaled(nn.Flatten(), 64, num_classes)


def drawing(num_classes, input_shape):
    model = SplitModel(nn.Flatten(), 64, num_classes)
    model.classifier = nn.Sequential(Noise(), nn.Linear(64, num_classes))
    return model


class Noise(nn.Module):
    def forward(self, features):
        return features + torch.randn_like(features)


def test_logits_that_are_not_the_classifiers_of_the_features_are_refused(go):
    with raises(PluginContractError, "classifier", "features"):
        go(model=scaled, rounds=1)
    go(model=drawing, rounds=1)  # two passes never give the same logits


def with_tensor(add, value):
    class Configures(Plugin):
        @hookimpl
        def configure_model(self, model, task):
            add(model.encoder.base, value)

    return Configures


def buffer(module, value, persistent=True):
    module.register_buffer("own", value, persistent=persistent)


def unsaved_buffer(module, value):
    buffer(module, value, persistent=False)


def parameter(module, value):
    module.own = nn.Parameter(value)


@pytest.mark.parametrize(
    ("add", "value", "named"),
    [
        (buffer, torch.full((3, 3), -torch.inf).triu(1), ("not finite", "persistent=False")),
        (buffer, torch.full((3,), torch.finfo(torch.float32).min), ("3.4e+38", "persistent=False")),
        (buffer, torch.ones(3, dtype=torch.complex64), ("complex", "persistent=False")),
        (parameter, torch.ones(3, dtype=torch.complex64), ("complex", "parameters")),
        (parameter, torch.full((3,), torch.nan), ("not finite", "parameters")),
        (unsaved_buffer, torch.full((3,), -torch.inf), ()),
    ],
)
def test_tensors_that_no_client_could_send_are_refused_by_name(go, add, value, named):
    plugin = with_tensor(add, value)
    if not named:
        go(plugin, rounds=1)
        return
    with raises(ConfigError, "'encoder.base.own'", *named):
        go(plugin, rounds=1)


def lazy(num_classes, input_shape):
    return SplitModel(nn.Sequential(nn.Flatten(), nn.LazyLinear(8)), 8, num_classes)


def test_lazy_modules_draw_their_weights_from_the_seed(go):
    one, other = (go(model=f"module:{__name__}.lazy", rounds=1) for _ in range(2))
    assert model_bytes(one) == model_bytes(other)


def with_frozen_head(num_classes, input_shape):
    model = SplitModel(nn.Flatten(), 64, num_classes)
    model.classifier.requires_grad_(False)
    return model


def test_a_plugin_that_keeps_only_what_is_not_trained_is_refused(go):
    with raises(ConfigError, "'fedper'", "'classifier.weight'"):
        go("fedper", model=f"module:{__name__}.with_frozen_head", rounds=1)


class Ties(Plugin):
    """Gives two layers one weight."""

    trains = True

    @hookimpl
    def configure_model(self, model, task):
        with task.random("tied"):
            one, other = (nn.Linear(model.feature_dim, model.feature_dim) for _ in range(2))
        other.weight = one.weight.requires_grad_(self.trains)
        model.encoder.add_module("one", one)
        model.encoder.add_module("other", other)


class TiesFixedWeights(Ties):
    trains = False


def test_tied_weights_are_refused_where_they_are_trained(go):
    with raises(ConfigError, "'encoder.one.weight'", "'encoder.other.weight'"):
        go(Ties, rounds=1)
    go(TiesFixedWeights, rounds=1)


class AnotherNetwork(Plugin):
    @hookimpl
    def configure_model(self, model, task):
        return SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 7)), 7, task.num_classes)


class EditsInPlace(Plugin):
    @hookimpl
    def configure_model(self, model):
        nn.init.constant_(model.classifier.bias, 3.0)


def test_a_plugin_configures_the_model_that_the_one_before_returned(go):
    """The edit was lost: the second plugin was given the model of before."""
    result = go(AnotherNetwork, EditsInPlace, rounds=1, lr=1e-30)
    assert result.model.feature_dim == 7
    assert result.model.classifier.bias.tolist() == [3.0] * 10
