"""The measures, one function each. Features and means are float64; a measure that is not defined is nan.

Neural collapse is that of Papyan, Han, Donoho (PNAS 2020, arXiv 2008.08186). ``means`` mu (C, d) are the class means of
the features, and M are the means minus their mean: the classes count equally, whatever their samples.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def linear_cka(one: Tensor, other: Tensor) -> Tensor:
    """Return the linear CKA of two models' features X (n, d) and Y (n, e) of the same samples, shape (), in [0, 1].

    It is |Y^T X|_F^2 / (|X^T X|_F |Y^T Y|_F), X and Y centred over the samples. It is 1 for features that are equal up
    to rotation, shift and one scale.

    :source: Kornblith, Norouzi, Lee, Hinton, ICML 2019, arXiv 1905.00414.

    >>> x = torch.tensor([[0.0, 1.0], [2.0, 0.0], [1.0, 5.0]])
    >>> linear_cka(x, 3 * x.flip(1) + 7)
    tensor(1.)
    """
    x, y = (features - features.mean(0) for features in (one, other))
    return (y.mT @ x).square().sum() / (_length(x.mT @ x) * _length(y.mT @ y))


def within_class_variability(features: Tensor, labels: Tensor, means: Tensor) -> Tensor:
    """Return NC1: Tr(S_W S_B^+) / C, shape (); 0 if all samples of a class have the same features.

    ``features`` (n, d), ``labels`` (n,) in 0..C-1, every class with a sample. S_W is the mean over the classes of their
    covariances, S_B that of the class means; S_B^+ is the pseudo-inverse.

    >>> z, y = torch.tensor([[0.0], [2.0], [4.0], [4.0]]), torch.tensor([0, 0, 1, 1])
    >>> within_class_variability(z, y, torch.tensor([[1.0], [4.0]]))  # (1 + 0) / 2 over 2.25, over 2 classes
    tensor(0.1111)
    """
    classes = len(means)
    basis, values, _ = torch.linalg.svd((means - means.mean(0)).mT, full_matrices=False)  # S_B = M^T M / C
    kept = values > 1e-10 * values.max()
    spread = ((features - means[labels]) @ basis[:, kept]).square()  # (n, r)
    each = torch.zeros(classes, spread.shape[1], dtype=spread.dtype).index_add_(0, labels, spread)
    variances = (each / labels.bincount(minlength=classes).unsqueeze(1)).mean(0)  # of S_W along the basis
    ratio = (variances / values[kept].square()).sum()  # S_B's eigenvalue is s^2 / C, and C cancels
    return torch.where(kept.any(), ratio, torch.nan)


def norm_spread(rows: Tensor) -> Tensor:
    """Return the standard deviation of the rows' lengths (C, d) over their mean: NC2, equal norms; 0 if all are equal.

    >>> norm_spread(torch.tensor([[3.0, 4.0], [0.0, 15.0]]))
    tensor(0.5000)
    """
    lengths = _lengths(rows)
    return lengths.std(correction=0) / lengths.mean()


def angle_spread(rows: Tensor) -> Tensor:
    """Return the standard deviation of the cosines of all pairs of rows (C, d): NC2, equal angles.

    >>> angle_spread(torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 1.0]]))  # of 0, 0 and 1
    tensor(0.4714)
    """
    return _cosines(rows).std(correction=0)


def distance_from_simplex(rows: Tensor) -> Tensor:
    """Return the mean over pairs of |cos + 1 / (C - 1)|: NC2, widest angles; 0 for the corners of a simplex.

    >>> distance_from_simplex(torch.tensor([[1.0, 0.0], [-2.0, 0.0]]))
    tensor(0.)
    """
    return (_cosines(rows) + 1 / max(1, len(rows) - 1)).abs().mean()


def duality_distance(rows: Tensor, means: Tensor) -> Tensor:
    """Return NC3: |W / |W|_F - M / |M|_F|_F^2, in [0, 4]; 0 if the classifier's rows W (C, d) are M up to a scale.

    >>> duality_distance(torch.tensor([[2.0], [-2.0]]), torch.tensor([[6.0], [4.0]]))
    tensor(0.)
    """
    centred = means - means.mean(0)
    return (rows / _length(rows) - centred / _length(centred)).square().sum()


def nearest_mean_mismatch(logits: Tensor, features: Tensor, means: Tensor) -> Tensor:
    """Return NC4: the share of samples whose class by the logits (n, C) is not that of the nearest mean, shape ().

    Logits that are nan or infinite have no class.

    >>> logits = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    >>> nearest_mean_mismatch(logits, torch.tensor([[0.1], [0.9]]), torch.tensor([[0.0], [1.0]]))
    tensor(0.5000)
    """
    largest, predicted = logits.max(1)
    agree = largest.isfinite() & (predicted == torch.cdist(features, means).argmin(1))
    return (~agree).to(features.dtype).mean()


def correlation(one: Tensor, other: Tensor) -> Tensor:
    """Return Pearson's correlation of two vectors (C,), shape (); nan if one is constant, but for float32's rounding.

    >>> correlation(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([-1.0, -2.0, -4.0]))
    tensor(-1.0000)
    """
    x, y = (values - values.mean() for values in (one, other))
    constant = (_length(x) <= 1e-6 * _length(one)) | (_length(y) <= 1e-6 * _length(other))
    return torch.where(constant, torch.nan, x @ y / (_length(x) * _length(y)))


def update_cosine(update: Tensor, mean: Tensor) -> Tensor:
    """Return the cosine of a client's update w_k - w_t and the mean of the round's updates, both (P,); nan if one is 0.

    >>> update_cosine(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 1.0]))
    tensor(0.7071)
    """
    return update @ mean / (_length(update) * _length(mean))


def prototype_drift(own: Tensor, means: Tensor) -> Tensor:
    """Return each class's |mu_{k,c} - mu_c| over the mean length of M, (C,).

    ``own`` mu_k (C, d) are the class means of a client's model, ``means`` mu (C, d) those of the global one. At 1 a
    class mean is as far from the global one as this one is from the mean of all.

    >>> prototype_drift(torch.tensor([[0.0], [9.0]]), torch.tensor([[0.0], [6.0]]))
    tensor([0., 1.])
    """
    return _lengths(own - means) / _lengths(means - means.mean(0)).mean()


def _length(tensor: Tensor) -> Tensor:
    """Return the Euclidean or Frobenius norm, shape ()."""
    return tensor.square().sum().sqrt()


def _lengths(rows: Tensor) -> Tensor:
    """Return the length of each row, (C,)."""
    return rows.square().sum(1).sqrt()


def _cosines(rows: Tensor) -> Tensor:
    """Return the cosines of all pairs of rows, (C (C - 1) / 2,)."""
    unit = F.normalize(rows, dim=1)
    first, second = torch.triu_indices(len(rows), len(rows), 1)
    return (unit[first] * unit[second]).sum(1)
