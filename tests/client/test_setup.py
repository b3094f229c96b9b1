"""Building the model: what plugins make of it fits together, or is refused before the run starts."""

from __future__ import annotations

import pytest
from torch import nn

from fedcore import Loss, Plugin, hookimpl
from fedcore.base.errors import ConfigError, PluginContractError


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
    with pytest.raises(
        PluginContractError, match=r"features of width 6, as configured by plugin 'hides', 'critic', but"
    ):
        go(Hides, Critic, rounds=1)


def test_an_encoder_that_the_classifier_does_not_fit_names_the_plugin(go):
    with pytest.raises(ConfigError, match="as configured by plugin 'forgets', does not take samples"):
        go(Forgets, rounds=1)


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
    with pytest.raises(ConfigError, match=r"'encoder.one.weight' and 'encoder.other.weight' are one tensor"):
        go(Ties, rounds=1)
    go(TiesFixedWeights, rounds=1)
