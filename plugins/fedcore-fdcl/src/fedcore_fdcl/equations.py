"""The two losses of FDCL (Algorithm 2, lines 8 and 9): pure functions, capture-safe.

The paper's printed forms lost the minus signs before their logarithms. s(a, b) = exp(cos(a, b) / tau).
"""

from __future__ import annotations

from torch import Tensor

from fedcore_functional import model_contrastive_loss


def encoder_loss(local: Tensor, received: Tensor, previous: Tensor, *, temperature: float = 0.5) -> Tensor:
    r"""Return L_e, the mean of :math:`-\log(s(P^l, P^g) / (s(P^l, P^g) + s(P^l, P^p)))` (line 8).

    Features ``local`` P^l of the model in training, ``received`` P^g of the global and ``previous`` P^p of the
    client's own last model, all (B, d); the result has shape (). It pulls towards the global model.

    >>> import torch
    >>> local, far = torch.tensor([[1.0, 0.0]]), torch.tensor([[-1.0, 0.0]])
    >>> encoder_loss(local, local, far, temperature=1.0)  # log(1 + exp(-2))
    tensor(0.1269)
    """
    return model_contrastive_loss(local, received, previous, temperature=temperature)


def classifier_loss(local: Tensor, received: Tensor, previous: Tensor, *, temperature: float = 0.5) -> Tensor:
    r"""Return L_c, the mean of :math:`-\log(s(P^l, P^p) / (s(P^l, P^g) + s(P^l, P^p)))` (line 9).

    The same on the classifier's outputs, logits or probabilities (B, C), in the other direction: it pulls towards
    the client's own last model.

    >>> import torch
    >>> local, far = torch.tensor([[1.0, 0.0]]), torch.tensor([[-1.0, 0.0]])
    >>> classifier_loss(local, local, far, temperature=1.0)  # log(1 + exp(2))
    tensor(2.1269)
    """
    return model_contrastive_loss(local, previous, received, temperature=temperature)
