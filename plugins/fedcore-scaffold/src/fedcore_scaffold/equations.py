"""SCAFFOLD's step on the server (Karimireddy et al., ICML 2020, arXiv 1910.06378).

Eqs. 3 and 4, the correction and the renewed control variate, are in :mod:`fedcore_functional`.
"""

from __future__ import annotations

from torch import Tensor


def server_update(start: Tensor, mean: Tensor, server_lr: float) -> Tensor:
    """Return x + eta_g mean_S(y_i - x).

    :source: Eq. 5, first half.
    """
    return start + server_lr * (mean - start)
