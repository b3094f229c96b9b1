"""Classifiers of other libraries by name."""

from __future__ import annotations

import pytest
import torch

from fedcore import ConfigError, UnknownNameError
from fedcore.models import build_model
from fedcore_testing import check_model
from fedcore_zoo import load_torchvision
from tests.sentences import raises

SMALL = "torchvision:shufflenet_v2_x0_5"


def built(name, shape=(3, 32, 32)):
    model, _ = build_model(name, num_classes=4, input_shape=shape, seed=1, projection=False)
    return model


def plain(name="shufflenet_v2_x0_5", **options):
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return load_torchvision().models.get_model(name, weights=None, **options).eval()


class TestTorchvision:
    def test_the_last_layer_is_the_classifier(self):
        network = plain("resnet18", num_classes=4)
        model = built("torchvision:resnet18")
        assert model.classifier.weight.shape == network.fc.weight.shape == (4, 512)
        names = {name.removeprefix("encoder.base.") for name in model.state_dict()}
        assert names - {"classifier.weight", "classifier.bias"} == set(network.state_dict()) - {"fc.weight", "fc.bias"}

    @pytest.mark.slow
    def test_a_vision_transformer_is_built_for_the_images_size(self):
        assert built("torchvision:vit_b_32").encoder.base.image_size == 32

    def test_it_keeps_the_contract_for_images_of_one_channel(self):
        check_model(resolve_split(SMALL), num_classes=4, input_shape=(1, 32, 32))

    @pytest.mark.parametrize(
        ("name", "shape", "named"),
        [
            ("torchvision:resnet81", (3, 32, 32), ("'resnet81'", "'resnet18'")),
            ("torchvision:squeezenet1_1", (3, 64, 64), ("'torchvision:squeezenet1_1'", "fedcore.SplitModel")),
            (SMALL, (30,), (f"'{SMALL}'", "(30,)")),
            ("torchvision:vit_b_16", (3, 28, 28), ("'torchvision:vit_b_16'", 16, "28x28")),
            ("torchvison:resnet18", (3, 32, 32), ("'torchvison:resnet18'", "torchvision:NAME")),
        ],
    )
    def test_what_cannot_be_built_is_said(self, name, shape, named):
        with raises(ConfigError, *named):
            built(name, shape)

    def test_a_folder_of_transformers_is_asked_for_or_their_package(self):
        with pytest.raises(ConfigError, match=r"pip install .*fedcore-huggingface|folder is no folder on this machine"):
            built("hf:folder", (3, 32, 32))


def resolve_split(name):
    def factory(num_classes, input_shape):
        return build_model(name, num_classes=num_classes, input_shape=input_shape, seed=0, projection=False)[0]

    return factory


class TestTimm:
    def test_an_image_of_any_size_and_number_of_channels(self):
        load_torchvision()
        model = built("timm:test_vit", (2, 64, 48))
        x = torch.randn(2, 2, 64, 48, generator=torch.Generator().manual_seed(0))
        features, logits = model.eval()(x)
        assert (features.shape, logits.shape) == ((2, model.feature_dim), (2, 4))
        with raises(UnknownNameError):
            built("timm:resnet81")

    def test_without_timm_it_is_named(self, monkeypatch):
        import sys

        monkeypatch.setitem(sys.modules, "timm", None)
        with raises(ConfigError):
            built("timm:resnet18")
