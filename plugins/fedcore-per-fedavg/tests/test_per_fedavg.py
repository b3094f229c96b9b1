"""Per-FedAvg: hand cases of both variants, a run in NumPy, the evaluation's step, and what alpha = 0 means."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedcore import ConfigError, Loss, Plugin, hookimpl
from fedcore.client import evaluate
from fedcore.data import load_dataset
from fedcore_per_fedavg import curvature, moved, parts
from fedcore_testing import (
    Quadratic,
    W,
    analytic_federation,
    client_arrays,
    federations,
    initial_weights,
    linear,
    mean_by_hand,
    model_bytes,
    records,
    small_config,
    softmax_by_hand,
    steps_without_host_sync,
    weights,
    with_batch_norm,
)
from tests.sentences import raises

FEW = {"dataset": "module:fedcore_testing.problems.few_digits", "batch_size": 18}
go = federations(**FEW)


# --- the equations -----------------------------------------------------------------------------------------------


def test_the_difference_is_the_hessian_times_v_in_float64():
    stream = torch.Generator().manual_seed(0)
    a, w, v = (torch.randn(n, generator=stream, dtype=torch.float64) for n in ((4, 4), (4,), (4,)))

    def gradient(at: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"w": a @ at**3}

    above, below = (gradient(moved({"w": w}, {"w": v}, length)["w"]) for length in (1e-5, -1e-5))
    expected = a.numpy() @ (3 * w.numpy() ** 2 * v.numpy())
    np.testing.assert_allclose(curvature(above, below, 1e-5)["w"], expected, rtol=1e-6)


@pytest.mark.parametrize(("alpha", "descends"), [(0.01, False), (0.005, True)])
def test_parts_of_different_curvature_climb_where_alpha_exceeds_one_over_l(alpha, descends):
    """The card's bound: h of D is 150, of D' and D'' 50; the optimum is 0, so that a descent has w's sign."""
    w = {"w": torch.tensor([2.0], dtype=torch.float64)}
    outer = {"w": 50.0 * moved(w, {"w": 150.0 * w["w"]}, -alpha)["w"]}
    above, below = ({"w": 50.0 * moved(w, outer, length)["w"]} for length in (1e-3, -1e-3))
    direction = moved(outer, curvature(above, below, 1e-3), -alpha)["w"]
    np.testing.assert_allclose(direction, (1 - 50 * alpha) * (1 - 150 * alpha) * 50 * 2.0, rtol=1e-6)
    assert bool(direction > 0) == descends


@pytest.mark.parametrize(("rows", "count"), [(60, 2), (60, 3), (16, 3), (5, 2), (7, 3)])
def test_parts_are_disjoint_and_whole(rows, count):
    split = [set(range(rows)[part]) for part in parts(rows, count)]
    assert set().union(*split) == set(range(rows))
    assert sum(map(len, split)) == rows
    assert min(map(len, split)) >= 2


@pytest.mark.parametrize(("rows", "count"), [(1, 2), (3, 2), (5, 3)])
def test_a_batch_that_is_too_small_is_not_split(rows, count):
    assert [range(rows)[part] for part in parts(rows, count)] == [range(rows)] * count


# --- in a run ----------------------------------------------------------------------------------------------------


class QuadraticTerm(Plugin):
    """The quadratic loss as a term: Per-FedAvg refuses another task loss."""

    scales_task = True

    @hookimpl
    def local_loss(self, step):
        return Loss(Quadratic.task_loss(self, step), task_scale=0.0)


@pytest.mark.parametrize(("variant", "factor"), [("fo", 0.5), ("hf", 0.25)])
@pytest.mark.parametrize("sizes", [[1], [9]])
def test_the_hand_cases(go, variant, factor, sizes):
    """H of |w - c|^2 / 2 is I: FO follows (1 - alpha)(w - c), HF (1 - alpha)^2 (w - c). From 0, both rates 0.5."""
    options = {**analytic_federation([[4.0, -8.0]], sizes), "rounds": 1, "lr": 0.5}
    found = weights(go({QuadraticTerm: {}, "per-fedavg": {"alpha": 0.5, "variant": variant}}, **options))[W]
    assert found.tolist() == pytest.approx([2.0 * factor, -4.0 * factor], rel=1e-3)


def gradient(w, x, y):
    return softmax_by_hand(w, x, y)[1]


def step(w, direction, length):
    return {name: w[name] + length * direction[name] for name in w}


