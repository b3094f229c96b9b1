"""FedCD's equations, one function each (Long et al., ACM MM 2023, doi 10.1145/3581783.3611966).

Shapes: B samples, d feature width, C classes, M fine classes per class; prototypes P (C, M, d). A prototype that
is not known is masked, never a zero vector that takes part. Nothing here syncs with the host but k-means.
"""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcore_functional import class_means, cosine_similarity_matrix

TINY = 1e-12


def assign_fine_classes(features: Tensor, labels: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """Return each sample's fine class within its class: argmax_m cos(z, P_{c,m}) over the known ones (Eq. 2).

    :param features: z (B, d); ``labels`` (B,); ``prototypes`` (C, M, d); ``known`` (C, M) bool.
    :returns: (B,) int64 in 0..M-1; 0 where the class has no known prototype.
    """
    cosines: Tensor = cosine_similarity_matrix(features.detach(), prototypes.flatten(0, 1)).unflatten(1, known.shape)
    index = labels.view(-1, 1, 1).expand(-1, 1, known.shape[1])  # (B, 1, M)
    own = cosines.gather(1, index).squeeze(1)  # (B, M)
    return own.masked_fill(~known[labels], -torch.inf).argmax(dim=1)


def hierarchical_weights(known: Tensor, alpha: float) -> Tensor:
    """Return the log weights of psi in the denominator of omega, by a sample's own prototype (Eqs. 3, 4).

    0 for the own prototype, log(alpha) for others of its class, log(1 - alpha) for those of other classes, and -inf
    for unknown ones. The rows of unknown own prototypes keep finite entries: a sum over nothing would leave NaN in the
    gradient of a loss that is masked.

    :param known: (C, M) bool.
    :returns: (CM, CM), float64.
    """
    classes, per_class = known.shape
    index, held = torch.arange(classes * per_class, device=known.device), known.flatten()
    of_class = index // per_class
    same = of_class == of_class.unsqueeze(1)  # (CM, CM)
    weights = torch.full(same.shape, _log(1 - alpha), dtype=torch.float64, device=known.device)
    weights = weights.masked_fill(same, _log(alpha)).masked_fill(index == index.unsqueeze(1), 0.0)
    return weights.masked_fill(~held & held.unsqueeze(1), -torch.inf)


def hierarchical_prototype_loss(
    features: Tensor,
    labels: Tensor,
    fine: Tensor,
    prototypes: Tensor,
    *,
    alpha: float = 0.1,
    temperature: float = 1.0,
    importance: Tensor | None = None,
    known: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Return L_hpc: the importance-weighted mean of -log omega (Eqs. 3 to 5).

    omega = pos / (pos + alpha * same class, other m + (1 - alpha) * other classes), psi = exp(cos / temperature).
    A sample whose own prototype is not known contributes 0 and keeps its importance in the divisor. What stands in
    the rows of unknown prototypes, even NaN, does not matter.

    :param fine: fine class within the class (B,); ``importance`` (B,), default 1; ``known`` (C, M), default all.
    :param weights: :func:`hierarchical_weights` of ``known`` and ``alpha``, where they were computed before.
    :returns: shape ().
    """
    classes, per_class, _ = prototypes.shape
    known = torch.ones(classes, per_class, dtype=torch.bool, device=features.device) if known is None else known
    weights = hierarchical_weights(known, alpha) if weights is None else weights
    prototypes = prototypes.masked_fill(~known.unsqueeze(2), 0.0)  # masking alone would not stop 0 * NaN
    logits = cosine_similarity_matrix(features, prototypes.flatten(0, 1)) / temperature  # (B, CM), log psi
    own = labels * per_class + fine  # (B,)
    # The own prototype's log weight is 0, so the cross-entropy of the weighted logits is -log omega.
    loss = F.cross_entropy(logits + weights.to(logits.dtype)[own], own, reduction="none")  # (B,)
    return _weighted_mean(loss.masked_fill(~known.flatten()[own], 0.0), importance)


def batch_prototype_loss(features: Tensor, labels: Tensor, classifier: nn.Module, num_classes: int) -> Tensor:
    """Return L_bpr: cross-entropy of the batch's class means through the global classifier (Eqs. 6, 7).

    :param classifier: the frozen global classifier, W included: (C, d) -> (C, C).
    :returns: mean over the classes in the batch, shape (); the gradient reaches the encoder through the means.
    """
    means, counts = class_means(features, labels, num_classes)  # (C, d), (C,)
    own = torch.arange(num_classes, device=features.device)
    losses = F.cross_entropy(classifier(means), own, reduction="none")  # (C,)
    return _weighted_mean(losses, (counts > 0).to(losses.dtype))


def decoupled_distillation_loss(
    teacher_logits: Tensor, student_logits: Tensor, labels: Tensor, *, xi: float, importance: Tensor | None = None
) -> Tensor:
    """Return L_gid: TCKD + xi * NCKD, importance-weighted mean (Eqs. 8, 9).

    TCKD is the KL divergence of (target, rest), NCKD that of the renormalised non-target classes; both through
    log-sum-exp. The teacher gets no gradient.

    :param teacher_logits: (B, C), as is ``student_logits``; ``labels`` (B,); C is at least 2.
    :returns: shape ().
    """
    teacher, student = teacher_logits.detach().log_softmax(dim=1), student_logits.log_softmax(dim=1)
    own = labels.unsqueeze(1)  # (B, 1)
    places = torch.arange(teacher.shape[1] - 1, device=labels.device)
    others = places + (places >= own).long()  # (B, C - 1): every class but the own
    target_t, target_s = teacher.gather(1, own).squeeze(1), student.gather(1, own).squeeze(1)  # (B,) log p_c
    other_t, other_s = teacher.gather(1, others), student.gather(1, others)  # (B, C - 1) log p_j
    rest_t, rest_s = other_t.logsumexp(dim=1), other_s.logsumexp(dim=1)  # (B,) log(1 - p_c)
    tckd = target_t.exp() * (target_t - target_s) + rest_t.exp() * (rest_t - rest_s)
    hat_t, hat_s = other_t - rest_t.unsqueeze(1), other_s - rest_s.unsqueeze(1)  # (B, C - 1)
    nckd = (hat_t.exp() * (hat_t - hat_s)).sum(dim=1)
    return _weighted_mean(tckd + xi * nckd, importance)


def distillation_loss(teacher_logits: Tensor, student_logits: Tensor, *, importance: Tensor | None = None) -> Tensor:
    """Return plain KL(teacher || student), importance-weighted mean (FedCD/kd of Table 4)."""
    teacher, student = teacher_logits.detach().log_softmax(dim=1), student_logits.log_softmax(dim=1)
    return _weighted_mean((teacher.exp() * (teacher - student)).sum(dim=1), importance)


def debiased_classifier_loss(logits: Tensor, labels: Tensor, *, importance: Tensor | None = None) -> Tensor:
    """Return L_dcl: the importance-weighted mean cross-entropy (Eq. 10)."""
    return _weighted_mean(F.cross_entropy(logits, labels, reduction="none"), importance)


def class_vector_weights(weights: Tensor, biases: Tensor, prototypes: Tensor) -> Tensor:
    """Return v^j[k], what client k's class vector j weighs in the global classifier (Eqs. 13, 14).

    p_k = softmax(phi_k(P_j)) over all CM outputs; v^j = softmax over clients of p_k[j].

    :param weights: the clients' fine classifiers (K, CM, d); ``biases`` (K, CM); ``prototypes`` (CM, d).
    :returns: (CM, K), each row sums to 1.
    """
    logits = torch.einsum("kjd,pd->kpj", weights, prototypes) + biases.unsqueeze(1)  # (K, CM prototypes, CM outputs)
    own = logits.softmax(dim=2).diagonal(dim1=1, dim2=2)  # (K, CM): p_k^j[j]
    return own.softmax(dim=0).T


def fine_counts(labels: Tensor, fine: Tensor, known: Tensor) -> Tensor:
    """Return n_{c,m}, how many samples each known fine class has: (C, M) int64."""
    classes, per_class = known.shape
    counts = torch.bincount(labels * per_class + fine, minlength=classes * per_class).view(classes, per_class)
    return counts * known


def fine_means(features: Tensor, labels: Tensor, fine: Tensor, prototypes: Tensor) -> Tensor:
    """Return the mean feature of each fine class, the given prototype where it has no sample: (C, M, d)."""
    classes, per_class, width = prototypes.shape
    means, counts = class_means(features.double(), labels * per_class + fine, classes * per_class)
    held = (counts > 0).view(classes, per_class, 1)  # (C, M, 1)
    return torch.where(held, means.view(classes, per_class, width).to(prototypes.dtype), prototypes)


def cluster_class(features: Tensor, per_class: int, seed: int) -> Tensor:
    """Return the k-means centres of one class's features, at most ``per_class``, no more than distinct samples.

    :param features: (n, d), n >= 1.
    :returns: (m, d) with 1 <= m <= per_class, in the features' dtype.
    """
    from sklearn.cluster import KMeans

    points = features.double().cpu().numpy()
    distinct = len(np.unique(points, axis=0))
    means = KMeans(min(per_class, distinct), n_init=10, random_state=seed).fit(points)
    return torch.as_tensor(means.cluster_centers_, dtype=features.dtype, device=features.device)


def matched_order(centres: Tensor, known: Tensor, others: Tensor, others_known: Tensor) -> Tensor:
    """Return the order in which centres lie nearest others, place by place: an exact assignment, no paper's.

    As many known centres as possible get a known partner, with the least sum of squared distances; of equal sums the
    first in the order of permutations counts.

    :param centres: (M, d), as ``others``; ``known`` (M,) bool, as ``others_known``. M is at most 8.
    :returns: (M,) int64: ``centres[order][m]`` belongs to ``others[m]``.
    """
    distances = (others.double().unsqueeze(1) - centres.double()).square().sum(dim=2)  # (M places, M centres)
    apart = 1 + distances.sum()  # dearer than any pairs of known ones
    cost = torch.where(others_known.unsqueeze(1) & known, distances, apart)
    orders = torch.tensor(list(permutations(range(len(known)))))  # (M!, M)
    return orders[cost[torch.arange(len(known)), orders].sum(dim=1).argmin()]


def _weighted_mean(values: Tensor, importance: Tensor | None) -> Tensor:
    if importance is None:
        return values.mean()
    importance = importance.to(values.dtype)
    return (importance * values).sum() / importance.sum().clamp(min=TINY)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
