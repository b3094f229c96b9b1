"""FedSAM: the hand case, a run in NumPy, what rho = 0 means, and what the second pass takes part in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedcore_fedsam import ascended, scales
from fedcore_testing import (
    Quadratic,
    W,
    analytic_federation,
    client_arrays,
    federations,
    initial_weights,
    linear,
    mean_by_hand,
    records,
    sgd_by_hand,
    small_config,
    softmax_by_hand,
    steps_without_host_sync,
    weights,
)

FEW = {"dataset": "module:fedcore_testing.problems.few_digits", "batch_size": 16}
go = federations(**FEW)


# --- the equations -----------------------------------------------------------------------------------------------


def random(seed: int, shapes=((3, 4), (4,), ())) -> dict[str, torch.Tensor]:
    stream = torch.Generator().manual_seed(seed)
    names = ("layer.weight", "layer.bias", "scale")
    return {n: torch.randn(s, generator=stream, dtype=torch.float64) for n, s in zip(names, shapes)}


@pytest.mark.parametrize("eta", [None, 0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_ascent_against_numpy(eta, dtype):
    w, g = ({name: tensor.to(dtype) for name, tensor in random(seed).items()} for seed in (0, 1))
    found = ascended(w, g, 0.3, None if eta is None else scales(w, eta))
    flat = {name: tensor.double().numpy() for name, tensor in w.items()}
    slopes = {name: tensor.double().numpy() for name, tensor in g.items()}
    t = {n: np.abs(v) + eta if eta is not None and "weight" in n else np.ones_like(v) for n, v in flat.items()}
    norm = np.sqrt(sum(np.square(t[name] * slopes[name]).sum() for name in slopes))
    for name, value in found.items():
        assert value.dtype == dtype
        expected = flat[name] + 0.3 * t[name] ** 2 * slopes[name] / norm
        np.testing.assert_allclose(value.numpy(), expected, rtol=1e-11 if dtype == torch.float64 else 2e-5)


@pytest.mark.parametrize(("dtype", "scales"), [(torch.float32, [1e-18, 1e18]), (torch.float16, [1e-6, 6e4])])
def test_extreme_gradients_stay_finite_and_no_gradient_leads_nowhere(dtype, scales):
    """float16 holds neither 1e-12 nor the length of the largest: a gradient of 0 made every weight nan."""
    w = {"w": torch.ones(4, dtype=dtype)}
    for scale in scales:
        found = ascended(w, {"w": torch.full((4,), scale, dtype=dtype)}, 0.5)["w"]
        assert found.dtype == dtype
        assert (found - 1).norm() <= 0.5 + 1e-6
        assert (found > 1).all() or scale == 1e-18
    assert torch.equal(ascended(w, {"w": torch.zeros(4, dtype=dtype)}, 0.5)["w"], w["w"])


# --- in a run ----------------------------------------------------------------------------------------------------


def test_the_hand_case(go):
    """From 0 the gradient of |w - c|^2 / 2 is -c; at -0.5 c / |c| it is -(c + 0.5 c / |c|) = -1.1 c, and lr is 0.1."""
    options = {**analytic_federation([[3.0, 4.0]]), "rounds": 1, "lr": 0.1}
    assert weights(go({Quadratic: {}, "fedsam": {"rho": 0.5}}, **options))[W].tolist() == pytest.approx([0.33, 0.44])


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_run_is_the_algorithm_in_numpy(go, tmp_path, adaptive):
    """Softmax regression, full batches, two clients, momentum and weight decay."""
    options = {**FEW, "model": linear, "clients": 2, "batch_size": 500, "local_epochs": 3, "rounds": 2, "lr": 0.1}
    result = go({"fedsam": {"rho": 0.2, "adaptive": adaptive, "eta": 0.1}}, **options, weight_decay=0.01)
    start = initial_weights(small_config(tmp_path, **options))
    w = {name: tensor.double().numpy() for name, tensor in start.items()}
    clients = client_arrays(result)

    def gradient(own, x, y):
        g = softmax_by_hand(own, x, y)[1]
        t = {n: np.abs(own[n]) + 0.1 if adaptive and "weight" in n else 1.0 for n in own}
        norm = np.sqrt(sum(np.square(t[n] * g[n]).sum() for n in g))
        return softmax_by_hand({n: own[n] + 0.2 * t[n] ** 2 * g[n] / norm for n in own}, x, y)[1]

    for _ in range(2):
        ends = [sgd_by_hand(gradient, w, x, y, 3, lr=0.1) for x, y in clients]
        w = mean_by_hand(ends, [len(x) for x, _ in clients])
    for name, tensor in weights(result).items():
        np.testing.assert_allclose(tensor, w[name], atol=2e-5)


def test_losses_are_recorded_once(go):
    tiny = go({"fedsam": {"rho": 1e-9}}, rounds=1)
    first, own = records(go({}, rounds=1))[0], records(tiny)[0]
    assert own["losses"]["task"] == pytest.approx(first["losses"]["task"], rel=1e-4)


def test_other_plugins_terms_take_part_in_the_second_pass(go):
    """mu |w - w_t|^2 / 2 at w + epsilon is part of the second gradient: by hand, from the second step on."""
    options = {**analytic_federation([[2.0]]), "rounds": 1, "local_epochs": 2, "lr": 0.1}
    w = 0.0
    for _ in range(2):
        at = w + 0.5 * np.sign((w - 2.0) + 3.0 * w)
        w = w - 0.1 * ((at - 2.0) + 3.0 * at)
    found = weights(go({Quadratic: {}, "fedprox": {"mu": 3.0}, "fedsam": {"rho": 0.5}}, **options))[W]
    assert found.tolist() == pytest.approx([w])


def test_a_step_neither_waits_for_the_device_nor_looks_at_the_client(go):
    with steps_without_host_sync() as looked:
        go({"fedsam": {}}, rounds=1)
    assert set().union(*looked) == set()
