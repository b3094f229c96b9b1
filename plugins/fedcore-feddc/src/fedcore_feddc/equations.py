"""How much a client counts in FedDC (Gao et al., CVPR 2022, arXiv 2203.11751).

Its other equations are in :mod:`fedcore_functional`, where FedDyn's and SCAFFOLD's are: the drift h_i is a
displacement, the gradients s_i and s are control variates.
"""

from __future__ import annotations


def client_weight(samples: int, mean_samples: float | None) -> float:
    """Return W_i = n_i / mean n over all clients; 1 where all clients count the same (``mean_samples`` is None).

    With alpha / W_i, s / W_i and s the mean of W_i s_i a fixed point has sum of n_i grad F_i = 0, without W_i sum of
    grad F_i = 0.

    :source: the authors' code.
    """
    return 1.0 if mean_samples is None else samples / mean_samples
