"""The layout of a model: what travels, what stays, and which tensors are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedcore
from fedcore import Plugin, hookimpl
from fedcore.base.errors import NonFiniteUpdate, RejectUpdate
from fedcore.models.layout import JOINED, FlatLayout, Layout
from fedcore.server.aggregation import RunningMean
from tests import support
from tests.sentences import raises
from tests.support import model_bytes


@pytest.fixture
def model():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2), nn.BatchNorm1d(2))
    model[2].weight.requires_grad_(False)
    for parameter in model[3].parameters():
        parameter.requires_grad_(False)
    return model


def test_fixed_parameters_and_buffers_of_fixed_modules_do_not_travel(model):
    layout = Layout.of(model, personal=["0.bias", "2.weight"])
    assert layout.fixed == {f"3.{name}" for name in model[3].state_dict()} | {"2.weight"}
    assert layout.personal == {"0.bias"}, "what is fixed is nobody's own"
    assert layout.shared == ["0.weight", *(f"1.{name}" for name in model[1].state_dict()), "2.bias"]
    assert layout.trainable == {"0.weight", "0.bias", "1.weight", "1.bias", "2.bias"}
    assert {name for name in layout.buffers if name.startswith("1.")} == {
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }


def test_tensors_have_to_be_those_names_in_that_layout(model):
    layout, state = Layout.of(model), dict(model.state_dict())
    names = ["0.weight", "1.running_mean"]
    sent = {name: state[name] for name in names}
    layout.check(sent, names, "an update")
    for wrong, named in (
        ({"0.weight": state["0.weight"]}, ("'1.running_mean'",)),
        ({**sent, "0.bias": state["0.bias"]}, ("'0.bias'",)),
        ({**sent, "0.weight": state["0.weight"].T}, ("'0.weight'", "(2, 3)", "(3, 2)")),
        ({**sent, "0.weight": state["0.weight"].double()}, ("'0.weight'", "torch.float64")),
    ):
        with raises(RejectUpdate, "an update", *named):
            layout.check(wrong, names, "an update")
    with raises(NonFiniteUpdate, "'0.weight'"):
        layout.check({**sent, "0.weight": torch.full((3, 2), torch.nan)}, names, "an update")
    with raises(NonFiniteUpdate, "'0.weight'", "18"):
        layout.check({**sent, "0.weight": torch.full((3, 2), -2e18)}, names, "an update")
    layout.check({**sent, "0.weight": torch.full((3, 2), -7.0)}, names, "an update")


def network(seed: int = 1) -> nn.Module:
    """Return a network with a convolution, BatchNorm, a parameter of another dtype and a layer for each client."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2), nn.Linear(2, 2))
    model.register_parameter("scale", nn.Parameter(torch.rand(2, dtype=torch.float64)))
    return model.to(memory_format=torch.channels_last)


LAYOUT = Layout.of(network(), personal=["4.weight", "4.bias"])
FLAT = FlatLayout.flat(LAYOUT)


def test_the_parameters_of_one_dtype_are_one_tensor_and_the_others_stay_by_name():
    joined = FLAT.join(network().state_dict())
    statistics = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert joined.keys() == {JOINED, "scale", *statistics} == set(FLAT.shared)
    assert joined[JOINED].shape == (4 * 3 * 2 * 2 + 4 + 4 + 4 + 2 * 4 + 2,)
    FLAT.check(joined, FLAT.shared, "an update")


def test_the_names_of_joined_copies_give_the_model_back():
    state = network().state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    named = FLAT.named(FLAT.join(state))
    for tensor in state.values():
        tensor.zero_()
    assert named.keys() == set(LAYOUT.shared)
    for name, tensor in named.items():
        assert torch.equal(tensor, before[name]), name
        assert tensor.is_contiguous(), name


@pytest.mark.parametrize("layout", [LAYOUT, FLAT], ids=["by name", "flat"])
def test_the_models_of_a_stack_are_joined_as_one_by_one(layout):
    states = [network().state_dict() for _ in range(3)]
    together = layout.join({name: torch.stack([state[name] for state in states]) for name in states[0]}, 1)
    for k, state in enumerate(states):
        alone = layout.join(state)
        assert alone.keys() == together.keys()
        assert all(torch.equal(together[name][k], tensor) for name, tensor in alone.items())


def test_a_number_as_a_parameter_is_joined_in_a_stack_too():
    shapes = {"scale": (torch.Size(()), torch.float32), "w": (torch.Size((2,)), torch.float32)}
    layout = FlatLayout.flat(Layout(shapes, frozenset(), frozenset(shapes), frozenset()))
    stack = {"scale": torch.tensor([1.0, 2.0]), "w": torch.ones(2, 2)}
    assert layout.join(stack, 1)[JOINED].tolist() == [[1.0, 1.0, 1.0], [2.0, 1.0, 1.0]]


def test_a_model_that_was_kept_name_by_name_is_read_as_it_is():
    state = network().state_dict()
    assert all(torch.equal(FLAT.named(state)[name], tensor) for name, tensor in state.items())


def test_the_mean_has_the_bits_of_the_mean_by_name():
    by_name, flat = RunningMean(LAYOUT, LAYOUT.shared), RunningMean(FLAT, FLAT.shared)
    for seed, weight in enumerate((0.3, 2.0, 0.7)):
        state = network(seed).state_dict()
        by_name.add(LAYOUT.join(state), weight=weight, samples=seed + 1)
        flat.add(FLAT.join(state), weight=weight, samples=seed + 1)
    expected, found = by_name.mean(), FLAT.named(flat.mean())
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_value_that_is_not_finite_is_named_as_in_the_model():
    state = network().state_dict()
    state["3.bias"][1] = torch.inf
    with raises(NonFiniteUpdate, "'3.bias'"):
        FLAT.check(FLAT.join(state), FLAT.shared, "an update")
    with raises(RejectUpdate, "'parameters'"):
        FLAT.check(LAYOUT.join(state), FLAT.shared, "an update")


def test_without_a_floating_parameter_the_layout_stays():
    layout = Layout.of(nn.BatchNorm1d(2, affine=False))
    assert FlatLayout.flat(layout) is layout


class Reads(Plugin):
    """Has updates sent by name."""

    @hookimpl
    def accumulate(self, server, update):
        assert "classifier.weight" in update.model


class Changes(Plugin):
    """Changes updates where they are only read."""

    @hookimpl
    def accumulate(self, server, update):
        update.model["classifier.bias"] = torch.full((10,), 3.0)
        update.model["classifier.weight"].fill_(2.0)


def test_a_change_of_what_accumulate_sees_is_in_the_mean(tmp_path):
    model = fedcore.run(support.config(tmp_path, Changes, clients=3, rounds=1, workers=0)).model.state_dict()
    assert model["classifier.bias"].unique().tolist() == [3.0]
    assert model["classifier.weight"].unique().tolist() == [2.0]


def test_a_run_has_the_same_bits_whether_a_plugin_reads_updates_or_none(tmp_path):
    runs = [
        fedcore.run(support.config(tmp_path, *plugins, clients=3, rounds=2, workers=0)) for plugins in ((), (Reads,))
    ]
    assert model_bytes(runs[0]) == model_bytes(runs[1])
    assert runs[0].metrics == runs[1].metrics
