"""Mappings from names to tensors: sizes, copies, digests, and what is refused; groups joined and split."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcore.base import tensors
from fedcore.base.serial import dumps, loads
from tests.sentences import raises

ONE = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3])}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_the_first_name_that_is_not_finite(value, dtype):
    bad = torch.tensor([1.0, value]).to(dtype)
    assert tensors.out_of_range({**ONE, "c": bad, "d": bad}, math.inf) == ("c", "has values that are not finite")


def test_large_numbers_whose_squares_overflow_are_finite():
    assert tensors.out_of_range({**ONE, "c": torch.full((4,), 3e38)}, math.inf) is None


def test_copies_own_their_memory_and_are_filled_in_place():
    copies = tensors.clone(ONE)
    copies["a"].add_(1)
    assert ONE["a"].tolist() == [1.0, 2.0]
    kept = copies["a"]
    tensors.copy_into(copies, ONE)
    assert kept.tolist() == [1.0, 2.0]
    assert tensors.on_cpu(ONE)["a"] is ONE["a"]


def test_bytes_and_digests():
    assert tensors.bytes_of(ONE) == 2 * 4 + 8
    digests = [
        tensors.digest_of(each)
        for each in (
            ONE,
            {**ONE, "a": torch.tensor([1.0, 2.5])},
            {**ONE, "a": torch.tensor([[1.0, 2.0]])},
            {**ONE, "a": torch.tensor([1.0, 2.0], dtype=torch.float64)},
            {"c": ONE["a"], "b": ONE["b"]},
        )
    ]
    assert len(set(digests)) == len(digests)
    assert tensors.digest_of(tensors.clone(ONE)) == digests[0]
    one = torch.ones(1)
    assert tensors.digest_of({"a": one.as_strided((1,), (0,))}) == tensors.digest_of({"a": one})
    assert tensors.digest_of({"t": torch.arange(6.0).view(2, 3).t()}) == tensors.digest_of(
        {"t": torch.arange(6.0).view(2, 3).t().contiguous()}
    )


@pytest.mark.parametrize("expected", [(10,), (10, 16), ((10,), 16), (10, torch.int64)])
def test_a_form_is_a_shape_and_a_dtype(expected):
    """No ValueError, which would blame and reject the client."""
    with raises(TypeError, "'counts'"):
        tensors.check_tensors({"counts": torch.ones(10)}, {"counts": expected})


def test_only_what_is_trained_may_be_sent():
    model = {"w": torch.zeros(2, 3), "b": torch.zeros(2)}
    tensors.check_changes({"w": torch.ones(2, 3)}, model, ["w", "b"])
    for sent, named in (
        ({"b": torch.ones(2)}, ("'b'",)),
        ({"w": torch.ones(3, 2)}, ("'w'", "(3, 2)", "(2, 3)")),
        ({"w": torch.ones(2, 3).double()}, ("'w'", "torch.float64")),
    ):
        with raises(ValueError, *named):
            tensors.check_changes(sent, model, ["w"])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
keys = st.text(min_size=1, max_size=6)


@settings(deadline=None, max_examples=50)
@given(
    st.dictionaries(st.sampled_from(["one", "two"]), st.dictionaries(keys, json_values | st.just("tensor"), max_size=4))
)
def test_flatten_and_back(groups):
    given_ = {
        group: {key: torch.arange(3) if value == "tensor" else value for key, value in values.items()}
        for group, values in groups.items()
        if values
    }
    joined, rest = tensors.flatten(given_)
    joined, rest = loads(dumps(joined, rest))
    back = tensors.unflatten(joined, rest)
    assert {group: set(values) for group, values in back.items()} == {g: set(v) for g, v in given_.items()}
    for group, values in given_.items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(back[group][key], value)
            else:
                assert back[group][key] == value
