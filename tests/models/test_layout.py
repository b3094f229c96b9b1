"""The layout of a model: what travels, what stays, and which tensors are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedcore.base.errors import NonFiniteUpdate, RejectUpdate
from fedcore.models.layout import Layout


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
    for wrong, words in (
        ({"0.weight": state["0.weight"]}, "an update: '1.running_mean' is missing"),
        ({**sent, "0.bias": state["0.bias"]}, "'0.bias' is not expected"),
        ({**sent, "0.weight": state["0.weight"].T}, r"'0.weight' is \(2, 3\) torch.float32, expected \(3, 2\)"),
        ({**sent, "0.weight": state["0.weight"].double()}, "torch.float64, expected"),
    ):
        with pytest.raises(RejectUpdate, match=words):
            layout.check(wrong, names, "an update")
    with pytest.raises(NonFiniteUpdate, match=r"'0\.weight' has values that are not finite"):
        layout.check({**sent, "0.weight": torch.full((3, 2), torch.nan)}, names, "an update")
