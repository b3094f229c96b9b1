"""Models of the zoo: their sizes, their shapes, and what they compute."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from fedcore import ConfigError, ModelTask, SplitModel
from fedcore.models import has_batch_norm
from fedcore_zoo import PadTo, alexnet, fedlab_alexnet, resnet50
from fedcore_zoo.networks import MaxPool2x2
from tests.models.built import FEATURE_DIMS, build, check_outputs
from tests.sentences import raises

SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 64, 64)]


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "classes", "projection", "parameters"),
    [
        ("simple-cnn", (3, 32, 32), 10, False, 62_006),
        ("simple-cnn", (3, 32, 32), 10, True, 92_626),
        ("fdcl-cnn", (1, 28, 28), 10, False, 582_026),
        ("fedcme-cnn", (1, 28, 28), 10, False, 80_202),
        ("fedlab-cnn", (1, 28, 28), 10, False, 582_026),
        ("mlp", (1, 8, 8), 10, False, 64 * 128 + 128 + 128 * 64 + 64 + 650),
    ],
)
def test_parameter_counts(name: str, shape: tuple[int, ...], classes: int, projection: bool, parameters: int) -> None:
    model, _ = build(name, input_shape=shape, num_classes=classes, projection=projection)
    assert count(model) == parameters
    if name == "simple-cnn":
        assert count(model.encoder.base) == 61_156


def test_parameter_counts_of_the_large_models() -> None:
    with torch.device("meta"):
        assert count(fedlab_alexnet(10, (3, 32, 32))) == 23_272_266
        assert count(resnet50(10, (3, 32, 32))) == 23_520_842
        assert count(alexnet(1000, (3, 224, 224))) == 61_100_840  # torchvision's
        model = resnet50(100, (3, 32, 32))
        ModelTask(100, (3, 32, 32), 0).ensure_projection(model)
    head = 2048 * 2048 + 2048 + 2048 * 256 + 256
    assert count(model) == (23_520_842 - 20_490) + head + 256 * 100 + 100


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FEATURE_DIMS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("classes", [3, 10, 100])
def test_shapes(name: str, shape: tuple[int, ...], classes: int) -> None:
    model, task = build(name, input_shape=shape, num_classes=classes)
    x = torch.rand(2, *shape)
    check_outputs(model, x, FEATURE_DIMS[name], classes)
    task.ensure_projection(model)
    check_outputs(model, x, 256, classes)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", ["alexnet", "fedlab-alexnet", "resnet50"])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 7, 40), (3, 33, 31), (3, 130, 128)])
def test_shapes_of_the_large_models(name: str, shape: tuple[int, ...]) -> None:
    factory = {"alexnet": alexnet, "fedlab-alexnet": fedlab_alexnet, "resnet50": resnet50}[name]
    width = 2048 if name == "resnet50" else 4096
    with torch.device("meta"):  # shapes only: no weight is drawn, nothing is computed
        for classes in (3, 10, 100) if shape == SHAPES[0] else (10,):
            features, logits = factory(classes, shape)(torch.empty(2, *shape))
            assert features.shape == (2, width)
            assert logits.shape == (2, classes)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ["simple-cnn", "fdcl-cnn", "fedcme-cnn"])
def test_pooling_before_relu_gives_the_papers_bits(name: str, memory_format: torch.memory_format) -> None:
    """Values and gradients are those of ReLU before pooling, ties and zeros included."""
    model, _ = build(name, input_shape=(3, 32, 32))
    model = model.to(memory_format=memory_format)
    layers = list(model.encoder.base.named_children())
    pools = [i for i, (_, layer) in enumerate(layers) if isinstance(layer, nn.MaxPool2d)]
    assert pools
    for i in pools:
        assert isinstance(layers[i + 1][1], nn.ReLU)
        layers[i], layers[i + 1] = layers[i + 1], layers[i]
    textbook = SplitModel(nn.Sequential(OrderedDict(layers)), model.feature_dim, 10)
    textbook.classifier = model.classifier
    x = torch.rand(16, 3, 32, 32).mul(4).round().div(4)  # few values, so that pools have ties
    x[:4] = 0
    x = x.contiguous(memory_format=memory_format)
    found = []
    for each in (model, textbook):
        model.zero_grad()
        features, logits = each(x)
        torch.nn.functional.cross_entropy(logits, torch.arange(16) % 10).backward()
        found.append((features, [parameter.grad.clone() for parameter in model.parameters()]))
    (features, gradients), (expected, expected_gradients) = found
    assert torch.equal(features, expected)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected_gradients, strict=True))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(6, 28, 28), (1, 5, 7), (3, 2, 3), (16, 1, 9)])
def test_pooling_without_gradients_gives_the_same_values(
    shape: tuple[int, ...], memory_format: torch.memory_format
) -> None:
    x = torch.randn(4, *shape).mul(2).round()  # ties
    if min(shape[1:]) > 1:
        x[0, 0, 0, 0], x[1, 0, 1, 1] = torch.nan, -torch.inf
    x = x.contiguous(memory_format=memory_format)
    pool = MaxPool2x2()
    if min(shape[1:]) < 2:
        with pytest.raises(RuntimeError, match="too small"):
            pool(x)
        return
    found, expected = pool(x), nn.functional.max_pool2d(x, 2)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert found.is_contiguous(memory_format=memory_format)
    assert pool(x.requires_grad_()).requires_grad
    with torch.no_grad():
        torch.testing.assert_close(pool(x), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["simple-cnn", "fdcl-cnn", "fedcme-cnn", "fedlab-cnn"])
def test_outputs_are_the_same_with_and_without_gradients(name: str) -> None:
    model, _ = build(name, input_shape=(3, 30, 34))
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(8, 3, 30, 34).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        frozen = model(x)
    for found, expected in zip(model(x), frozen, strict=True):
        assert torch.equal(found, expected)


def test_alexnet_runs() -> None:
    model, _ = build("alexnet")
    check_outputs(model, torch.rand(1, 1, 8, 8), 4096, 10)


def test_resnet50_runs_on_a_batch_of_one() -> None:
    model, _ = build("resnet50")
    check_outputs(model, torch.rand(1, 1, 8, 8), 2048, 10)
    assert has_batch_norm(model)
    weight = model.get_parameter("encoder.base.layer4.2.conv2.weight")
    assert weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)  # Kaiming normal, fan out
    assert torch.equal(model.get_parameter("encoder.base.bn1.weight"), torch.ones(64))
    model.train()
    model(torch.rand(2, 1, 8, 8)).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    "name", ["simple-cnn", "fdcl-cnn", "fedcme-cnn", "fedlab-cnn", "fedlab-alexnet", "alexnet", "resnet50"]
)
def test_image_models_say_what_they_need(name: str) -> None:
    with raises(ConfigError, name, "64"):
        build(name, input_shape=(64,))


def test_padding_is_central_and_only_where_needed() -> None:
    x = torch.ones(1, 1, 3, 6)
    padded = PadTo(6)(x)
    assert padded.shape == (1, 1, 6, 6)
    assert padded[0, 0, :, 0].tolist() == [0, 1, 1, 1, 0, 0]
    assert PadTo(3)(x) is x
