"""FedLab's networks, layer by layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedcore import SplitModel
from tests.models.built import build


def layer(model: SplitModel, name: str, x: Tensor) -> Tensor:
    base = model.encoder.base
    module = model.classifier if name == "classifier" else base.get_submodule(name)
    if isinstance(module, nn.Linear):
        return nn.functional.linear(x, module.weight, module.bias)
    stride = 2 if name == "conv1" and base.get_parameter("conv1.weight").shape[2] == 3 else 1
    padding = 1 if module.weight.shape[2] == 3 else 0
    return nn.functional.conv2d(x, module.weight, module.bias, stride, padding)


def test_fedlab_networks_layer_by_layer() -> None:
    """As FedLab has them: a CNN with no ReLU at its convolutions; an AlexNet with a stem of stride 2 and no dropout."""
    relu, pool = torch.relu, nn.functional.max_pool2d
    model, x = build("fedlab-cnn", input_shape=(1, 28, 28))[0].double(), torch.randn(2, 1, 28, 28).double()
    h = pool(layer(model, "conv2", pool(layer(model, "conv1", x), 2)), 2)
    assert h.shape == (2, 64, 4, 4)
    expected = layer(model, "classifier", relu(layer(model, "fc1", h.flatten(1))))
    torch.testing.assert_close(model.train()(x).logits, expected)

    model, x = build("fedlab-alexnet", input_shape=(3, 32, 32))[0].double(), torch.randn(1, 3, 32, 32).double()
    h = pool(relu(layer(model, "conv2", pool(relu(layer(model, "conv1", x)), 2))), 2)
    h = relu(layer(model, "conv4", relu(layer(model, "conv3", h))))
    h = pool(relu(layer(model, "conv5", h)), 2)
    assert h.shape == (1, 256, 2, 2)
    features = relu(layer(model, "fc2", relu(layer(model, "fc1", h.flatten(1)))))
    torch.testing.assert_close(model.train()(x).features, features)
    assert not any(isinstance(module, nn.Dropout) for module in model.modules())
