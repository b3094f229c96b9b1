"""The server's part of FedTGP (Zhang, Liu, Hua, Cao, AAAI 2024, arXiv 2401.03230): margin, contrast and training."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcore import Tensors


def first_parameters(num_classes: int, width: int, generator: torch.Generator) -> Tensors:
    """Return the server's parameters at the start: an embedding of each class and the two layers that process it.

    Embeddings are normal, the layers have PyTorch's default range, +-1/sqrt(d).
    """
    bound = width**-0.5

    def uniform(*shape: int) -> Tensor:
        drawn: Tensor = bound * (2 * torch.rand(*shape, generator=generator) - 1)
        return drawn

    return {
        "embedding": torch.randn(num_classes, width, generator=generator),
        "hidden.weight": uniform(width, width),
        "hidden.bias": uniform(width),
        "output.weight": uniform(width, width),
        "output.bias": uniform(width),
    }


def prototypes_of(parameters: Mapping[str, Tensor]) -> Tensor:
    """Return the trainable global prototypes (C, d): linear, ReLU, linear, of the classes' embeddings.

    >>> one = {"weight": torch.tensor([[2.0]]), "bias": torch.tensor([1.0])}
    >>> layers = {f"{layer}.{name}": tensor for layer in ("hidden", "output") for name, tensor in one.items()}
    >>> prototypes_of({"embedding": torch.tensor([[1.0], [-3.0]]), **layers})
    tensor([[7.],
            [1.]])
    """
    hidden = F.linear(parameters["embedding"], parameters["hidden.weight"], parameters["hidden.bias"]).relu()
    return F.linear(hidden, parameters["output.weight"], parameters["output.bias"])


def class_margins(means: Tensor, known: Tensor) -> Tensor:
    """Return each known class's distance from the nearest other known one, (known classes,); empty if there is one.

    ``means`` (C, d) of the clients' prototypes, ``known`` (C,) bool.

    >>> class_margins(torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]]), torch.tensor([True, True, True]))
    tensor([1.0000, 4.2426, 1.0000])
    """
    held = means[known]
    if len(held) < 2:
        return held.new_zeros(0)
    return _distances(held, held).fill_diagonal_(torch.inf).amin(dim=1)


def adaptive_margin(means: Tensor, known: Tensor, threshold: float) -> float:
    """Return delta = min(max_c (distance of class c from the nearest other class), tau); 0 with fewer than two classes.

    Arguments as in :func:`class_margins`; ``threshold`` is tau.

    >>> adaptive_margin(torch.tensor([[0.0], [3.0], [4.0]]), torch.tensor([True, True, True]), 100.0)
    3.0
    """
    margins = class_margins(means, known)
    return min(float(margins.max()), threshold) if len(margins) else 0.0


def margin_contrast(sent: Tensor, labels: Tensor, prototypes: Tensor, margin: float) -> Tensor:
    r"""Return the mean of :math:`-\log(e^{-\phi_y - \delta} / (e^{-\phi_y - \delta} + \sum_{c \ne y} e^{-\phi_c}))`.

    phi_c is the Euclidean distance of a client's prototype from the global one of class c. ``sent`` (B, d) of the
    classes ``labels`` (B,), ``prototypes`` (C, d), ``margin`` delta; the result has shape ().

    >>> margin_contrast(torch.tensor([[0.0]]), torch.tensor([0]), torch.tensor([[1.0], [3.0]]), 2.0)  # log 2
    tensor(0.6931)
    """
    distances = _distances(sent, prototypes)  # (B, C)
    own = labels.unsqueeze(1) == torch.arange(len(prototypes))
    return F.cross_entropy(-(distances + margin * own.to(distances.dtype)), labels)


def trained(
    parameters: Mapping[str, Tensor],
    sent: Tensor,
    labels: Tensor,
    *,
    margin: float,
    epochs: int,
    lr: float,
    batch_size: int,
    generator: torch.Generator,
) -> Tensors:
    """Return the server's parameters after SGD on :func:`margin_contrast` over the clients' prototypes.

    ``sent`` (n, d) and ``labels`` (n,) are shuffled in each epoch.
    """
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in parameters.items()}
    with torch.enable_grad():
        for _ in range(epochs):
            for rows in torch.randperm(len(sent), generator=generator).split(batch_size):
                loss = margin_contrast(sent[rows], labels[rows], prototypes_of(leaves), margin)
                gradients = torch.autograd.grad(loss, list(leaves.values()))
                with torch.no_grad():
                    for leaf, gradient in zip(leaves.values(), gradients, strict=True):
                        leaf.sub_(gradient, alpha=lr)
    return {name: leaf.detach() for name, leaf in leaves.items()}


def _distances(a: Tensor, b: Tensor) -> Tensor:
    """Return Euclidean distances (n, m). Their gradient at 0 is 0, and nothing cancels as in |a|^2 - 2ab + |b|^2."""
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
