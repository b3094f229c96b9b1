"""L_e, L_c and the moved split, against NumPy and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fedcore.errors import ConfigError
from fedcore.models import SplitModel, build_model
from fedcore_fdcl import classifier_loss, encoder_loss, move_split


def reference(name, local, received, previous, tau):
    """Sample by sample, as printed in Algorithm 2, with the minus sign."""

    def s(a, b):
        return math.exp(float(a @ b) / (max(np.linalg.norm(a), 1e-8) * max(np.linalg.norm(b), 1e-8)) / tau)

    values = []
    for pl, pg, pp in zip(local, received, previous):
        top = s(pl, pg) if name == "encoder" else s(pl, pp)
        values.append(-math.log(top / (s(pl, pg) + s(pl, pp))))
    return sum(values) / len(values)


FUNCTIONS = {"encoder": encoder_loss, "classifier": classifier_loss}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("tau", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (5, 3), (32, 10)])
def test_losses_are_the_papers(name, tau, shape):
    rng = np.random.default_rng(shape[0])
    arrays = [rng.normal(size=shape) for _ in range(3)]
    arrays[2][0] = 0.0  # a dead encoder's features: norm clamped
    value = FUNCTIONS[name](*(torch.from_numpy(a) for a in arrays), temperature=tau)
    assert value.shape == ()
    assert value.dtype == torch.float64
    assert float(value) == pytest.approx(reference(name, *arrays, tau), rel=1e-10)


def test_the_two_losses_pull_in_opposite_directions():
    local = torch.tensor([[1.0, 1.0]], dtype=torch.float64, requires_grad=True)
    received, previous = (torch.tensor([v], dtype=torch.float64) for v in ([1.0, 0.0], [0.0, 1.0]))

    def after_a_step(loss):
        (gradient,) = torch.autograd.grad(loss(local, received, previous), local)
        moved = local.detach() - 0.1 * gradient
        return tuple(float(torch.cosine_similarity(moved, other)) for other in (received, previous))

    start = math.sqrt(0.5)
    to_global, to_previous = after_a_step(encoder_loss)
    assert to_global > start + 0.01
    assert to_previous < start - 0.01
    to_global, to_previous = after_a_step(classifier_loss)
    assert to_global < start - 0.01
    assert to_previous > start + 0.01


def test_equal_models_give_log_2_and_no_gradient():
    local, other = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    for loss in FUNCTIONS.values():
        value = loss(local, other, other)
        assert value.item() == pytest.approx(math.log(2))
        assert torch.autograd.grad(value, local)[0].abs().max() < 1e-7


def test_only_the_local_outputs_are_trained():
    local, received, previous = (torch.randn(4, 3, requires_grad=True) for _ in range(3))
    for loss in FUNCTIONS.values():
        loss(local, received.detach(), previous.detach()).backward()
    assert local.grad is not None


def test_losses_never_ask_the_host():
    with FakeTensorMode():  # has no values: .item() and boolean indexing raise
        local, received, previous = (torch.randn(4, 3, requires_grad=True) for _ in range(3))
        for loss in FUNCTIONS.values():
            loss(local, received, previous).backward()


# --- head_layers ----------------------------------------------------------------------------------------------


def build(name, shape=(1, 28, 28), projection=False):
    return build_model(name, num_classes=10, input_shape=shape, seed=0, projection=projection)[0].eval()


@pytest.mark.parametrize(
    ("name", "shape", "projection", "head_layers", "width", "linear"),
    [
        ("mlp", (1, 8, 8), False, 2, 128, ["Linear", "ReLU", "Linear"]),
        ("fdcl-cnn", (1, 28, 28), False, 2, 1024, ["Linear", "ReLU", "Linear"]),
        ("fedcme-cnn", (1, 28, 28), False, 2, 512, ["Linear", "ReLU", "Linear"]),
        ("simple-cnn", (3, 32, 32), False, 2, 120, ["Linear", "ReLU", "Linear"]),
        ("simple-cnn", (3, 32, 32), False, 3, 400, ["Linear", "ReLU"] * 2 + ["Linear"]),
        ("simple-cnn", (3, 32, 32), True, 2, 84, ["Linear", "Linear"]),
        ("simple-cnn", (3, 32, 32), True, 4, 120, ["Linear", "ReLU", "Linear", "ReLU", "Linear", "Linear"]),
        ("resnet50", (3, 4, 4), True, 3, 2048, ["Linear", "ReLU", "Linear", "Linear"]),
    ],
)
def test_moved_split_computes_the_same(name, shape, projection, head_layers, width, linear):
    model, x = build(name, shape, projection), torch.randn(3, *shape)
    with torch.no_grad():
        before = model(x).logits
        parameters = [tensor.clone() for tensor in model.parameters()]
        move_split(model, head_layers)
        features, logits = model(x)
        assert torch.equal(logits, before)
        assert features.shape == (3, width)
        assert model.feature_dim == width
        assert torch.equal(model.classifier(features), logits)
    assert [type(layer).__name__ for layer in model.classifier] == linear
    assert len(parameters) == len(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(parameters, model.parameters()))


def test_one_head_layer_changes_nothing():
    model = build("mlp", (1, 8, 8))
    names = list(model.state_dict())
    move_split(model, 1)
    assert list(model.state_dict()) == names


def test_dropout_before_the_head_moves_with_it():
    base = nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.ReLU(), nn.Dropout(0.9), nn.Linear(5, 6), nn.Tanh())
    model, x = SplitModel(base, 6, 3).train(), torch.randn(2, 4)
    move_split(model, 2)
    assert isinstance(model.classifier[0], nn.Dropout)
    assert torch.equal(model(x).features, model(x).features)


@pytest.mark.parametrize(
    ("name", "shape", "projection", "head_layers", "message"),
    [
        ("resnet50", (3, 8, 8), False, 2, "only 1 linear layer; give at most 1"),
        ("fdcl-cnn", (1, 28, 28), False, 3, "only 2 linear layers; give at most 2"),
        ("simple-cnn", (3, 32, 32), False, 4, "only 3 linear layers; give at most 3"),
        ("simple-cnn", (3, 32, 32), True, 6, "only 5 linear layers"),
        ("mlp", (1, 8, 8), False, 3, "leaves no trainable layer to the encoder of this model; give at most 2"),
    ],
)
def test_too_many_head_layers_are_refused(name, shape, projection, head_layers, message):
    model = build(name, shape, projection)
    names = list(model.state_dict())
    with pytest.raises(ConfigError, match=rf"fdcl\.head_layers is {head_layers}.*{message}"):
        move_split(model, head_layers)
    assert list(model.state_dict()) == names


def test_a_replaced_classifier_is_not_split():
    model = build("mlp", (1, 8, 8))
    model.classifier = nn.Bilinear(1, 1, 1)
    with pytest.raises(ConfigError, match=r"Bilinear; use fdcl\.head_layers=1"):
        move_split(model, 2)
