"""Control variates and displacements against NumPy, and what stands in for a value that is not there yet."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedcore_functional import (
    correction,
    displaced_mean,
    renewed_control,
    renewed_displacement,
    renewed_mean_displacement,
    shifted_target,
)
from fedcore_testing import distance_by_hand


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_control_variates_against_numpy(momentum: float) -> None:
    g = torch.Generator().manual_seed(0)
    w, x, y, c, own = torch.randn(5, 3, 4, dtype=torch.float64, generator=g)
    gap = correction(w, c, own)
    np.testing.assert_allclose(gap, c.numpy() - own.numpy(), rtol=1e-15)
    np.testing.assert_allclose(correction(w, c, own, 0.4), c.numpy() / 0.4 - own.numpy(), rtol=1e-12)
    expected = own.numpy() - c.numpy() + (x.numpy() - y.numpy()) / (0.1 * distance_by_hand(7, momentum))
    found = renewed_control(x, y, gap, lr=0.1, steps=7, momentum=momentum)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_without_c_or_c_i_they_are_0() -> None:
    w = torch.randn(3, requires_grad=True)
    one = torch.ones(3)
    assert correction(w, None, None).tolist() == [0.0] * 3
    assert correction(w, one, None).tolist() == [1.0] * 3
    assert correction(w, None, one).tolist() == [-1.0] * 3
    assert not correction(w, one, one).requires_grad
    assert renewed_control(one, -one, None, lr=0.5, steps=2, momentum=0.0).tolist() == [2.0] * 3


def test_a_correction_lies_in_memory_as_its_parameter_does() -> None:
    """Otherwise every step would add gradients of two layouts."""
    w = torch.randn(4, 3, 5, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
    assert correction(w, torch.randn(4, 3, 5, 5), None).stride() == w.stride()


def test_displacements_against_numpy() -> None:
    g = torch.Generator().manual_seed(0)
    w, y, own, mean = torch.randn(4, 3, 2, dtype=torch.float64, generator=g)
    np.testing.assert_allclose(shifted_target(w, own), w.numpy() - own.numpy(), rtol=1e-15)
    np.testing.assert_allclose(renewed_displacement(own, w, y), own.numpy() + y.numpy() - w.numpy(), rtol=1e-12)
    assert torch.equal(shifted_target(w, None), w)
    assert shifted_target(w, None) is not w, "the server's model must not be written to"
    assert torch.equal(renewed_displacement(None, w, y), y - w)
    after = renewed_mean_displacement(mean, w.float(), y, 0.25)
    assert after.dtype == torch.float64
    np.testing.assert_allclose(after, mean.numpy() + 0.25 * (y.numpy() - w.float().numpy()), rtol=1e-12)
    np.testing.assert_allclose(displaced_mean(y, after), y.numpy() + after.numpy(), rtol=1e-12)
    assert displaced_mean(y.float(), after).dtype == torch.float32
