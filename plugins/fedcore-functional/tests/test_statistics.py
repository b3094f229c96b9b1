"""Class Gaussians of a federation: pooled statistics against NumPy on all features, and what is drawn from them."""

from __future__ import annotations

import doctest
from functools import reduce
from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedcore import Answer, RoundFailedError
from fedcore_functional import class_statistics, statistics
from fedcore_functional.statistics import (
    feature_statistics,
    pack_statistics,
    pool_answers,
    pool_statistics,
    pool_two,
    sample_features,
    unpack_statistics,
)
from tests.sentences import raises

C, D = 5, 4
# Class 4 is nobody's, class 3 one sample of one client; clients miss classes and hold single samples.
LABELS = [[0, 0, 0, 1, 1, 2], [1, 0, 0, 0, 0, 2, 2, 2], [2], [0, 3, 1, 1, 1, 0]]


def features_of(seed: int, labels: list[int], offset: float) -> torch.Tensor:
    z = torch.randn(len(labels), D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return z * torch.tensor([1.0, 3.0, 0.1, 2.0]) + offset + torch.tensor(labels).unsqueeze(1)


def clients(offset: float = 0.0):
    return [(features_of(k, labels, offset), torch.tensor(labels)) for k, labels in enumerate(LABELS)]


def stacked(found):
    return [torch.stack(parts) for parts in zip(*found, strict=True)]


def statistics_of(offset: float = 0.0):
    return [class_statistics(z, y, C) for z, y in clients(offset)]


def numpy_statistics(offset: float = 0.0):
    """Counts, means and covariances of all clients' features, concatenated."""
    z = np.concatenate([z.numpy() for z, _ in clients(offset)])
    y = np.concatenate([y.numpy() for _, y in clients(offset)])
    counts, means, covariances = np.zeros(C, int), np.zeros((C, D)), np.zeros((C, D, D))
    for c in range(C):
        counts[c] = (y == c).sum()
        means[c] = z[y == c].mean(axis=0) if counts[c] else 0
        covariances[c] = np.cov(z[y == c].T) if counts[c] > 1 else 0
    return counts, means, covariances


def test_doctests():
    result = doctest.testmod(statistics)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_pooled_statistics_are_those_of_the_concatenated_features(offset):
    """Far from the origin, Eq. 7 as printed would lose 8 digits in the difference of two large products."""
    counts, means, covariances = pool_statistics(*stacked(statistics_of(offset)))
    expected = numpy_statistics(offset)
    assert counts.tolist() == expected[0].tolist() == [9, 6, 5, 1, 0]
    np.testing.assert_allclose(means.numpy(), expected[1], rtol=1e-8)
    np.testing.assert_allclose(covariances.numpy(), expected[2], rtol=1e-8, atol=1e-8)


def test_it_is_eq_7_as_printed():
    n, mu, sigma = (part.double().numpy() for part in stacked(statistics_of()))
    _, means, covariances = pool_statistics(*stacked(statistics_of()))
    for c in range(3):
        n_c = n[:, c].sum()
        mu_c = sum(n[k, c] / n_c * mu[k, c] for k in range(4))  # Eq. 6
        sigma_c = sum(
            (n[k, c] - 1) / (n_c - 1) * sigma[k, c] * (n[k, c] > 1) + n[k, c] / (n_c - 1) * np.outer(mu[k, c], mu[k, c])
            for k in range(4)
        ) - n_c / (n_c - 1) * np.outer(mu_c, mu_c)
        np.testing.assert_allclose(means[c].numpy(), mu_c, rtol=1e-12)
        np.testing.assert_allclose(covariances[c].numpy(), sigma_c, rtol=1e-10, atol=1e-12)


def test_two_at_a_time_in_any_order_is_all_at_once():
    at_once = pool_statistics(*stacked(statistics_of()))
    for order in permutations(statistics_of()):
        for one, other in zip(at_once, reduce(pool_two, order), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_one_client_pools_to_itself_bit_by_bit():
    for own in statistics_of():
        for one, other in zip(own, pool_statistics(*stacked([own])), strict=True):
            assert torch.equal(one, other)


def test_rows_of_count_0_and_covariances_of_one_sample_say_nothing():
    counts, means, covariances = (part.clone() for part in stacked(statistics_of()))
    means[counts == 0] = torch.nan
    covariances[counts <= 1] = torch.nan  # 0 / 0, as a client might compute it
    for one, other in zip(
        pool_statistics(counts, means, covariances), pool_statistics(*stacked(statistics_of())), strict=True
    ):
        assert torch.equal(one, other)


def test_no_or_one_sample_has_no_covariance():
    _, means, covariances = pool_statistics(*stacked(statistics_of()))
    assert covariances[3:].abs().max() == 0
    assert torch.equal(means[3], clients()[3][0][1])
    assert means[4].abs().max() == 0


def test_covariances_are_symmetric_without_negative_variance():
    covariances = pool_statistics(*stacked(statistics_of(1e4)))[2]
    torch.testing.assert_close(covariances, covariances.mT, rtol=1e-12, atol=0)
    assert (covariances.diagonal(dim1=1, dim2=2) >= 0).all()


def test_dtypes_are_kept():
    counts, means, covariances = stacked(statistics_of())
    pooled = pool_statistics(counts, means.float(), covariances.float())
    assert [part.dtype for part in pooled] == [torch.int64, torch.float32, torch.float32]
    features, labels = sample_features(*pooled[1:], 3, generator=torch.Generator().manual_seed(0))
    assert (features.dtype, labels.dtype) == (torch.float32, torch.int64)


# --- sampling -----------------------------------------------------------------------------------------------


def drawn(per_class=50, seed=1, known=None):
    _, means, covariances = pool_statistics(*stacked(statistics_of()))
    return sample_features(means, covariances, per_class, generator=torch.Generator().manual_seed(seed), known=known)


def test_as_many_of_each_known_class():
    assert torch.bincount(drawn()[1]).tolist() == [50] * 5
    features, labels = drawn(known=torch.tensor([True, False, True, True, False]))
    assert torch.bincount(labels, minlength=5).tolist() == [50, 0, 50, 50, 0]
    assert features.shape == (150, D)


def test_a_generator_fixes_the_features():
    assert torch.equal(drawn()[0], drawn()[0])
    assert not torch.equal(drawn()[0], drawn(seed=2)[0])


def test_a_class_is_drawn_alike_whichever_others_are_known():
    all_features, all_labels = drawn()
    features, labels = drawn(known=torch.tensor([False, False, True, True, False]))
    assert torch.equal(features[labels == 2], all_features[all_labels == 2])


def test_features_follow_mean_and_covariance():
    _, means, covariances = pool_statistics(*stacked(statistics_of()))
    features, labels = drawn(per_class=200_000)
    for c in range(3):
        own = features[labels == c].numpy()
        scale = covariances[c].diagonal().sqrt().numpy()
        assert (np.abs(own.mean(axis=0) - means[c].numpy()) < 0.01 * scale).all()
        assert (np.abs(np.cov(own.T) - covariances[c].numpy()) < 0.01 * np.outer(scale, scale)).all()


def test_a_single_sample_gives_copies_of_itself():
    features, labels = drawn()
    assert torch.equal(features[labels == 3], clients()[3][0][1].expand(50, D))


def test_a_covariance_without_full_rank_keeps_features_in_its_span():
    draw = torch.Generator().manual_seed(4)
    basis = torch.linalg.qr(torch.randn(40, 6, generator=draw, dtype=torch.float64))[0]  # (40, 6)
    few = torch.randn(7, 6, generator=draw, dtype=torch.float64) @ basis.T  # 7 samples in 6 of 40 dimensions
    _, means, covariances = class_statistics(few, torch.zeros(7, dtype=torch.int64), 1)
    assert torch.linalg.eigvalsh(covariances[0])[0] < 0  # rounding: a plain square root would be nan
    features, _ = sample_features(means, covariances, 400, generator=draw)
    assert torch.isfinite(features).all()
    away = (features - means) - (features - means) @ basis @ basis.T
    assert away.norm(dim=1).max() < 1e-6
    assert torch.linalg.matrix_rank(features - means, rtol=1e-6) == 6


def test_features_are_drawn_where_torchs_decomposition_does_not_converge(monkeypatch):
    def fails(_):
        raise torch.linalg.LinAlgError

    expected, _ = drawn()
    monkeypatch.setattr(torch.linalg, "eigh", fails)
    torch.testing.assert_close(drawn()[0], expected)


def test_the_root_is_the_symmetric_one():
    _, means, covariances = pool_statistics(*stacked(statistics_of()))
    features, labels = drawn(per_class=9)
    noise = torch.randn(9, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)  # class 0 is first
    values, vectors = np.linalg.eigh(covariances[0].numpy())
    root = vectors @ np.diag(np.sqrt(values)) @ vectors.T
    expected = means[0].numpy() + noise.numpy() @ root
    np.testing.assert_allclose(features[labels == 0].numpy(), expected, rtol=1e-10)


def test_rows_of_classes_that_are_not_known_may_hold_anything():
    _, means, covariances = (part.clone() for part in pool_statistics(*stacked(statistics_of())))
    means[4], covariances[4] = torch.nan, torch.nan
    known = torch.tensor([True] * 4 + [False])
    features, _ = sample_features(means, covariances, 5, generator=torch.Generator().manual_seed(1), known=known)
    assert torch.isfinite(features).all()


# --- what travels -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("client", range(4))
def test_what_is_sent_is_what_is_read(client):
    own = statistics_of()[client]
    sent = pack_statistics(*own)
    for one, other in zip(own, unpack_statistics(sent, C), strict=True):
        assert torch.equal(one, other)
    held = len(set(LABELS[client]))
    assert sum(t.numel() for t in sent.values()) == held * (2 + D + D * (D + 1) // 2)


# --- clients' answers, pooled -------------------------------------------------------------------------------


def server_of(classes):
    notes = []
    return SimpleNamespace(num_classes=classes, notes=notes, note=notes.append)


def answers():
    return [Answer(k, feature_statistics(z, y, C)) for k, (z, y) in enumerate(clients())]


def test_pooled_answers_are_the_pooled_statistics_and_name_absent_classes():
    server = server_of(C)
    pooled = pool_answers(server, iter(answers()), asker="ccvr")
    assert server.notes == ["no client that answered holds class 4; the classifier is corrected without it"]
    for one, other in zip(pooled, reduce(pool_two, statistics_of()), strict=True):
        assert torch.equal(one, other)


def test_no_note_where_every_class_is_held():
    server = server_of(C)
    sent = [Answer(0, feature_statistics(torch.zeros(C, D), torch.arange(C), C))]
    counts, _, _ = pool_answers(server, sent, asker="ccvr")
    assert counts.tolist() == [1] * C
    assert not server.notes


def test_without_any_answer_it_says_who_asked():
    with raises(RoundFailedError, "'ccvr'"):
        pool_answers(server_of(C), [], asker="ccvr")


def test_baselines_hand_case():
    """Client 1 holds {0, 2}, client 2 {4}: mean 2, variance 4, that of {0, 2, 4}."""
    held = [torch.tensor([[0.0], [2.0]]), torch.tensor([[4.0]])]
    sent = [Answer(k, feature_statistics(z, torch.zeros(len(z), dtype=torch.int64), 1)) for k, z in enumerate(held)]
    counts, means, covariances = pool_answers(server_of(1), sent, asker="ccvr")
    assert (counts.tolist(), means.tolist()) == ([3], [[2.0]])
    assert covariances.item() == pytest.approx(4.0, rel=1e-12)  # 4 or the number below it, by the processor
