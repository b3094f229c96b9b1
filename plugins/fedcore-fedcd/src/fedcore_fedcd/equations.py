"""FedCD's equations, one function each (Long et al., ACM MM 2023, doi 10.1145/3581783.3611966).

Shapes: B samples of a batch, P prototypes as samples, N = B + P; feature width d, C classes, M fine classes per class,
K clients. Prototypes are (C, M, d). ``known`` (C, M) bool is False where a prototype does not exist yet. The values of
such a prototype never matter, not even NaN.

The functions of the training step never sync with the host.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcore_functional import class_means, cosine_similarity_matrix

# --- the rebalanced batch ----------------------------------------------------------------------------------------


class Points(NamedTuple):
    """The global prototypes P^g as samples, fixed during a round. P is 0 where none take part."""

    features: Tensor
    """P^g, (P, d)."""
    labels: Tensor
    """c, (P,)."""
    fine: Tensor
    """m, (P,)."""
    importance: Tensor
    """I_{c,m}, (P,); 0 where the prototype is not known."""


class Rebalanced(NamedTuple):
    """D^k+ of one batch: its B samples, then the P prototypes."""

    points: Points
    labels: Tensor
    """c, (N,)."""
    importance: Tensor
    """I_{c,t}, (N,)."""
    summed: bool = False
    """Whether the mean is multiplied by the sum of importances."""

    def join(self, of_samples: Tensor, of_points: Tensor) -> Tensor:
        """Return (B, ...) and (P, ...) as (N, ...)."""
        return torch.cat([of_samples, of_points]) if len(of_points) else of_samples

    def logits(self, of_samples: Tensor, classifier: nn.Module) -> Tensor:
        """Return class logits (N, C): the given ones of the samples, then the classifier's of the prototypes."""
        points = self.points.features
        return self.join(of_samples, classifier(points) if len(points) else points)

    def mean(self, losses: Tensor) -> Tensor:
        """Return 1 / N sum of I_{c,t} times the loss of each sample, N the sum of all I (Eqs. 5, 9, 10).

        :param losses: (N,).
        :returns: shape ().
        """
        importance = self.importance.to(losses.dtype)
        total = importance.sum()
        mean = (importance * losses).sum() / total
        # Dividing by the joint size, as the equations do, would scale down the gradient of the real samples.
        return mean * total if self.summed else mean