@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_a_run_is_algorithm_1_in_numpy(go, tmp_path, variant):
    """Softmax regression on whole batches, shared by D, D' and D''; HF's Hessian by a far smaller difference."""
    options = {**FEW, "model": linear, "clients": 2, "batch_size": 500, "local_epochs": 2, "rounds": 2, "lr": 0.1}
    options |= {"momentum": 0.0, "weight_decay": 0.0}
    given = {"alpha": 0.5, "variant": variant, "batches": "shared", "delta": 0.01}
    result = go({"per-fedavg": given}, **options)
    w = {n: t.double().numpy() for n, t in initial_weights(small_config(tmp_path, **options)).items()}
    clients = client_arrays(result)
    for _ in range(2):
        ends = []
        for x, y in clients:
            own = dict(w)
            for _ in range(2):
                g = gradient(step(own, gradient(own, x, y), -0.5), x, y)
                if variant == "hf":
                    above, below = (gradient(step(own, g, d), x, y) for d in (1e-5, -1e-5))
                    g = {n: g[n] - 0.5 * (above[n] - below[n]) / 2e-5 for n in g}
                own = step(own, g, -0.1)
            ends.append(own)
        w = mean_by_hand(ends, [len(x) for x, _ in clients])
    for name, tensor in weights(result).items():
        np.testing.assert_allclose(tensor, w[name], atol=5e-5)


def test_the_parts_of_a_batch_are_used_in_turn(go):
    """One step on six samples in halves: D is the first three, D' the last three, in the order of the batch."""
    options = {"clients": 1, "rounds": 1, "batch_size": 500, "model": linear}
    split, shared = (
        weights(go({"per-fedavg": {"alpha": 0.5, "variant": "fo", "batches": batches}}, **options))
        for batches in ("split", "shared")
    )
    assert any(not torch.equal(split[name], shared[name]) for name in split)


def test_hf_of_a_vanishing_second_derivative_is_fo(go):
    """With alpha near 0 both are near FedAvg's step on D'."""
    fo, hf = (
        weights(go({"per-fedavg": {"alpha": 1e-6, "variant": variant, "batches": "shared"}}, rounds=1))
        for variant in ("fo", "hf")
    )
    for name in fo:
        torch.testing.assert_close(fo[name], hf[name], rtol=1e-3, atol=1e-5)


def test_the_evaluated_model_is_one_step_further(go):
    """Softmax regression in NumPy: w - alpha grad f_i(w) over client i's training part, on its held-out part.

    One client never took part.
    """
    options = {"model": linear, "clients": 2, "client_test_fraction": 0.3, "rounds": 1, "participation": 0.5}
    result = go({"per-fedavg": {"alpha": 2.0}}, **options)
    w = {n: t.double().numpy() for n, t in weights(result).items()}
    for client, (trained, held) in enumerate(zip(client_arrays(result), client_arrays(result, held_out=True))):
        own, (x, y) = step(w, gradient(w, *trained), -2.0), held
        logits = x @ own["classifier.weight"].T + own["classifier.bias"]
        hits = (logits.argmax(axis=1) == y.argmax(axis=1)).mean()
        assert result.metrics["personal"]["per_client"][str(client)] == pytest.approx(hits, abs=1e-6)
    plain = evaluate(result.model, load_dataset(FEW["dataset"], None).test, 10, torch.device("cpu"))
    assert plain.rates()["accuracy"] == result.metrics["global"]["accuracy"], "global is w itself"


def test_adapting_leaves_batch_norm_and_the_training_alone(go):
    options = {"model": with_batch_norm, "client_test_fraction": 0.2, "rounds": 3}
    often, seldom = (go({"per-fedavg": {}}, **options, eval_every=every) for every in (1, 3))
    assert model_bytes(often) == model_bytes(seldom)


def test_losses_are_recorded_once_and_no_step_waits_for_the_device(go):
    with steps_without_host_sync() as looked:
        result = go({"per-fedavg": {}, "fedprox": {}}, rounds=1)
    assert set().union(*looked) == set()
    assert set(records(result)[0]["losses"]) == {"task", "fedprox.proximal"}
    assert records(result)[0]["losses"]["task"] < 3


def test_second_derivatives_need_float32(go):
    with raises(ConfigError, "--set", "fedavg.variant"):
        go({"per-fedavg": {}}, precision="bf16")
    go({"per-fedavg": {"variant": "fo"}}, precision="bf16", rounds=1)
