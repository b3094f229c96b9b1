"""The fold against NumPy in float64, its exactness, its order, and the checks of what goes into it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedcore.base.errors import RejectUpdate
from fedcore.base.tensors import largest_values, out_of_range
from fedcore.client.messages import ClientFailure, ClientTask, Reply
from fedcore.models.layout import Layout
from fedcore.server.aggregation import RunningMean
from fedcore.server.scope import in_order
from tests.sentences import raises


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))
        self.fixed = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flag", torch.zeros(2, dtype=torch.bool))


LAYOUT = Layout.of(Model())


def model(rng, scale=1.0):
    return {
        "w": torch.tensor(rng.normal(size=3) * scale, dtype=torch.float32),
        "fixed": torch.tensor(rng.normal(size=2), dtype=torch.float32),
        "mean": torch.tensor(rng.normal(size=2), dtype=torch.float32),
        "seen": torch.tensor(int(rng.integers(0, 2**60))),
        "flag": torch.tensor(rng.integers(0, 2, size=2).astype(bool)),
    }


def folded(models, weights, samples, layout=LAYOUT):
    fold = RunningMean(layout, layout.shapes)
    for one, weight, n in zip(models, weights, samples, strict=True):
        fold.add(one, weight=weight, samples=n)
    return fold.mean()


def reference(models, weights, name):
    stack = np.stack([one[name].double().numpy() for one in models])
    weights = np.asarray(weights, dtype=np.float64)
    return (weights.reshape(-1, *[1] * (stack.ndim - 1)) * stack).sum(0) / weights.sum()


@pytest.mark.parametrize("block", [1, 4, 7, 1000])
def test_it_adds_in_blocks_of_any_length_to_the_same_bits(block, monkeypatch):
    monkeypatch.setattr("fedcore.server.aggregation.BLOCK", block)
    rng = np.random.default_rng(3)
    models, weights = [model(rng) for _ in range(5)], rng.random(5).tolist()
    mean = folded(models, weights, [3, 1, 4, 1, 5])
    for name, by in (("w", weights), ("fixed", weights), ("mean", [3, 1, 4, 1, 5])):
        total = torch.zeros(LAYOUT.shapes[name][0], dtype=torch.float64)
        for one, factor in zip(models, by):
            total.add_(one[name].double(), alpha=factor)
        assert torch.equal(mean[name], (total / sum(by)).float()), name
    assert list(mean) == list(LAYOUT.shapes)


BROKEN = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("value", BROKEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_one_look_at_all_tensors_finds_what_is_not_finite(value, dtype):
    tensors = {
        "whole": torch.tensor([2**62]),
        "none": torch.zeros(0),
        "w": torch.ones(3, 5),
        "v": torch.ones(7).to(dtype),
    }
    largest = torch.finfo(dtype).max
    tensors["v"][3] = -largest
    assert largest_values(tensors) == {"w": 1.0, "v": largest}
    assert largest_values({"z": torch.tensor([1 - 3j]).conj()}) == {"z": 3.0}
    tensors["v"][6] = value
    assert not math.isfinite(largest_values(tensors)["v"])


def test_layout():
    assert LAYOUT.buffers == {"mean", "seen", "flag"}
    assert LAYOUT.trainable == {"w"}
    assert LAYOUT.fixed == {"fixed"}
    layout = Layout.of(Model(), ["w", "seen", "fixed"])
    assert layout.shared == ["mean", "flag"]
    assert layout.personal == {"w", "seen"}


def test_what_is_fixed_are_parameters_without_gradients_and_the_buffers_of_modules_that_have_no_others():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)))
    model[0].bias.requires_grad_(False)
    model[1].requires_grad_(False)
    model[2].requires_grad_(False)
    statistics = {"running_mean", "running_var", "num_batches_tracked"}
    assert Layout.of(model).fixed == {
        "0.bias", *(f"1.{name}" for name in {"weight", "bias", *statistics}),
        *(f"2.0.{name}" for name in {"weight", "bias", *statistics}), "2.1.weight", "2.1.bias",
    }  # fmt: skip
    model[2][1].weight.requires_grad_(True)
    assert "2.0.running_mean" in Layout.of(model).fixed
    assert "2.1.bias" in Layout.of(model).fixed
    model[2][0].weight.requires_grad_(True)
    assert "2.0.running_mean" not in Layout.of(model).fixed


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 12), uniform=st.booleans())
def test_it_is_numpys_weighted_mean_rounded_once(seed, count, uniform):
    rng = np.random.default_rng(seed)
    models = [model(rng, 10.0 ** rng.integers(-3, 4)) for _ in range(count)]
    samples = rng.integers(1, 5000, size=count).tolist()
    weights = [1.0] * count if uniform else rng.random(count).tolist()
    mean = folded(models, weights, samples)
    for name, by in (("w", weights), ("fixed", weights), ("mean", samples)):
        expected = reference(models, by, name)
        assert mean[name].dtype == torch.float32
        np.testing.assert_allclose(mean[name].double().numpy(), expected, rtol=2**-23, atol=1e-12)
    assert int(mean["seen"]) == max(int(one["seen"]) for one in models)
    assert mean["seen"].dtype == torch.int64
    assert torch.equal(mean["flag"], torch.stack([one["flag"] for one in models]).any(0))


@settings(deadline=None, max_examples=50)
@given(
    value=st.floats(width=32, allow_nan=False, allow_infinity=False),
    weights=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20),
)
def test_equal_updates_return_exactly_themselves(value, weights):
    one = {**model(np.random.default_rng(0)), "w": torch.full((3,), value)}
    mean = folded([one] * len(weights), weights, [n + 1 for n in range(len(weights))])
    assert all(torch.equal(mean[name], one[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_floats_are_summed_in_float64(dtype):
    layout = Layout.of(nn.Linear(1, 1, bias=False).to(dtype))
    models = [{"weight": torch.tensor([[value]], dtype=dtype)} for value in (1000.0, 1.0, 1.0)]
    mean = folded(models, [1.0] * 3, [1] * 3, layout)["weight"]
    assert torch.equal(mean, torch.tensor([[1002.0 / 3]]).to(dtype))


def test_buffers_are_weighted_by_samples_whatever_the_weights():
    rng = np.random.default_rng(3)
    models = [model(rng), model(rng)]
    one, other = folded(models, [1.0, 0.0], [1, 3]), folded(models, [0.0, 5.0], [1, 3])
    assert torch.equal(one["mean"], other["mean"])
    assert torch.equal(one["w"], models[0]["w"])
    assert torch.equal(other["w"], models[1]["w"])
    np.testing.assert_allclose(one["mean"], reference(models, [1, 3], "mean"), rtol=1e-6)


def test_it_keeps_no_view_of_what_was_added():
    one = model(np.random.default_rng(0))
    fold = RunningMean(LAYOUT, LAYOUT.shapes)
    fold.add(one, weight=1.0, samples=1)
    before = {name: tensor.clone() for name, tensor in one.items()}
    for tensor in one.values():
        tensor.fill_(1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in fold.mean().items())


def test_a_model_without_shared_names():
    assert folded([{}, {}], [1.0, 2.0], [1, 1], Layout({}, frozenset(), frozenset(), frozenset())) == {}


def test_weights_that_are_all_zero():
    with pytest.raises(ArithmeticError):
        folded([model(np.random.default_rng(0))], [0.0], [1])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: m.pop("w"), ("'w'",)),
        (lambda m: m.update(extra=torch.zeros(1)), ("'extra'",)),
        (lambda m: m.update(w=torch.zeros(4)), ("'w'", "4", "3")),
        (lambda m: m.update(w=torch.zeros(3, dtype=torch.float64)), ("'w'",)),
        (lambda m: m.update(w=torch.tensor([0.0, math.nan, 0.0])), ("'w'",)),
        (lambda m: m.update(mean=torch.tensor([math.inf, 0.0])), ("'mean'",)),
    ],
)
def test_the_layout_check(change, named):
    one = model(np.random.default_rng(0))
    LAYOUT.check(one, LAYOUT.shapes, "client 3")
    change(one)
    with raises(RejectUpdate, "3", *named):
        LAYOUT.check(one, LAYOUT.shapes, "client 3")


# --- order -----------------------------------------------------------------------------------------------


TASKS = [ClientTask(id=f"t{k}", kind="fit_begin", client=k, round=0) for k in range(6)]


def outcome(task):
    return ClientFailure("raised", "x") if task.client == 3 else Reply({})


@settings(deadline=None)
@given(st.permutations(TASKS))
def test_arrival_does_not_matter(arrived):
    pairs = [(task, outcome(task)) for task in arrived]
    assert list(in_order(TASKS, pairs)) == [(task, outcome(task)) for task in TASKS]


@settings(deadline=None)
@given(st.permutations([*TASKS, *TASKS[:3]]))
def test_the_first_of_two_outcomes_counts(arrived):
    numbered = [(task, Reply({"number": n})) for n, task in enumerate(arrived)]
    seen = list(in_order(TASKS, numbered))
    assert [task.client for task, _ in seen] == [0, 1, 2, 3, 4, 5]
    first = {task.id: next(n for n, other in enumerate(arrived) if other is task) for task in TASKS}
    assert [reply.tensors["number"] for _, reply in seen] == [first[task.id] for task in TASKS]


def test_an_outcome_is_passed_on_as_soon_as_its_turn_comes():
    def arriving():
        yield TASKS[0], outcome(TASKS[0])
        raise AssertionError("asked for more than was needed")

    assert next(in_order(TASKS, arriving()))[0] is TASKS[0]


def test_a_late_answer_of_a_task_that_nobody_waits_for_is_dropped():
    stranger = ClientTask(id="old", kind="fit_begin", client=0, round=0)
    pairs = [(stranger, Reply({})), *((task, outcome(task)) for task in TASKS)]
    assert [task for task, _ in in_order(TASKS, pairs)] == TASKS


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_large_finite_values_are_finite_and_one_bad_value_is_found(dtype):
    whole = torch.full((64, 3, 5, 5), torch.finfo(dtype).max, dtype=dtype)  # its square is not finite
    assert out_of_range({"whole": whole, "empty": torch.zeros(0), "count": torch.tensor(3)}, math.inf) is None
    for value in (math.nan, math.inf, -math.inf):
        broken = whole.clone()
        broken[63, 2, 4, 4] = value
        found, _ = out_of_range({"whole": whole, "broken": broken}, math.inf)
        assert found == "broken"