def points_of(prototypes: Tensor, importance: Tensor) -> Points:
    """Return the prototypes (C, M, d) with their importance (C, M) as samples."""
    index = torch.arange(importance.numel(), device=importance.device)
    per_class = importance.shape[1]
    return Points(prototypes.flatten(0, 1), index // per_class, index % per_class, importance.flatten())


def no_points(width: int, device: torch.device) -> Points:
    """Return no prototypes of a width, for a round without P^g."""
    return points_of(torch.zeros(0, 1, width, device=device), torch.zeros(0, 1, device=device))


def appended(labels: Tensor, points: Points) -> Rebalanced:
    """Return D^k+ with one mean over the samples and one over the prototypes, which are added up.

    :param labels: of the samples, (B,); each has the importance 1 / B.
    :param points: their importances add up to 1. Without any it is D^k, the samples alone.
    """
    if not len(points.labels):
        return Rebalanced(points, labels, points.importance.new_ones(labels.shape))
    of_samples = points.importance.new_full(labels.shape, 1.0 / len(labels))
    importance = torch.cat([of_samples, points.importance])
    return Rebalanced(points, torch.cat([labels, points.labels]), importance, summed=True)


# --- prototypes on a client --------------------------------------------------------------------------------------


def assign_fine_classes(features: Tensor, labels: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """Return argmax_m cos(z, P_{c,m}), each sample's fine class, over the known prototypes of its class c (Eq. 2).

    :param features: z (B, d); ``labels`` (B,).
    :returns: (B,) int64 in 0..M-1; 0 where the class has no known prototype. No gradient.
    """
    cosines: Tensor = cosine_similarity_matrix(features.detach(), prototypes.flatten(0, 1)).unflatten(1, known.shape)
    index = labels.view(-1, 1, 1).expand(-1, 1, known.shape[1])  # (B, 1, M)
    own = cosines.gather(1, index).squeeze(1)  # (B, M)
    return own.masked_fill(~known[labels], -torch.inf).argmax(dim=1)


def fine_counts(labels: Tensor, fine: Tensor, known: Tensor) -> Tensor:
    """Return n_{c,m}, the number of samples of each known fine class: (C, M) int64."""
    classes, per_class = known.shape
    place = labels * per_class + fine
    none = torch.zeros(classes * per_class, dtype=torch.int64, device=labels.device)
    return none.scatter_add(0, place, torch.ones_like(place)).view(classes, per_class) * known


def cluster_class(features: Tensor, per_class: int, seed: int) -> Tensor:
    """Return the k-means centres of one class's features: ``per_class``, or as many as there are distinct samples.

    :param features: (n, d), n >= 1.
    :returns: (m, d) with 1 <= m <= per_class, in the features' dtype, in the order of the centres' first samples.
    """
    from sklearn.cluster import KMeans  # takes a second to import, which other commands need not spend

    points = features.double().cpu().numpy()
    distinct = len(np.unique(points, axis=0))
    means = KMeans(min(per_class, distinct), n_init=10, random_state=seed).fit(points)
    _, first = np.unique(means.labels_, return_index=True)
    centres = means.cluster_centers_[np.argsort(first)]  # rounding can change the order in which k-means has them
    return torch.as_tensor(centres, dtype=features.dtype, device=features.device)


# --- the local objective -----------------------------------------------------------------------------------------


def hierarchical_weights(known: Tensor, alpha: float) -> Tensor:
    """Return the log weight of each psi in the denominator of omega (Eq. 4), for each own prototype.

    The weight is 1 for the own prototype, alpha for the others of its class, 1 - alpha for those of other classes, and
    0 for unknown ones. The row of an unknown own prototype keeps its weights: a sum over nothing would put NaN into
    the gradient, even though the loss is masked there.

    :returns: (CM, CM) float64, rows by own prototype.
    """
    classes, per_class = known.shape
    index, held = torch.arange(classes * per_class, device=known.device), known.flatten()
    of_class = index // per_class
    same = of_class == of_class.unsqueeze(1)  # (CM, CM)
    weights = torch.full(same.shape, 1 - alpha, dtype=torch.float64, device=known.device)
    weights = weights.masked_fill(same, alpha).masked_fill(index == index.unsqueeze(1), 1.0)
    return weights.masked_fill(~held & held.unsqueeze(1), 0.0).log()


def hierarchical_contrast(
    features: Tensor, labels: Tensor, fine: Tensor, prototypes: Tensor, known: Tensor, weights: Tensor, tau: float
) -> Tensor:
    """Return -log omega of each sample, with psi = exp(cos / tau) (Eqs. 3, 4).

    omega = pos / (pos + alpha * same class, other m + (1 - alpha) * other classes). The mean over D^k+ is
    L_hpc (Eq. 5).

    :param features: z (N, d); ``labels`` (N,); ``fine`` the fine classes (N,).
    :param weights: from :func:`hierarchical_weights`.
    :returns: (N,); 0 for a sample whose own prototype is not known.
    """
    prototypes = prototypes.masked_fill(~known.unsqueeze(2), 0.0)  # masking the loss alone would leave 0 * NaN
    logits = cosine_similarity_matrix(features, prototypes.flatten(0, 1)) / tau  # (N, CM), log psi
    own = labels * known.shape[1] + fine  # (N,)
    # The own prototype's log weight is 0, so the cross-entropy of the weighted logits is -log omega.
    losses = F.cross_entropy(logits + weights.to(logits.dtype)[own], own, reduction="none")  # (N,)
    return losses.masked_fill(~known.flatten()[own], 0.0)


class FineClassifier(nn.Module):
    """D and W of Eq. 6: C * M fine logits, index j = c * M + m, which the fixed W reduces to C class logits."""

    def __init__(self, width: int, num_classes: int, per_class: int) -> None:
        super().__init__()
        self.fine = nn.Linear(width, num_classes * per_class)
        self.shape = (num_classes, per_class)

    def forward(self, features: Tensor) -> Tensor:
        """Map features (B, d) to class logits (B, C)."""
        return self.reduce(self.fine(features).unflatten(1, self.shape))

    def reduce(self, fine: Tensor) -> Tensor:
        """Multiply fine logits (B, C, M) by W: the class logits (B, C)."""
        return fine.sum(dim=2)


def batch_prototype_loss(features: Tensor, labels: Tensor, classifier: nn.Module, num_classes: int) -> Tensor:
    """Return L_bpr, the cross-entropy of the batch's class means through the global classifier (Eqs. 6, 7).

    :param classifier: the frozen global classifier, W included: (C, d) -> (C, C).
    :returns: the mean over the classes in the batch, shape (). The gradient reaches the encoder through the means.
    """
    means, counts = class_means(features, labels, num_classes)  # (C, d), (C,)
    own = torch.arange(num_classes, device=features.device)
    losses = F.cross_entropy(classifier(means), own, reduction="none")  # (C,)
    present = (counts > 0).to(losses.dtype)
    return (present * losses).sum() / present.sum()


def decoupled_distillation(teacher_logits: Tensor, student_logits: Tensor, labels: Tensor, *, xi: float) -> Tensor:
    """Return DKD = TCKD + xi * NCKD of each sample (Eq. 8). The mean over D^k+ is L_gid (Eq. 9).

    TCKD is the KL divergence of (target, rest), NCKD that of the renormalised non-target classes. Both use
    log-sum-exp. The teacher gets no gradient.

    :param teacher_logits: (N, C), C at least 2; ``student_logits`` (N, C); ``labels`` (N,).
    :returns: (N,).
    """
    teacher, student = teacher_logits.detach().log_softmax(dim=1), student_logits.log_softmax(dim=1)
    own = labels.unsqueeze(1)  # (N, 1)
    places = torch.arange(teacher.shape[1] - 1, device=labels.device)
    others = places + (places >= own).long()  # (N, C - 1): every class but the own
    target_t, target_s = teacher.gather(1, own).squeeze(1), student.gather(1, own).squeeze(1)  # (N,) log p_c
    other_t, other_s = teacher.gather(1, others), student.gather(1, others)  # (N, C - 1) log p_j
    rest_t, rest_s = other_t.logsumexp(dim=1), other_s.logsumexp(dim=1)  # (N,) log(1 - p_c)
    tckd = target_t.exp() * (target_t - target_s) + rest_t.exp() * (rest_t - rest_s)
    hat_t, hat_s = other_t - rest_t.unsqueeze(1), other_s - rest_s.unsqueeze(1)  # (N, C - 1)
    nckd = (hat_t.exp() * (hat_t - hat_s)).sum(dim=1)
    return tckd + xi * nckd


# --- the server --------------------------------------------------------------------------------------------------


def global_prototypes(sums: Tensor, totals: Tensor, prototypes: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return P^g (C, M, d) float32, the count-weighted mean of the clients' P^k, and its counts (C, M) (Eq. 1).

    :param sums: sum over the cohort of n^k_{c,m} P^k_{c,m}, (C, M, d) float64; ``totals`` of n^k_{c,m}, (C, M).
    :param prototypes: the previous P^g, which stays where no client of the cohort holds (c, m); ``counts`` its counts.
    """
    held = totals > 0
    means = (sums / totals.clamp(min=1).unsqueeze(2)).float()
    return torch.where(held.unsqueeze(2), means, prototypes), torch.where(held, totals, counts)


def class_vector_weights(weights: Tensor, biases: Tensor, prototypes: Tensor) -> Tensor:
    """Return v^j[k], the weight of client k's class vector j in the global classifier (Eqs. 13, 14).

    p_k = softmax(D_k(P_j)) over all CM outputs; v^j = softmax over clients of p_k[j].

    :param weights: the clients' fine classifiers (K, CM, d); ``biases`` (K, CM); ``prototypes`` P^g (CM, d).
    :returns: (CM, K); each row sums to 1.
    """
    logits = torch.einsum("kjd,pd->kpj", weights, prototypes) + biases.unsqueeze(1)  # (K, CM prototypes, CM outputs)
    own = logits.softmax(dim=2).diagonal(dim1=1, dim2=2)  # (K, CM): p_k^j[j]
    return own.softmax(dim=0).T


def aggregate_class_vectors(shares: Tensor, vectors: Tensor) -> Tensor:
    """Return sum over clients of v^j[k] phi^j_k for each class vector j (Eqs. 12, 15).

    :param shares: v (CM, K); ``vectors`` (K, CM, ...): the weights (K, CM, d) or the biases (K, CM).
    :returns: (CM, ...).
    """
    return torch.einsum("jk,kj...->j...", shares, vectors)
