"""Which training samples are divided among the clients: of all domains but one, in a long tail, or some of them."""

from __future__ import annotations

import numpy as np

from fedcore import ConfigError, numpy_generator
from fedcore.data import Dataset, IntArray, draw_by_class


def divided(
    dataset: Dataset,
    rows: IntArray,
    *,
    samples: int | None,
    imbalance: float,
    unseen_domain: str | None,
    public: str | None,
    seed: int,
) -> IntArray:
    """Return the positions, of these, of the training samples to divide; see :meth:`fedcore.Section.divided`.

    :param public: of ``--public``, for a message.
    """
    if unseen_domain is not None:
        rows = _of_seen_domains(unseen_domain, dataset, rows, public)
    if imbalance > 1 and not dataset.task.classes:
        raise ConfigError(f"--imbalance is about classes, which task {dataset.task.name!r} does not have")
    labels = dataset.strata[0].numpy()
    rows = rows[_long_tailed(labels[rows], dataset.num_classes, imbalance, seed)]
    return rows[_drawn(labels[rows], samples, seed)]


def _of_seen_domains(name: str, dataset: Dataset, rows: IntArray, public: str | None) -> IntArray:
    """Return the positions of samples of the other domains.

    :raises ConfigError: or a subclass. There is no such domain, or nothing to evaluate it or the others on.
    """
    option, domains = f"--unseen-domain {name}", dataset.domains
    if domains is None:
        raise ConfigError(f"{option}: data set {dataset.name!r} has no domains; leave the option out")
    number = domains.number(name)
    hidden = domains.test == number
    if not hidden.any():
        raise ConfigError(f"{option}: no test sample is of this domain; add some")
    if hidden.all():
        raise ConfigError(
            f"{option}: all test samples are of this domain; add test samples of another one. Or leave the option "
            "out, and the domain's training samples, too: `global` then measures the unseen domain"
        )
    unseen = (domains.train == number).nonzero().flatten().numpy()
    if np.isin(unseen, rows, invert=True).any():
        raise ConfigError(
            f"--public {public}: a share of the training set has samples of the unseen domain "
            f"{name!r}; name another data set, or leave one of the two out"
        )
    return np.setdiff1d(rows, unseen)


def _long_tailed(labels: IntArray, num_classes: int, imbalance: float, seed: int) -> IntArray:
    """Return the positions of a long-tailed training set, ascending (Cui et al., CVPR 2019, section 5.1).

    Class c of C keeps n * imbalance^(-c / (C - 1)) samples, drawn from the seed, n the size of the largest class. A
    class that has fewer keeps all of them.
    """
    if imbalance == 1:
        return np.arange(len(labels))
    rng, kept = numpy_generator(seed, "imbalance"), []
    most = np.bincount(labels).max()
    for c in range(num_classes):
        size = max(1, int(most * imbalance ** (-c / max(1, num_classes - 1))))
        kept.append(rng.permutation(np.flatnonzero(labels == c))[:size])
    return np.sort(np.concatenate(kept))


def _drawn(labels: IntArray, samples: int | None, seed: int) -> IntArray:
    """Return the positions to assign, ascending: all, or as many as ``samples``, drawn class by class."""
    if samples is None or samples == len(labels):
        return np.arange(len(labels))
    if samples > len(labels):
        raise ConfigError(f"--samples is {samples}, but there are {len(labels)} training samples to assign")
    share = samples / len(labels)
    drawn = np.flatnonzero(draw_by_class(labels, share, numpy_generator(seed, "samples")))
    if len(drawn) < samples:  # small classes gave less than their share, as the last sample of a class is never drawn
        rng = numpy_generator(seed, "samples")
        others = np.flatnonzero(~draw_by_class(labels, 1 - share, rng))
        drawn = np.sort(rng.permutation(others)[:samples])
    return drawn
