"""The projection head, and the classifier behind it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedcore.base.errors import PluginConflictError
from fedcore.models import ModelTask, SplitModel, build_model


def build(name: str = "mlp", **options: Any) -> tuple[SplitModel, ModelTask]:
    defaults: dict[str, Any] = {"num_classes": 10, "input_shape": (1, 8, 8), "seed": 0, "projection": False}
    return build_model(name, **(defaults | options))


def equal_states(a: nn.Module, b: nn.Module) -> bool:
    a_state, b_state = a.state_dict(), b.state_dict()
    return a_state.keys() == b_state.keys() and all(torch.equal(a_state[name], b_state[name]) for name in a_state)


def layer(model: SplitModel, name: str, x: Tensor) -> Tensor:
    base = model.encoder.base
    module = model.classifier if name == "classifier" else base.get_submodule(name)
    if isinstance(module, nn.Linear):
        return nn.functional.linear(x, module.weight, module.bias)
    stride = 2 if name == "conv1" and base.get_parameter("conv1.weight").shape[2] == 3 else 1
    padding = 1 if module.weight.shape[2] == 3 else 0
    return nn.functional.conv2d(x, module.weight, module.bias, stride, padding)


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
    with pytest.raises(PluginConflictError, match=r"width 128 .* width 256"):
        task.ensure_projection(model, 128)


def test_projection_does_not_overwrite_a_replaced_classifier() -> None:
    model, task = build()
    copied = copy.deepcopy(model)
    task.ensure_projection(copied)  # a copy still knows its classifier for its own
    model.classifier = nn.Sequential(nn.Linear(64, 20), nn.Linear(20, 10))
    with pytest.raises(PluginConflictError, match="replaced the classifier by a Sequential"):
        task.ensure_projection(model)
    copied.classifier = nn.Sequential(nn.Linear(256, 20), nn.Linear(20, 10))
    task.ensure_projection(copied)  # nothing to do, so nothing to lose
