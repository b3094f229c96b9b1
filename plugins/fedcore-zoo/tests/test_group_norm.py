"""--norm group: what it replaces, what stays, and a run without statistics of batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedcore import ConfigError, SplitModel
from fedcore_testing import federations, initial_weights, same_tensors, weights, with_batch_norm
from fedcore_zoo.group_norm import with_group_norm
from tests.sentences import raises

go = federations()


@pytest.mark.parametrize(
    ("channels", "groups"), [(64, 32), (512, 32), (32, 16), (24, 4), (16, 8), (9, 1), (6, 1), (2, 1), (1, 1)]
)
def test_the_groups_of_a_layer(channels, groups):
    network = nn.Sequential(nn.BatchNorm2d(channels, eps=1e-3))
    nn.init.uniform_(network[0].weight)
    before = network[0].weight.clone()
    with_group_norm(network)
    assert (network[0].num_groups, network[0].eps) == (groups, 1e-3)
    assert torch.equal(network[0].weight, before)
    assert network(torch.randn(2, channels, 4, 4)).shape == (2, channels, 4, 4)


def test_layers_without_weights_stay_without():
    network = nn.Sequential(nn.BatchNorm1d(8, affine=False))
    with_group_norm(network)
    assert not list(network.parameters())


def test_a_layer_that_does_more_is_refused():
    class WithActivation(nn.BatchNorm2d):
        pass

    with raises(ConfigError, "--norm group", "'0'", "WithActivation"):
        with_group_norm(nn.Sequential(WithActivation(4)))


def test_each_network_of_torchvision_trains_on_batches_of_one(go):
    """A batch of one sample, which BatchNorm of 1x1 maps leaves out, and no buffers."""
    options = {"model": "torchvision:shufflenet_v2_x0_5", "local_steps": 1, "rounds": 1, "clients": 2, "batch_size": 1}
    result = go({}, norm="group", **options)
    kinds = {type(module) for module in result.model.modules()}
    assert nn.GroupNorm in kinds
    assert nn.BatchNorm2d not in kinds
    assert not [name for name, _ in result.model.named_buffers()]
    assert not same_tensors(weights(result), initial_weights(result.config))


def test_as_built_changes_nothing(go):
    assert same_tensors(weights(go({}, norm="as-built")), weights(go({})))


def test_no_effect_is_said(go, recwarn):
    go({}, norm="group", rounds=1)
    assert any("--norm group has no effect: model 'mlp' has no BatchNorm" in str(w.message) for w in recwarn)
    recwarn.clear()
    go({}, norm="group", rounds=1, model=with_batch_norm)
    assert not any("--norm" in str(w.message) for w in recwarn)


def test_the_encoder_of_a_split_model():
    model = SplitModel(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), 8, 3)
    with_group_norm(model)
    assert model(torch.randn(1, 4))[1].shape == (1, 3)
