"""Encoder and classifier: where weights come from, and models of one's own."""

from __future__ import annotations

import copy
import sys
import types

import pytest
import torch
from torch import nn

from fedcore import SplitModel
from fedcore.base import registry
from fedcore.base.errors import ConfigError, PluginConflictError, PluginContractError, UnknownNameError
from fedcore.models import has_batch_norm, smallest_batch
from tests.models.built import FEATURE_DIMS, build, check_outputs, equal_states
from tests.sentences import raises


def test_classifier_is_the_last_linear_layer() -> None:
    for name in FEATURE_DIMS:
        model, _ = build(name)
        assert type(model.classifier) is nn.Linear
        assert list(dict(model.encoder.named_children())) == ["base"]


@pytest.mark.parametrize("projection", [False, True])
def test_weights_follow_from_the_seed_alone(projection: bool) -> None:
    model, _ = build("simple-cnn", projection=projection)
    torch.rand(3)
    again, _ = build("simple-cnn", projection=projection)
    other, _ = build("simple-cnn", projection=projection, seed=1)
    assert equal_states(model, again)
    for part in ("encoder.base.conv1.weight", "classifier.weight"):
        assert not torch.equal(model.get_parameter(part), other.get_parameter(part))


def test_encoder_is_the_same_with_projection_and_with_other_classes() -> None:
    plain, _ = build("simple-cnn")
    projected, _ = build("simple-cnn", projection=True)
    more, _ = build("simple-cnn", num_classes=100)
    assert equal_states(plain.encoder.base, projected.encoder.base)
    assert equal_states(plain.encoder, more.encoder)


def test_projection_and_classifier_do_not_depend_on_the_encoder_or_on_who_asks() -> None:
    wanted, _ = build("simple-cnn", projection=True)
    later, task = build("simple-cnn")
    torch.rand(5)
    task.ensure_projection(later)
    assert equal_states(wanted, later)
    a, _ = build("mlp")
    b, _ = build("mlp", input_shape=(3, 32, 32))
    assert equal_states(a.classifier, b.classifier)


def test_global_generator_is_untouched() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    _, task = build("simple-cnn", projection=True)
    with task.random("anything"):
        torch.rand(1)
    assert torch.equal(before, torch.get_rng_state())


class Deeper(SplitModel):
    def make_classifier(self, feature_dim: int) -> nn.Module:
        return nn.Sequential(nn.Linear(feature_dim, 6), nn.ReLU(), nn.Linear(6, self.num_classes))


@pytest.fixture
def own_module(monkeypatch: pytest.MonkeyPatch) -> str:
    module = types.ModuleType("fedcore_test_models")
    module.__dict__.update(
        good=lambda classes, shape: SplitModel(nn.Flatten(), 64, classes),
        deeper=lambda classes, shape: Deeper(nn.Flatten(), 64, classes),
        bad=lambda classes, shape: {},
        number=3,
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__name__


def initialised(num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
    model = SplitModel(nn.Flatten(), 64, num_classes)
    nn.init.zeros_(model.classifier.weight)
    return model


def test_a_projection_renews_a_classifier_that_the_factory_only_initialised() -> None:
    with registry.lent({("model", "object:own"): initialised}):
        model, _ = build("object:own", projection=True)
    assert model.classifier.in_features == 256
    assert model.classifier.weight.any()


def test_own_factory(own_module: str) -> None:
    model, _ = build(f"module:{own_module}.good", num_classes=4)
    check_outputs(model, torch.rand(2, 1, 8, 8), 64, 4)
    deeper, task = build(f"module:{own_module}.deeper", num_classes=4)
    task.ensure_projection(deeper)
    check_outputs(deeper, torch.rand(2, 1, 8, 8), 256, 4)
    assert isinstance(deeper.classifier, nn.Sequential)


HEADS = {
    "replaced": lambda model: setattr(model, "classifier", nn.Sequential(nn.Linear(64, 6), nn.Linear(6, 10))),
    "frozen": lambda model: model.classifier.requires_grad_(False),
    "initialised": lambda model: nn.init.zeros_(model.classifier.weight),
    "loaded": lambda model: model.classifier.weight.data.fill_(0.5),
    "its gradient hooked": lambda model: model.classifier.weight.register_hook(lambda gradient: 0.1 * gradient),
    "its logits hooked": lambda model: model.classifier.register_forward_hook(lambda layer, z, logits: 10 * logits),
    "its features hooked": lambda model: model.classifier.register_forward_pre_hook(lambda layer, z: (z[0].relu(),)),
    "parametrised": lambda model: nn.utils.parametrizations.spectral_norm(model.classifier),
}


@pytest.mark.parametrize("change", HEADS.values(), ids=HEADS)
def test_a_classifier_that_the_factory_set_is_kept(change) -> None:
    heads = []

    def factory(num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
        model = SplitModel(nn.Flatten(), 64, num_classes)
        change(model)
        heads.append((model.classifier, copy.deepcopy(model.classifier)))
        return model

    with registry.lent({("model", "object:own"): factory}):
        model, _ = build("object:own")
    ((head, before),) = heads
    assert model.classifier is head
    assert equal_states(head, before)
    assert [p.requires_grad for p in head.parameters()] == [p.requires_grad for p in before.parameters()]


@pytest.mark.parametrize("name", HEADS)
def test_a_projection_is_refused_where_a_fresh_classifier_would_compute_otherwise(name) -> None:
    model, task = build("mlp")
    HEADS[name](model)
    if name in ("initialised", "loaded"):
        task.ensure_projection(model)
    else:
        with raises(PluginConflictError, "projection head", 256):
            task.ensure_projection(model)


def test_own_factory_that_returns_no_split_model(own_module: str) -> None:
    with raises(PluginContractError):
        build(f"module:{own_module}.bad")
    with raises(PluginContractError):
        build(f"module:{own_module}.number")


def test_unknown_model_names_the_nearest() -> None:
    with raises(UnknownNameError):
        build("simple-cn")


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(3), nn.SyncBatchNorm(3), nn.LazyBatchNorm2d()])
def test_has_batch_norm(layer: nn.Module) -> None:
    assert has_batch_norm(nn.Sequential(nn.Linear(2, 3), layer))
    assert not has_batch_norm(nn.Sequential(nn.BatchNorm1d(3).requires_grad_(False), nn.Linear(3, 3)))
    assert not has_batch_norm(nn.Sequential(nn.GroupNorm(1, 3), nn.LayerNorm(3), nn.InstanceNorm1d(3)))


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)], 1),  # 36 values per channel in one image
        ([nn.Conv2d(1, 2, 8), nn.BatchNorm2d(2)], 2),
        ([nn.Flatten(), nn.BatchNorm1d(64)], 2),
        ([nn.Flatten(), nn.BatchNorm1d(64).requires_grad_(False)], 1),
        ([nn.Flatten(), nn.LayerNorm(64)], 1),
    ],
)
def test_a_batch_of_one_is_trained_if_the_model_can(layers, expected):
    assert smallest_batch(nn.Sequential(*layers), torch.zeros(1, 1, 8, 8)) == expected


def test_without_the_zoo_a_network_is_answered_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = registry._scan
    monkeypatch.setattr(registry, "_scan", lambda kind, path: {} if kind == "feature" else installed(kind, path))
    monkeypatch.setitem(registry.LENT, ("model", "object:Net"), lambda: nn.Linear(64, 10))
    with raises(ConfigError, "fedcore-zoo"):
        build("object:Net")
