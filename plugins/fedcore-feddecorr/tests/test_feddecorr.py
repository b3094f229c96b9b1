"""FedDecorr: hand cases, value and gradient against NumPy, both formulas, and a whole run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedcore_feddecorr import correlation_matrix, frobenius_term, off_diagonal_term
from fedcore_testing import (
    OwnTaskLoss,
    client_arrays,
    federations,
    hidden_tanh,
    initial_weights,
    mean_by_hand,
    model_bytes,
    records,
    sgd_by_hand,
    small_config,
    tanh_by_hand,
    weights,
)

FEW = {"dataset": "module:fedcore_testing.problems.few_digits", "batch_size": 16}
go = federations(**FEW)
TERMS = {"paper": frobenius_term, "code": off_diagonal_term}


def by_hand(x, form):
    """Return the term of features x (B, d) and its gradient, in float64."""
    (size, width), centred = x.shape, x - x.mean(0)
    deviation = np.sqrt((centred**2).sum(0) / (size - 1) + 1e-8)
    z = centred / deviation
    gram = z.T @ z
    if form == "paper":
        factor = 1 / ((size - 1) * width) ** 2
    else:
        gram, factor = gram - np.diag(np.diag(gram)), 1 / (size * width * (width - 1))
    dz = 4 * factor * z @ gram
    dc = dz / deviation - centred / deviation**3 * (dz * centred).sum(0) / (size - 1)
    return factor * (gram**2).sum(), dc - dc.mean(0)


# --- the equations -----------------------------------------------------------------------------------------------


WEAK = 1 / 6 / np.sqrt(5 / 3 * 11 / 12)  # covariance 1/6, variances 5/3 and 11/12


@pytest.mark.parametrize(
    ("rows", "r", "code"),
    [
        ([[0, 0], [2, 2]], 1.0, 1 / 2),  # (B - 1)^2 / B r^2
        ([[1, 1], [1, -1], [-1, 1], [-1, -1]], 0.0, 0.0),
        ([[1, 0], [2, 1], [3, 2], [4, 0]], WEAK, 9 / 4 * WEAK**2),
    ],
)
def test_the_hand_cases(rows, r, code):
    """Two features with correlation r: ||K||_F^2 / d^2 is (2 + 2 r^2) / 4."""
    z = torch.tensor(rows, dtype=torch.float64)
    np.testing.assert_allclose(correlation_matrix(z), [[1, r], [r, 1]], atol=1e-7)
    assert frobenius_term(z).item() == pytest.approx((1 + r**2) / 2, abs=1e-7)
    assert off_diagonal_term(z).item() == pytest.approx(code, abs=1e-7)


@pytest.mark.parametrize("form", TERMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_value_and_gradient_against_numpy(form, dtype):
    x = np.random.default_rng(0).standard_normal((7, 5)) @ np.random.default_rng(1).standard_normal((5, 5))
    expected, gradient = by_hand(x, form)
    z = torch.tensor(x, dtype=dtype, requires_grad=True)
    value = TERMS[form](z)
    value.backward()
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    assert value.item() == pytest.approx(expected, rel=tolerance)
    np.testing.assert_allclose(z.grad, gradient, rtol=tolerance, atol=tolerance)


def test_the_matrix_is_numpys_and_its_scale_does_not_matter():
    x = np.random.default_rng(0).standard_normal((20, 4))
    np.testing.assert_allclose(correlation_matrix(torch.tensor(x)), np.corrcoef(x.T), atol=1e-7)
    moved = torch.tensor(x * [1, 10, 100, -1] + 5)
    assert frobenius_term(moved).item() == pytest.approx(frobenius_term(torch.tensor(x)).item(), rel=1e-6)


def test_the_paper_s_term_is_the_spread_of_the_singular_values():
    """Proposition 1: the sum of (lambda_i - mean lambda)^2 is ||K||_F^2 - d."""
    x = np.random.default_rng(0).standard_normal((9, 4))
    eigenvalues = np.linalg.eigvalsh(np.corrcoef(x.T))
    spread = ((eigenvalues - eigenvalues.mean()) ** 2).sum()
    assert 16 * frobenius_term(torch.tensor(x)).item() - 4 == pytest.approx(spread, rel=1e-6)


def test_both_formulas_have_one_gradient_but_for_the_factor_of_the_card():
    size, width = 9, 4
    x = np.random.default_rng(0).standard_normal((size, width))
    paper, code = (by_hand(x, form)[1] for form in ("paper", "code"))
    np.testing.assert_allclose(code, paper * (size - 1) ** 2 * width / (size * (width - 1)), atol=1e-7)


@pytest.mark.parametrize("form", TERMS)
def test_constant_and_single_features_stay_finite(form):
    for z in (torch.ones(4, 3), torch.zeros(2, 3), torch.tensor([[1.0], [2.0]]), 1e4 * torch.eye(3)):
        z = z.clone().requires_grad_()
        value = TERMS[form](z)
        value.backward()
        assert value.isfinite()
        assert z.grad.isfinite().all()
    assert off_diagonal_term(torch.tensor([[1.0], [2.0]])) == 0


# --- a whole run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "beta"), [("code", 0.3), ("paper", 2.0)])
def test_a_run_is_the_method_in_numpy(go, tmp_path, form, beta):
    """Two rounds of full batches with momentum and weight decay."""
    options = {**FEW, "model": hidden_tanh, "batch_size": 500, "lr": 0.1, "weight_decay": 1e-2, "local_epochs": 2}
    result = go(("feddecorr", {"beta": beta, "form": form}), **options)
    clients = client_arrays(result)
    start = {name: t.double().numpy() for name, t in initial_weights(small_config(tmp_path, **options)).items()}

    def distance(strength):
        def gradient(w, x, y):
            return tanh_by_hand(w, x, y, lambda h: strength * by_hand(h, form)[1])

        w = start
        for _ in range(2):
            ends = []
            for x, y in clients:
                ends.append(sgd_by_hand(gradient, w, x, y, 2, lr=0.1))
            w = mean_by_hand(ends, [len(x) for x, _ in clients])
        return max(np.abs(weights(result)[name].numpy() - value).max() for name, value in w.items())

    assert distance(beta) < 2e-5
    assert distance(0.0) > 1e-3


def test_every_option_changes_the_trajectory(go):
    changes = [{}, {"beta": 0.5}, {"beta": 0.0}, {"form": "paper"}]
    found = [model_bytes(go(("feddecorr", change))) for change in changes]
    assert len(set(found)) == len(changes)


def test_a_larger_beta_decorrelates_the_features(go):
    last = [
        records(go(("feddecorr", {"beta": beta}), rounds=3, local_epochs=3))[-1]["losses"]["feddecorr.decorrelation"]
        for beta in (1e-3, 1.0)
    ]
    assert last[1] < 0.7 * last[0]


def test_it_goes_with_another_task_loss_and_bf16(go):
    losses = records(go("feddecorr", OwnTaskLoss, precision="bf16", rounds=1))[0]["losses"]
    assert set(losses) == {"task", "feddecorr.decorrelation"}
