"""The two losses of FDCL (Liu, Fang 2025, Algorithm 2, lines 8 and 9). They never sync with the host.

s(a, b) = exp(cos(a, b) / tau). The paper's printed forms lost the minus signs before the logarithms.
"""

from __future__ import annotations

from torch import Tensor

from fedcore_functional import model_contrastive_loss


def encoder_loss(local: Tensor, received: Tensor, previous: Tensor, *, temperature: float = 0.5) -> Tensor:
    r"""Return L_e, the mean of :math:`-\log(s(P^l, P^g) / (s(P^l, P^g) + s(P^l, P^p)))` (line 8).

    It pulls the features towards the global model's. P^l are the features of the model in training (``local``), P^g the
    global model's (``received``), P^p those of the client's own last model (``previous``), all (B, d). The result has
    shape ().

    >>> import torch
    >>> local, far = torch.tensor([[1.0, 0.0]]), torch.tensor([[-1.0, 0.0]])
    >>> encoder_loss(local, local, far, temperature=1.0)  # log(1 + exp(-2))
    tensor(0.1269)
    """
    return model_contrastive_loss(local, received, previous, temperature=temperature)


def classifier_loss(local: Tensor, received: Tensor, previous: Tensor, *, temperature: float = 0.5) -> Tensor:
    r"""Return L_c, the mean of :math:`-\log(s(P^l, P^p) / (s(P^l, P^g) + s(P^l, P^p)))` (line 9).

    It pulls the classifier's outputs, logits or probabilities (B, C), towards the outputs of the client's own last
    model. Arguments as in :func:`encoder_loss`.

    >>> import torch
    >>> local, far = torch.tensor([[1.0, 0.0]]), torch.tensor([[-1.0, 0.0]])
    >>> classifier_loss(local, local, far, temperature=1.0)  # log(1 + exp(2))
    tensor(2.1269)
    """
    return model_contrastive_loss(local, previous, received, temperature=temperature)
