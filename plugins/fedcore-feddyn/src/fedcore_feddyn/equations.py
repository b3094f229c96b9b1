"""FedDyn's alpha (Acar et al., ICLR 2021, arXiv 2111.04263); its other equations are in :mod:`fedcore_functional`.

The paper keeps g_i, the gradient of the client's loss at its last solution, and h = mean over all g_i. Here, as in the
authors' code, it is lambda_i = -g_i / alpha and its mean -h / alpha: displacements of weights, in which alpha does
not occur, so that a small alpha divides nothing.
"""

from __future__ import annotations


def client_alpha(alpha: float, samples: int, mean_samples: float | None) -> float:
    """Return alpha_i = alpha / (n_i / mean n): the clients' losses count by their samples then.

    At a fixed point alpha_i lambda_i = -grad F_i and the lambda_i have mean 0, so that the sum of n_i grad F_i is 0;
    with one alpha for all it is the sum of grad F_i.

    :param samples: n_i; ``mean_samples`` mean n over all clients, None for one alpha for all.
    :source: the authors' code; the paper has alpha.
    """
    return alpha if mean_samples is None else alpha * (mean_samples / samples)
