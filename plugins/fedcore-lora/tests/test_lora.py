"""LoRA: the adapter by hand and against NumPy, what travels, what stays, identities, whole runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from fedcore import ConfigError, ModelTask, Plugin, SplitModel, hookimpl
from fedcore.tools import RunDirectory
from fedcore_lora import LoRA, LoRAOptions, LowRank
from fedcore_testing import (
    federations,
    initial_weights,
    installed,
    records,
    weights,
)
from tests.sentences import raises

go = federations(samples=300)
ADAPTED = "parametrizations.weight"


def convolutional(num_classes, input_shape):
    base = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8))
    return SplitModel(base, 8, num_classes)


class FrozenEncoder(Plugin):
    """The encoder frozen, without adapters."""

    @hookimpl
    def configure_model(self, model):
        model.encoder.requires_grad_(False)


# --- the equation ------------------------------------------------------------------------------------------------


def test_the_hand_case():
    """W = 0 (2, 2), A = (1, 2), B = (3, -1), alpha 4, r 1: 4 B A = (12, 24; -4, -8)."""
    adapter = LowRank(torch.zeros(2, 2), 1, 4.0)
    with torch.no_grad():
        adapter.A.copy_(torch.tensor([[1.0, 2.0]]))
        adapter.B.copy_(torch.tensor([[3.0], [-1.0]]))
    assert adapter(torch.zeros(2, 2)).tolist() == [[12.0, 24.0], [-4.0, -8.0]]


@pytest.mark.parametrize("shape", [(5, 3), (4, 2, 3, 3)])
def test_weight_and_gradients_against_numpy(shape):
    torch.manual_seed(0)
    weight = torch.randn(shape, dtype=torch.float64)
    adapter = LowRank(weight, 2, 6.0)
    with torch.no_grad():
        adapter.B.normal_()
    upstream = torch.randn(shape, dtype=torch.float64)
    value = adapter(weight)
    (value * upstream).sum().backward()
    a, b, g = (t.detach().numpy() for t in (adapter.A, adapter.B, upstream.flatten(1)))
    np.testing.assert_allclose(value.detach().numpy(), weight.numpy() + 3.0 * (b @ a).reshape(shape), rtol=1e-12)
    np.testing.assert_allclose(adapter.B.grad.numpy(), 3.0 * g @ a.T, rtol=1e-12)
    np.testing.assert_allclose(adapter.A.grad.numpy(), 3.0 * b.T @ g, rtol=1e-12)


def test_at_first_the_adapted_weight_is_the_weight():
    weight = torch.randn(3, 4)
    assert torch.equal(LowRank(weight, 2, 16.0)(weight), weight)


# --- whole runs --------------------------------------------------------------------------------------------------


def test_only_adapters_and_the_classifier_travel_and_the_encoder_stays(go):
    result = go({"lora": {"rank": 4}})
    initial, final = initial_weights(RunDirectory(result.directory).read_config()), weights(result)
    moved = {name for name in final if not torch.equal(initial[name], final[name])}
    trained = {name for name, p in result.model.named_parameters() if p.requires_grad}
    assert moved == trained
    assert {name.rpartition(".")[2] for name in trained if name.startswith("encoder.")} == {"A", "B"}
    each = sum(4 * final[name].numel() for name in trained)
    for line in records(result):
        assert line["bytes"]["by_plugin"] == {"model": {"down": 3 * each, "up": 3 * each}}
    whole = records(go({}))[0]["bytes"]["up"] / 3
    assert each < 0.15 * whole
    assert result.metrics["global"]["accuracy"] > 0


def test_alpha_0_trains_the_classifier_on_the_frozen_encoder_to_the_bit(go):
    adapted, frozen = weights(go({"lora": {"alpha": 0.0}})), weights(go({FrozenEncoder: {}}))
    for name in ("classifier.weight", "classifier.bias"):
        assert torch.equal(adapted[name], frozen[name])


def test_adapters_change_what_the_encoder_computes(go):
    assert not torch.equal(
        weights(go({"lora": {}}))["classifier.weight"], weights(go({FrozenEncoder: {}}))["classifier.weight"]
    )


def without_a_base(num_classes, input_shape):
    model = SplitModel(nn.Flatten(), 64, num_classes)
    model.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 16))
    model.renew_classifier(16)
    return model


def test_an_encoder_without_a_base_is_told(go):
    with raises(ConfigError, "'base'"):
        go({"lora": {}}, model=f"module:{__name__}.without_a_base")


@pytest.mark.parametrize("normalise", [nn.utils.parametrizations.spectral_norm, prune.identity])
def test_a_layer_that_computes_its_weight_is_told(normalise):
    model = SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Linear(16, 8)), 8, 10)
    normalise(model.encoder.base[1], "weight")
    plugin, task = LoRA(LoRAOptions()), ModelTask(10, (1, 8, 8), 0)
    plugin.name = "lora"
    with raises(ConfigError, "lora.layers", "'base.1'"):
        plugin.configure_model(model, task)
    others = LoRA(LoRAOptions(layers=["base.2"]))
    others.name = "lora"
    others.configure_model(model, task)


def test_layers_by_pattern(go):
    result = go({"lora": {"layers": ["base.fc1"]}}, rounds=1)
    adapted = {name for name in result.model.state_dict() if ADAPTED in name}
    assert {name.partition(f".{ADAPTED}")[0] for name in adapted} == {"encoder.base.fc1"}
    with raises(ConfigError, "'base.fc9'", "base.fc1"):
        go({"lora": {"layers": ["base.fc9"]}})


def test_convolutions_and_batch_norm(go):
    result = go({"lora": {"rank": 2}}, model=convolutional, rounds=1)
    assert all(line["failures"] == [] for line in records(result))
    final = weights(result)
    assert final[f"encoder.base.0.{ADAPTED}.0.A"].shape == (2, 9)
    assert (final["encoder.base.1.running_mean"] == 0).all(), "a frozen BatchNorm keeps its statistics"


@pytest.mark.parametrize("plugins", [{"moon": {}}, {"scaffold": {}}, {"fedper": {}}, {"median": {}}])
def test_beside_other_methods(go, plugins):
    assert all(line["failures"] == [] for line in records(go({"lora": {}, **plugins})))


@pytest.mark.parametrize("plugins", [("moon", "lora"), ("lora", "moon"), ("lora",)])
def test_a_projection_head_is_trained_without_adapters(go, plugins):
    chosen = {installed(name): {} for name in plugins}
    result = go(chosen, rounds=1, projection=True)
    head = {n: p.requires_grad for n, p in result.model.named_parameters() if n.startswith("encoder.projection.")}
    assert head == {f"encoder.projection.{layer}.{part}": True for layer in ("l1", "l2") for part in ("weight", "bias")}


@pytest.mark.parametrize(("model", "plugins"), [("mlp", {}), (convolutional, {}), ("mlp", {"moon": {}})])
def test_an_export_holds_the_adapted_weights_and_the_plain_network_starts_from_it(go, tmp_path, model, plugins):
    export = pytest.importorskip("fedcore_export")
    tuned = go({**plugins, "lora": {}}, rounds=1, model=model)
    export.export_run(Path(tuned.directory), "safetensors", tmp_path / "out", allow_code=True)
    start = {"weights": str(tmp_path / "out" / "model.safetensors"), "projection": "moon" in plugins}
    again = go(FrozenEncoder, **start, model=model, rounds=1, lr=1e-9)
    x = torch.rand(5, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(again.model.eval()(x).logits, tuned.model.eval()(x).logits)
    assert not any(ADAPTED in name for name in weights(again))


def test_the_cards_bytes(go):
    card = (Path(__file__).parents[1] / "README.md").read_text()
    adapters, whole = (
        records(go(plugins, rounds=1, clients=1))[0]["bytes"]["up"] for plugins in ({"lora": {"rank": 4}}, {})
    )
    assert f"{adapters:,} bytes" in card
    assert f"{whole:,} at r = 4" in card
