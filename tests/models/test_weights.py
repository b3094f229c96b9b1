"""Weights to start from, in a safetensors file."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

import fedcore
from fedcore import RunConfig
from fedcore.base.errors import ConfigError
from fedcore.client.setup import Setup
from fedcore.data import load_dataset
from fedcore.models import build_model
from fedcore_testing import federate
from fedcore_zoo import load_torchvision, load_weights
from fedcore_zoo.weights import with_digest
from tests.sentences import raises

SMALL = "torchvision:shufflenet_v2_x0_5"


def built(name, shape=(3, 32, 32), *, weights=None, projection=False):
    model, _ = build_model(name, num_classes=4, input_shape=shape, seed=1, projection=projection)
    if weights is not None:
        load_weights(model, weights)
    return model


def plain(name="shufflenet_v2_x0_5", **options):
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return load_torchvision().models.get_model(name, weights=None, **options).eval()


class Named(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Linear(5, 6)
        self.classifier = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Linear(7, 4))

    def forward(self, x):
        return self.classifier(self.encoder(x))


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
        model, task = build_model("mlp", num_classes=4, input_shape=(1, 8, 8), seed=1, projection=False)
        load_weights(model, str(tmp_path / "own.safetensors"))
        assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())
        task.ensure_projection(model)  # of a plugin; the file's classifier is for other features
        assert model.classifier.in_features == 256

    @pytest.mark.parametrize("projection", [False, True])
    def test_a_network_may_have_modules_of_fedcores_names(self, tmp_path, projection):
        network = Named()
        save_file(network.state_dict(), tmp_path / "named.safetensors")
        weights = str(tmp_path / "named.safetensors")
        model = built(f"module:{__name__}.Named", (5,), weights=weights, projection=projection)
        for name in ("encoder.weight", "classifier.0.weight"):
            found = model.get_parameter(f"encoder.base.{name}")
            assert torch.equal(found, network.get_parameter(name))

    def test_files_that_do_not_fit_are_refused(self, file, tmp_path):
        torch.save(plain().state_dict(), tmp_path / "pickled.pt")
        for model, weights, named in (
            ("torchvision:resnet18", str(file), "'conv1.weight'"),
            ("mlp", str(file), "'fc1.weight'"),
        ):
            with raises(ConfigError, named):
                built(model, weights=weights)
        with pytest.raises(ConfigError, match="pickled files are not read"):  # the rest is safetensors' own
            built(SMALL, weights=str(tmp_path / "pickled.pt"))
        with raises(ConfigError):
            with_digest(str(tmp_path / "none.safetensors"))

    @pytest.mark.parametrize(
        ("name", "dtype", "named"),
        [
            (
                "encoder.base.fc1.weight",
                torch.int32,
                ("'fc1.weight'", "torch.int32"),
            ),
            (
                "encoder.base.fc2.bias",
                torch.complex64,
                ("'fc2.bias'",),
            ),
            ("classifier.weight", torch.bool, ("'classifier.weight'",)),
        ],
    )
    def test_other_kinds_of_numbers_are_refused(self, tmp_path, name, dtype, named):
        options = {"input_shape": (1, 8, 8), "projection": False, "num_classes": 4}
        state = build_model("mlp", seed=5, **options)[0].state_dict()
        save_file({**state, name: state[name].to(dtype)}, tmp_path / "w.safetensors")
        with raises(ConfigError, *named):
            built("mlp", (1, 8, 8), weights=str(tmp_path / "w.safetensors"))

    def test_other_numbers_of_the_same_kind_are_taken(self, file, tmp_path):
        state = {
            name: tensor.double() if tensor.is_floating_point() else tensor.int()
            for name, tensor in plain().state_dict().items()
        }
        save_file(state, tmp_path / "other.safetensors")
        model, other = (built(SMALL, weights=with_digest(str(path))) for path in (file, tmp_path / "other.safetensors"))
        assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())
        count = "conv5.1.num_batches_tracked"
        save_file({**state, count: state[count].float()}, tmp_path / "float.safetensors")
        with raises(ConfigError, count):
            built(SMALL, weights=with_digest(str(tmp_path / "float.safetensors")))

    def test_a_run_is_bound_to_the_content(self, tmp_path):
        other, _ = build_model("mlp", num_classes=10, input_shape=(1, 8, 8), seed=5, projection=False)
        save_file(other.state_dict(), tmp_path / "own.safetensors")
        config = RunConfig(weights=str(tmp_path / "own.safetensors"), device="cpu", model="mlp", out=tmp_path / "run")
        model = Setup.build(config, load_dataset("digits")).model
        assert torch.equal(model.state_dict()["encoder.base.fc1.weight"], other.state_dict()["encoder.base.fc1.weight"])
        result = federate(tmp_path, rounds=1, weights=config.weights)
        name = result.config.weights
        assert name == with_digest(config.weights)
        assert name.startswith(f"{tmp_path / 'own.safetensors'}#")
        assert fedcore.resume(result.directory, changes={"rounds": 2}, progress=False).config.weights == name
        save_file({"a": torch.zeros(1)}, tmp_path / "own.safetensors")
        with raises(ConfigError):
            fedcore.resume(result.directory, changes={"rounds": 3}, progress=False)
