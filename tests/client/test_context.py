"""What plugins see of a client: parameters, their start, the device, gradients over the training part."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

from fedcore import Plugin, PluginContractError, PluginOptions, SplitModel, hookimpl
from fedcore.hooks.contexts import ClientContext
from fedcore_testing import PersonalClassifier, federate, linear, weights, with_batch_norm
from fedcore_testing.problems import with_fixed_layers
from tests.sentences import raises

FEW = {"dataset": "module:fedcore_testing.problems.few_digits", "batch_size": 16, "rounds": 1, "clients": 1}


def looking(begin=None, end=None):
    class Sees(Plugin):
        @hookimpl
        def begin_local(self, client):
            if begin:
                begin(client)

        @hookimpl
        def end_local(self, client):
            if end:
                end(client)

    return Sees


def test_gradients_over_all_samples_against_numpy(tmp_path):
    """Softmax regression: the gradient of the mean cross-entropy is (softmax - onehot)^T x / n."""
    checked = []

    def check(client: ClientContext) -> None:
        found = client.gradients()
        x, _, labels = client.forward()
        weight, bias = (client.model.classifier.get_parameter(n).detach().double().numpy() for n in ("weight", "bias"))
        inputs = x.double().numpy()
        logits = inputs @ weight.T + bias
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        error = (shares / shares.sum(axis=1, keepdims=True) - np.eye(10)[labels.numpy()]) / client.n
        np.testing.assert_allclose(found["classifier.weight"], error.T @ inputs, atol=1e-6)
        np.testing.assert_allclose(found["classifier.bias"], error.sum(axis=0), atol=1e-6)
        assert client.n > 100, "more than one chunk"
        checked.append(client.id)

    federate(tmp_path, looking(begin=check, end=check), model=linear, **FEW)
    assert checked == [0, 0]


def test_gradients_leave_the_model_alone_and_take_another_one_and_another_loss(tmp_path):
    def check(client: ClientContext) -> None:
        before = {name: (t.clone(), t._version) for name, t in client.model.state_dict().items()}
        positions = torch.tensor([3, 1, 2])
        other = copy.deepcopy(client.model).requires_grad_(False)
        with torch.no_grad():
            other.classifier.weight.mul_(2)
        found = client.gradients(positions, other, lambda outputs, labels: outputs.logits.square().mean())
        assert set(found) == {name for name, _ in client.model.named_parameters()}
        _, logits, _ = client.forward(positions, other)
        bias = 2 * logits.double().sum(dim=0) / logits.numel()
        torch.testing.assert_close(found["classifier.bias"].double(), bias, rtol=1e-5, atol=1e-7)
        for name, (value, version) in before.items():
            assert torch.equal(client.model.state_dict()[name], value)
            assert client.model.state_dict()[name]._version == version
        with torch.no_grad():  # gradients are enabled inside
            one, two = client.gradients(positions), client.gradients(positions)
        assert all(torch.equal(one[name], two[name]) for name in one)

    federate(tmp_path, looking(end=check), model=with_batch_norm, **FEW)


def test_a_step_along_the_gradient_lowers_the_loss(tmp_path):
    def check(client: ClientContext) -> None:
        def loss() -> float:
            _, logits, labels = client.forward(model=own)
            return float(F.cross_entropy(logits, labels))

        own = copy.deepcopy(client.model)
        before, found = loss(), client.gradients(model=own)
        with torch.no_grad():
            for name, gradient in found.items():
                own.get_parameter(name).sub_(0.05 * gradient)
        assert loss() < before

    federate(tmp_path, looking(begin=check), **FEW)


class FreezesTheEncoder(Plugin):
    @hookimpl
    def begin_local(self, client):
        client.freeze(["encoder.*"])


class Looks(Plugin):
    """Looks at the model in every step, in eval mode, and changes nothing."""

    @hookimpl
    def local_loss(self, step):
        before = {name: module.training for name, module in step.model.named_modules()}
        assert not any(module.training for module in step.client.network().modules())
        step.client.forward(step.indices)
        step.client.gradients(step.indices)
        assert {name: module.training for name, module in step.model.named_modules()} == before


@pytest.mark.parametrize(
    ("others", "model"),
    [((), with_batch_norm), ((), with_fixed_layers), ((FreezesTheEncoder,), with_batch_norm)],
)
def test_who_looks_at_a_model_in_training_changes_nothing(tmp_path, others, model):
    plain = weights(federate(tmp_path, *others, model=model, **FEW))
    looked = weights(federate(tmp_path, *others, Looks, model=model, **FEW))
    assert all(torch.equal(tensor, looked[name]) for name, tensor in plain.items())


def test_a_loss_that_raises_leaves_the_model_as_it_was(tmp_path):
    def check(client: ClientContext) -> None:
        def fails(outputs, labels):
            raise ArithmeticError

        client.model.train()
        with pytest.raises(ArithmeticError):
            client.gradients(loss=fails)
        assert all(module.training for module in client.model.modules())

    federate(tmp_path, looking(end=check), **FEW)


def test_a_network_is_a_copy_with_other_weights(tmp_path):
    def check(client: ClientContext) -> None:
        before = {name: tensor.clone() for name, tensor in client.model.state_dict().items()}
        name = "encoder.base.linear.weight"
        other = client.network({name: torch.zeros_like(before[name])})
        assert not other.training
        assert [p.requires_grad for p in other.parameters()] == [p.requires_grad for p in client.model.parameters()]
        for key, tensor in other.state_dict().items():
            assert torch.equal(tensor, torch.zeros_like(tensor) if key == name else before[key])
            assert tensor.data_ptr() != client.model.state_dict()[key].data_ptr()
        assert all(torch.equal(tensor, before[key]) for key, tensor in client.network().state_dict().items())
        assert all(torch.equal(tensor, before[key]) for key, tensor in client.model.state_dict().items())
        with raises(PluginContractError, "'missing'", "client.network"):
            client.network({"missing": torch.zeros(1)})
        with raises(PluginContractError, "1", "client.network"):
            client.network({name: torch.zeros(1)})

    federate(tmp_path, looking(check, check), PersonalClassifier, model=with_batch_norm, **FEW)


def test_a_pruned_network_can_be_copied_after_training(tmp_path):
    def pruned(num_classes, input_shape):
        layer = nn.Linear(64, 8)
        prune.random_unstructured(layer, "weight", 0.5)
        return SplitModel(nn.Sequential(nn.Flatten(), layer), 8, num_classes)

    def check(client: ClientContext) -> None:
        x = torch.ones(3, 1, 8, 8)
        assert torch.equal(client.network()(x).logits, client.model(x).logits)

    federate(tmp_path, looking(end=check), model=pruned, **FEW)


def test_parameters_are_the_trainable_shared_ones(tmp_path):
    seen = {}

    def begin(client: ClientContext) -> None:
        client.freeze(["encoder.*.weight"])
        seen["begin"] = list(client.parameters)
        assert client.device == torch.device("cpu")
        assert all(torch.equal(client.start[name], p) for name, p in client.parameters.items())

    def end(client: ClientContext) -> None:
        seen["end"], seen["start"] = list(client.parameters), list(client.start)
        assert all(not torch.equal(client.start[name], p) for name, p in client.parameters.items())

    federate(tmp_path, looking(begin, end), PersonalClassifier, model=with_batch_norm, **FEW)
    encoder = [f"encoder.base.{layer}" for layer in ("linear", "norm")]
    assert seen["begin"] == [f"{layer}.{kind}" for layer in encoder for kind in ("weight", "bias")]
    assert seen["end"] == seen["start"] == [f"{layer}.bias" for layer in encoder]


class Strength(PluginOptions):
    strength: float = 0.5


def test_options_are_those_in_brackets():
    class Method(Plugin[Strength]):
        pass

    class Variant(Method):
        pass

    class More(Strength):
        extra: int = 1

    class Other(Method):
        Options = More

    class Mixed(Plugin[Strength]):
        Options = More

    assert Method.Options is Variant.Options is Strength
    assert Other.Options is Mixed.Options is More
    assert Plugin.Options is PluginOptions
    assert Method(Strength()).options.strength == 0.5
