"""FedGen's generator and its losses (Zhu, Hong, Zhou, ICML 2021, arXiv 2105.10056), one function each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

TRAINED = ("hidden.weight", "hidden.bias", "norm.weight", "norm.bias", "out.weight", "out.bias")
"""The generator's parameters."""

MEASURED = ("norm.mean", "norm.variance")
"""The generator's BatchNorm statistics, which clients use."""


def first_generator(noise: int, hidden: int, width: int, classes: int, draws: torch.Generator) -> dict[str, Tensor]:
    """Return the tensors of an untrained generator from m + C inputs to d features, over ``hidden`` units.

    Both linear layers are drawn uniformly from +-1/sqrt(inputs), as torch does; BatchNorm starts as the identity.
    """

    def uniform(inputs: int, *shape: int) -> Tensor:
        return torch.empty(shape).uniform_(-(inputs**-0.5), inputs**-0.5, generator=draws)

    inputs = noise + classes
    layers = [uniform(inputs, hidden, inputs), uniform(inputs, hidden), torch.ones(hidden), torch.zeros(hidden)]
    layers += [uniform(hidden, width, hidden), uniform(hidden, width), torch.zeros(hidden), torch.ones(hidden)]
    return dict(zip(TRAINED + MEASURED, layers, strict=True))


def generate(generator: Mapping[str, Tensor], noise: Tensor, labels: Tensor, *, train: bool = False) -> Tensor:
    """Return features G(eps, y) (B, d): linear, BatchNorm, ReLU, linear, of the noise and the one-hot label.

    ``noise`` eps (B, m), ``labels`` y (B,). In training BatchNorm uses the batch, and renews its statistics in place.
    """
    weight = generator["hidden.weight"]  # (hidden, m + C)
    # The label's column of the matrix instead of a product with a one-hot vector.
    z = noise @ weight[:, : noise.shape[1]].mT + weight.mT[noise.shape[1] + labels] + generator["hidden.bias"]
    mean, variance, scale, shift = (generator[name] for name in (*MEASURED, "norm.weight", "norm.bias"))
    z = F.batch_norm(z, mean, variance, scale, shift, training=train)
    return F.linear(z.relu(), generator["out.weight"], generator["out.bias"])


def label_weights(counts: Tensor) -> Tensor:
    """Return the share n_{k,c} / sum_j n_{j,c} of each client in each class, (K, C); 0 for a class without samples.

    ``counts`` n (K, C): the clients' samples per class.

    >>> label_weights(torch.tensor([[1, 0, 0], [3, 2, 0]]))
    tensor([[0.2500, 0.0000, 0.0000],
            [0.7500, 1.0000, 0.0000]])
    """
    return counts / counts.sum(0).clamp(min=1)


def consensus_loss(logits: Sequence[Tensor], labels: Tensor, weights: Tensor) -> Tensor:
    """Return the mean over the batch of sum_k a_{k,y} CE(g_k, y), shape ().

    ``logits`` g_k (B, C) of each client's classifier on generated features, ``labels`` y (B,), ``weights`` a (K, C)
    from :func:`label_weights`.
    """
    each = torch.stack([F.cross_entropy(own, labels, reduction="none") for own in logits])  # (K, B)
    return (weights[:, labels] * each).sum(0).mean()


def diversity_loss(noise: Tensor, features: Tensor) -> Tensor:
    """Return exp(-mean_{i,j} of |eps_i - eps_j|^2 / m * |z_i - z_j|_1 / d), shape ().

    ``noise`` eps (B, m), ``features`` z (B, d). It is 1 if all features are equal.

    >>> diversity_loss(torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0, 0.0], [2.0, 4.0]]))  # exp(-(2 * 1 * 3) / 4)
    tensor(0.2231)
    """
    apart = (noise.unsqueeze(1) - noise).square().mean(2)  # (B, B)
    return (-apart * (features.unsqueeze(1) - features).abs().mean(2)).mean().exp()


def consistency_loss(logits: Tensor, generated: Tensor, known: Tensor) -> Tensor:
    """Return the mean over the batch of KL(softmax(generated) || softmax(logits)), shape ().

    ``logits`` (B, C) of real samples, ``generated`` (B, C) of features generated for their labels; no gradient goes
    there. ``known`` (B,) bool: a sample whose class the generator does not know counts as 0.
    """
    target = generated.detach().softmax(1)
    each = F.kl_div(logits.log_softmax(1), target, reduction="none").sum(1)
    return torch.where(known, each, 0.0).mean()
