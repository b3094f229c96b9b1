"""Classifiers of other libraries by name, and weights to start from."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from fedcore import RunConfig
from fedcore.base.errors import ConfigError, UnknownNameError
from fedcore.data.vision import load_torchvision
from fedcore.models import build_model
from fedcore.models.weights import with_digest
from fedcore.runs.resolve import resolve as prepare
from fedcore_testing import check_model

SMALL = "torchvision:shufflenet_v2_x0_5"


def built(name, shape=(3, 32, 32), **options):
    model, _ = build_model(name, num_classes=4, input_shape=shape, seed=1, projection=False, **options)
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

    def test_it_keeps_the_contract_for_images_of_one_channel(self):
        check_model(resolve_split(SMALL), num_classes=4, input_shape=(1, 32, 32))

    @pytest.mark.parametrize(
        ("name", "shape", "says"),
        [
            ("torchvision:resnet81", (3, 32, 32), "Did you mean 'resnet18'"),
            ("torchvision:squeezenet1_1", (3, 64, 64), "does not end with a linear layer"),
            (SMALL, (30,), "takes images"),
            ("torchvison:resnet18", (3, 32, 32), "torchvision:NAME"),
            ("hf:folder", (3, 32, 32), "pip install .*fedcore-huggingface|folder is no folder on this machine"),
        ],
    )
    def test_what_cannot_be_built_is_said(self, name, shape, says):
        with pytest.raises(ConfigError, match=says):
            built(name, shape)


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
        with pytest.raises(UnknownNameError, match="model of timm"):
            built("timm:resnet81")

    def test_without_timm_it_is_named(self, monkeypatch):
        import sys

        monkeypatch.setitem(sys.modules, "timm", None)
        with pytest.raises(ConfigError, match="pip install timm"):
            built("timm:resnet18")


class TestWeights:
    @pytest.fixture
    def file(self, tmp_path):
        """A pretrained network as torchvision writes it, of 1,000 classes."""
        save_file(plain().state_dict(), tmp_path / "w.safetensors")
        return tmp_path / "w.safetensors"

    def test_the_features_are_those_of_the_file_and_the_classifier_is_fresh(self, file):
        model, fresh = built(SMALL, weights=with_digest(str(file))).eval(), built(SMALL)
        x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        network = plain()
        network.fc = torch.nn.Identity()
        torch.testing.assert_close(model(x).features, network(x))
        assert torch.equal(model.classifier.weight, fresh.classifier.weight)

    def test_a_model_of_fedcore_comes_back_whole(self, tmp_path):
        other, _ = build_model("mlp", num_classes=4, input_shape=(1, 8, 8), seed=5, projection=False)
        save_file(other.state_dict(), tmp_path / "own.safetensors")
        model = built("mlp", (1, 8, 8), weights=str(tmp_path / "own.safetensors"))
        assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())

    def test_files_that_do_not_fit_are_refused(self, file, tmp_path):
        torch.save(plain().state_dict(), tmp_path / "pickled.pt")
        for model, weights, says in (
            ("torchvision:resnet18", str(file), "'conv1.weight', of shape .* is not in it"),
            ("mlp", str(file), "'fc1.weight'.* is not in it"),
            (SMALL, str(tmp_path / "pickled.pt"), "pickled files are not read"),
        ):
            with pytest.raises(ConfigError, match=says):
                built(model, weights=weights)
        with pytest.raises(ConfigError, match="cannot be read"):
            with_digest(str(tmp_path / "none.safetensors"))

    def test_a_run_is_bound_to_the_content(self, tmp_path):
        other, _ = build_model("mlp", num_classes=10, input_shape=(1, 8, 8), seed=5, projection=False)
        save_file(other.state_dict(), tmp_path / "own.safetensors")
        run = prepare(RunConfig(weights=str(tmp_path / "own.safetensors"), device="cpu"))
        name = run.config.weights
        assert name.startswith(f"{tmp_path / 'own.safetensors'}#")
        model = run.set_up().model
        assert torch.equal(model.state_dict()["encoder.base.fc1.weight"], other.state_dict()["encoder.base.fc1.weight"])
        assert prepare(RunConfig(weights=name, device="cpu")).config.weights == name
        save_file({"a": torch.zeros(1)}, tmp_path / "own.safetensors")
        with pytest.raises(ConfigError, match="not the one that the run was begun with"):
            prepare(RunConfig(weights=name, device="cpu"))
