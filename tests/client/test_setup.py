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
