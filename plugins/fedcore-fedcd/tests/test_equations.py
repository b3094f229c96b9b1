"""FedCD's equations against a NumPy float64 reference written from the paper, and their behaviour at the edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from fedcore_fedcd.equations import (
    Rebalanced,
    assign_fine_classes,
    batch_prototype_loss,
    class_vector_weights,
    cluster_class,
    decoupled_distillation,
    fine_counts,
    hierarchical_contrast,
    hierarchical_weights,
    no_points,
)
from fedcore_fedcd.variants import distillation, fine_means

B, C, M, D, K = 12, 4, 3, 6, 5
DTYPES = [torch.float64, torch.float32]
EXTREME = [1e4, -1e4]


# --- the reference: loops over the paper's sums ------------------------------------------------------------------


def ref_cos(a, b):
    return float(a @ b / (max(np.linalg.norm(a), 1e-8) * max(np.linalg.norm(b), 1e-8)))


def ref_mean(values, importance):
    importance = np.ones(len(values)) if importance is None else np.asarray(importance, dtype=np.float64)
    return float((importance * values).sum() / importance.sum())


def ref_assign(z, y, prototypes, known):
    best = []
    for sample, label in zip(z, y):
        cosines = [ref_cos(sample, p) if k else -math.inf for p, k in zip(prototypes[label], known[label])]
        best.append(int(np.argmax(cosines)))
    return best


def ref_hpc(z, y, fine, prototypes, alpha, tau, importance, known):
    losses = np.zeros(len(z))
    for i, (sample, c, t) in enumerate(zip(z, y, fine)):
        if not known[c, t]:
            continue  # contributes 0, its importance stays in the divisor
        pos = pneg = neg = 0.0
        for j in range(C):
            for m in range(prototypes.shape[1]):
                if not known[j, m]:
                    continue
                psi = math.exp(ref_cos(sample, prototypes[j, m]) / tau)
                if (j, m) == (c, t):
                    pos = psi
                elif j == c:
                    pneg += psi
                else:
                    neg += psi
        losses[i] = -math.log(pos / (pos + alpha * pneg + (1 - alpha) * neg))
    return ref_mean(losses, importance)


def ref_softmax(logits):
    e = np.exp(logits - logits.max())
    return e / e.sum()


def ref_kl(p, q):
    return float(sum(a * math.log(a / b) for a, b in zip(p, q) if a > 0))


def ref_dkd(teacher, student, y, xi, importance):
    losses = []
    for t, s, c in zip(teacher, student, y):
        p, q = ref_softmax(t), ref_softmax(s)
        tckd = ref_kl([p[c], 1 - p[c]], [q[c], 1 - q[c]])
        others = [j for j in range(len(t)) if j != c]
        losses.append(tckd + xi * ref_kl(p[others] / p[others].sum(), q[others] / q[others].sum()))
    return ref_mean(np.array(losses), importance)


def ref_ce(logits, y, importance=None):
    return ref_mean(np.array([-math.log(ref_softmax(row)[c]) for row, c in zip(logits, y)]), importance)


# --- inputs ------------------------------------------------------------------------------------------------------


def case(seed=0, dtype=torch.float64, classes=range(C)):
    """Features, labels (of the given classes only), fine classes, prototypes."""
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(B, D, generator=g, dtype=torch.float64).to(dtype)
    labels = torch.tensor(list(classes))[torch.randint(len(list(classes)), (B,), generator=g)]
    fine = torch.randint(M, (B,), generator=g)
    prototypes = torch.randn(C, M, D, generator=g, dtype=torch.float64).to(dtype)
    return z, labels, fine, prototypes


def logits_case(seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    draw = [2 * torch.randn(B, C, generator=g, dtype=torch.float64).to(dtype) for _ in range(2)]
    return (*draw, torch.randint(C, (B,), generator=g))


def np64(*tensors):
    return [t.double().numpy() if t.is_floating_point() else t.numpy() for t in tensors]


MASKS = {
    "all": torch.ones(C, M, dtype=torch.bool),
    "some": torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 0], [0, 1, 0]], dtype=torch.bool),
    "one": torch.tensor([[0, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0]], dtype=torch.bool),
    "none": torch.zeros(C, M, dtype=torch.bool),
}
IMPORTANCES = {
    "uniform": None,
    "counts": torch.arange(1, B + 1),
    "zeros": torch.tensor([0, 3, 0, 1, 0, 0, 7, 2, 0, 5, 0, 1]),
}


def check(value, expected, dtype):
    assert value.shape == ()
    assert value.dtype == dtype
    assert float(value) == pytest.approx(expected, rel=1e-12 if dtype == torch.float64 else 2e-5, abs=1e-12)


# --- the means over D^k+, as L_hpc, L_gid and L_dcl take them ------------------------------------------------------


def mean(losses, importance=None):
    importance = torch.ones(len(losses)) if importance is None else importance
    return Rebalanced(no_points(D, losses.device), torch.empty(0), importance).mean(losses)


def hpc_loss(z, labels, fine, prototypes, *, alpha=0.1, temperature=1.0, importance=None, known=None):
    known = MASKS["all"][:, : prototypes.shape[1]][: len(prototypes)] if known is None else known
    weights = hierarchical_weights(known, alpha)
    return mean(hierarchical_contrast(z, labels, fine, prototypes, known, weights, temperature), importance)


def gid_loss(teacher, student, labels, *, xi, importance=None):
    return mean(decoupled_distillation(teacher, student, labels, xi=xi), importance)


def kl_loss(teacher, student, *, importance=None):
    return mean(distillation(teacher, student), importance)


def dcl_loss(logits, labels, *, importance=None):
    return mean(nn.functional.cross_entropy(logits, labels, reduction="none"), importance)


# --- Eq. 2 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
def test_assignment_is_the_known_prototype_of_the_own_class_with_the_largest_cosine(mask, dtype):
    z, labels, _, prototypes = case(1, dtype)
    found = assign_fine_classes(z, labels, prototypes, MASKS[mask])
    assert found.dtype == torch.int64
    assert found.tolist() == ref_assign(*np64(z, labels, prototypes, MASKS[mask]))


def test_assignment_goes_by_cosine_not_by_length_and_a_masked_prototype_never_wins():
    z, label = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    prototypes = torch.tensor([[[9.0, 9.0], [0.1, 0.0], [1.0, 0.0]]])
    assert assign_fine_classes(z, label, prototypes, torch.tensor([[True, True, False]])).tolist() == [1]
    prototypes[0, 1] = torch.nan  # what stands in a masked row does not matter
    assert assign_fine_classes(z, label, prototypes, torch.tensor([[True, False, True]])).tolist() == [2]


def test_assignment_has_no_gradient():
    z, labels, _, prototypes = case()
    assert not assign_fine_classes(z.requires_grad_(), labels, prototypes, MASKS["all"]).requires_grad


# --- Eqs. 3 to 5 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("importance", IMPORTANCES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("alpha", "tau"), [(0.1, 1.0), (0.0, 0.5), (1.0, 1.0), (0.3, 0.07)])
def test_hpc_is_equations_3_to_5(alpha, tau, mask, importance, dtype):
    z, labels, fine, prototypes = case(2, dtype)
    weights = IMPORTANCES[importance]
    value = hpc_loss(z, labels, fine, prototypes, alpha=alpha, temperature=tau, importance=weights, known=MASKS[mask])
    expected = ref_hpc(*np64(z, labels, fine, prototypes), alpha, tau, weights, MASKS[mask].numpy())
    check(value, expected, dtype)


def test_hpc_without_a_mask_or_options_is_the_papers_setting():
    z, labels, fine, prototypes = case(3)
    expected = ref_hpc(*np64(z, labels, fine, prototypes), 0.1, 1.0, None, MASKS["all"].numpy())
    check(hpc_loss(z, labels, fine, prototypes), expected, torch.float64)


def test_hpc_with_one_prototype_per_class_alone_in_its_mask_is_zero():
    z, _, _, prototypes = case(4)
    labels, fine = torch.full((B,), 1), torch.full((B,), 1)
    assert float(hpc_loss(z, labels, fine, prototypes, known=MASKS["one"])) == pytest.approx(0)


def test_hpc_keeps_the_importance_of_a_sample_without_prototype_in_the_divisor():
    z, labels, fine, prototypes = case(5)
    known = MASKS["all"].clone()
    known[labels[0], fine[0]] = False
    both = hpc_loss(z[:1], labels[:1], fine[:1], prototypes, known=known)
    assert float(both) == 0.0
    pair = hpc_loss(
        z[[0, 1]], torch.stack([labels[0], labels[1]]), torch.stack([fine[0], fine[1]]), prototypes, known=known
    )
    alone = hpc_loss(z[1:2], labels[1:2], fine[1:2], prototypes, known=known)
    active = bool(known[labels[1], fine[1]])
    assert float(pair) == pytest.approx(float(alone) / 2 if active else 0.0)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("alpha", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("filler", [0.0, math.nan, math.inf])
def test_hpc_gradients_are_finite_whatever_stands_in_masked_rows(filler, alpha, mask):
    z, labels, fine, prototypes = case(6)
    known = MASKS[mask]
    prototypes[~known] = filler
    z.requires_grad_()
    prototypes.requires_grad_()
    value = hpc_loss(z, labels, fine, prototypes, alpha=alpha, known=known)
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(z.grad).all()
    assert torch.isfinite(prototypes.grad).all()
    assert (prototypes.grad[~known] == 0).all()


def test_hpc_at_extreme_values_is_finite_with_finite_gradients():
    for scale in (1e-30, 1e4, 1e18):
        z, labels, fine, prototypes = case(7, torch.float32)
        z, prototypes = (z * scale).requires_grad_(), (prototypes * scale).requires_grad_()
        value = hpc_loss(z, labels, fine, prototypes, temperature=1e-3)
        value.backward()
        assert torch.isfinite(value)
        assert torch.isfinite(z.grad).all()
        assert torch.isfinite(prototypes.grad).all()


def test_hpc_passes_gradcheck():
    z, labels, fine, prototypes = case(8)
    known = MASKS["some"]

    def loss(z, prototypes):
        return hpc_loss(z, labels, fine, prototypes, known=known, importance=IMPORTANCES["zeros"])

    assert torch.autograd.gradcheck(loss, (z.requires_grad_(), prototypes.requires_grad_()), fast_mode=True)


@pytest.mark.parametrize("moved", ["features", "prototypes", "both"])
def test_a_step_against_hpcs_gradient_raises_the_cosine_to_the_own_prototype(moved):
    _, labels, fine, _ = case(9)
    g = torch.Generator().manual_seed(9)
    prototypes = torch.linalg.qr(torch.randn(40, C * M, generator=g, dtype=torch.float64))[0].T.reshape(C, M, 40)
    z = torch.randn(B, 40, generator=g, dtype=torch.float64)
    z.requires_grad_(moved != "prototypes")
    prototypes.requires_grad_(moved != "features")

    def own():
        return torch.cosine_similarity(z, prototypes[labels, fine]).detach()

    before = own()
    value = hpc_loss(z, labels, fine, prototypes)
    value.backward()
    with torch.no_grad():
        for tensor in (z, prototypes):
            if tensor.requires_grad:
                tensor -= 0.5 * tensor.grad
    assert (own() > before).all()
    assert hpc_loss(z, labels, fine, prototypes) < value


def test_hpc_pushes_other_classes_away_harder_than_the_own_class_when_alpha_is_small():
    z = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    prototypes = torch.tensor([[[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]], [[1.0, 0.0, 1.0], [1.0, 0.0, -1.0]]]).double()
    prototypes.requires_grad_()
    label = fine = torch.tensor([0])
    hpc_loss(z, label, fine, prototypes, alpha=0.1).backward()
    same, other = prototypes.grad[0, 1].norm(), prototypes.grad[1, 0].norm()  # equal cosines, other classes
    assert float(other / same) == pytest.approx(9.0)  # (1 - alpha) / alpha


# --- Eqs. 6, 7 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [range(C), [0, 2], [3]])
def test_bpr_is_the_cross_entropy_of_the_means_of_the_classes_in_the_batch(classes, dtype):
    z, labels, _, _ = case(10, dtype, classes)
    torch.manual_seed(0)
    classifier = nn.Linear(D, C, dtype=dtype)
    weight, bias = np64(classifier.weight.detach(), classifier.bias.detach())
    features, own = np64(z, labels)
    present = sorted(set(own.tolist()))
    means = np.stack([features[own == c].mean(axis=0) for c in present])
    check(batch_prototype_loss(z, labels, classifier, C).detach(), ref_ce(means @ weight.T + bias, present), dtype)


def test_bpr_with_one_sample_per_class_is_the_cross_entropy_of_the_samples():
    z, labels = case(11)[0][:C], torch.tensor([2, 0, 3, 1])
    torch.manual_seed(0)
    classifier = nn.Linear(D, C, dtype=torch.float64)
    expected = nn.functional.cross_entropy(classifier(z), labels)
    torch.testing.assert_close(batch_prototype_loss(z, labels, classifier, C), expected)


def test_bprs_gradient_reaches_the_features_and_not_the_frozen_classifier():
    z, labels, _, _ = case(12, classes=[0, 1])
    torch.manual_seed(0)
    classifier = nn.Linear(D, C, dtype=torch.float64).requires_grad_(False)
    batch_prototype_loss(z.requires_grad_(), labels, classifier, C).backward()
    assert (z.grad != 0).any(dim=1).all()
    assert classifier.weight.grad is None
    assert classifier.bias.grad is None


@pytest.mark.parametrize("scale", EXTREME)
def test_bpr_at_extreme_logits_is_finite(scale):
    z, labels, _, _ = case(13, torch.float32)
    torch.manual_seed(0)
    classifier = nn.Linear(D, C).requires_grad_(False)
    value = batch_prototype_loss(z.mul_(scale).requires_grad_(), labels, classifier, C)
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(z.grad).all()


# --- Eqs. 8, 9 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("importance", IMPORTANCES)
@pytest.mark.parametrize("xi", [0.0, 0.5, 8.0])
def test_gid_is_equations_8_and_9(xi, importance, dtype):
    teacher, student, labels = logits_case(1, dtype)
    weights = IMPORTANCES[importance]
    value = gid_loss(teacher, student, labels, xi=xi, importance=weights)
    check(value, ref_dkd(*np64(teacher, student, labels), xi, weights), dtype)


def test_gid_with_xi_0_sees_the_target_only():
    teacher, student, labels = logits_case(2)
    others = torch.ones_like(student).scatter(1, labels.unsqueeze(1), 0).bool()
    shuffled = student.clone()
    shuffled[others] = student[others].view(B, C - 1).flip(1).flatten()  # the same rest, dealt differently
    at_0 = [gid_loss(teacher, s, labels, xi=0.0) for s in (student, shuffled)]
    at_1 = [gid_loss(teacher, s, labels, xi=1.0) for s in (student, shuffled)]
    torch.testing.assert_close(at_0[0], at_0[1])
    assert abs(at_1[0] - at_1[1]) > 1e-3


def test_plain_kl_is_tckd_plus_the_teachers_rest_times_nckd():
    teacher, student, labels = logits_case(3)
    rest = 1 - teacher.softmax(1).gather(1, labels.unsqueeze(1)).squeeze(1)
    each = [gid_loss(t[None], s[None], y[None], xi=float(r)) for t, s, y, r in zip(teacher, student, labels, rest)]
    torch.testing.assert_close(kl_loss(teacher, student), torch.stack(each).mean())
    assert float(gid_loss(teacher, teacher, labels, xi=0.5)) == 0.0
    assert float(kl_loss(teacher, teacher)) == 0.0


@pytest.mark.parametrize("importance", IMPORTANCES)
def test_plain_kl_against_the_reference(importance):
    teacher, student, _ = logits_case(4)
    weights = IMPORTANCES[importance]
    rows = zip(*np64(teacher, student))
    expected = ref_mean(np.array([ref_kl(ref_softmax(t), ref_softmax(s)) for t, s in rows]), weights)
    check(kl_loss(teacher, student, importance=weights), expected, torch.float64)


def test_gid_at_extreme_logits_by_hand():
    """The target's share of the student is e^-2e4, the first rest's e^-1e4: no log of 0, no 0 * inf."""
    teacher = torch.tensor([[1e4, 0.0, -1e4]])
    student = torch.tensor([[-1e4, 0.0, 1e4]], requires_grad=True)
    value = gid_loss(teacher, student, torch.tensor([0]), xi=0.5)
    assert value.item() == pytest.approx(2e4 + 0.5 * 1e4)
    value.backward()
    torch.testing.assert_close(student.grad, torch.tensor([[-1.0, -0.5, 1.5]]))


@pytest.mark.parametrize("t", EXTREME)
@pytest.mark.parametrize("s", EXTREME)
@pytest.mark.parametrize("label", [0, 2])
def test_gid_and_kl_are_finite_with_finite_gradients_at_extreme_logits(s, t, label):
    teacher, labels = torch.tensor([[t, 0.0, 1.0]]), torch.tensor([label])
    for loss in (
        lambda x: gid_loss(teacher, x, labels, xi=8.0),
        lambda x: kl_loss(teacher, x),
    ):
        student = torch.tensor([[s, 1.0, 0.0]], requires_grad=True)
        value = loss(student)
        value.backward()
        assert torch.isfinite(value)
        assert value >= 0
        assert torch.isfinite(student.grad).all()


def test_the_teacher_gets_no_gradient():
    teacher, student, labels = logits_case(5)
    for loss in (
        lambda: gid_loss(teacher, student, labels, xi=0.5),
        lambda: kl_loss(teacher, student),
    ):
        teacher.grad = student.grad = None
        teacher.requires_grad_()
        student.requires_grad_()
        loss().backward()
        assert teacher.grad is None
        assert (student.grad != 0).any()


def test_gid_passes_gradcheck_in_the_student():
    teacher, student, labels = logits_case(6)
    student.requires_grad_()
    loss = lambda s: gid_loss(teacher, s, labels, xi=0.5)  # noqa: E731
    assert torch.autograd.gradcheck(loss, (student,), fast_mode=True)


def test_a_step_against_gids_gradient_moves_the_student_towards_the_teacher():
    teacher, student, labels = logits_case(7)
    student.requires_grad_()
    before = gid_loss(teacher, student, labels, xi=0.5)
    before.backward()
    with torch.no_grad():
        nearer = student - student.grad
    assert gid_loss(teacher, nearer, labels, xi=0.5) < before
    assert kl_loss(teacher, nearer) < kl_loss(teacher, student)


def test_gid_of_two_classes_has_no_rest_to_distil():
    teacher, student = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]])
    at = [float(gid_loss(teacher, student, torch.tensor([1]), xi=xi)) for xi in (0.0, 8.0)]
    assert at[0] == pytest.approx(at[1])
    assert at[0] == pytest.approx(float(kl_loss(teacher, student)))


# --- Eq. 10 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("importance", IMPORTANCES)
def test_dcl_is_the_importance_weighted_cross_entropy(importance, dtype):
    logits, _, labels = logits_case(8, dtype)
    weights = IMPORTANCES[importance]
    expected = ref_ce(*np64(logits, labels), weights)
    check(dcl_loss(logits, labels, importance=weights), expected, dtype)


def test_samples_of_importance_0_have_no_gradient():
    logits, teacher, labels = logits_case(9)
    z, _, fine, prototypes = case(9)
    losses = {
        "dcl": lambda x, w: dcl_loss(x, labels, importance=w),
        "gid": lambda x, w: gid_loss(teacher, x, labels, xi=0.5, importance=w),
        "kl": lambda x, w: kl_loss(teacher, x, importance=w),
        "hpc": lambda x, w: hpc_loss(x, labels, fine, prototypes, importance=w),
    }
    for name, loss in losses.items():
        x = (z if name == "hpc" else logits).detach().clone().requires_grad_()
        weights = IMPORTANCES["zeros"]
        loss(x, weights).backward()
        assert ((x.grad != 0).any(dim=1) == (weights > 0)).all(), name


@pytest.mark.parametrize("scale", EXTREME)
def test_dcl_at_extreme_logits_is_finite(scale):
    logits = torch.tensor([[scale, 0.0, -scale]], requires_grad=True)
    value = dcl_loss(logits, torch.tensor([1]))
    value.backward()
    assert value.item() == pytest.approx(1e4)
    assert torch.isfinite(logits.grad).all()


# --- Eqs. 13, 14 -------------------------------------------------------------------------------------------------


def classifiers(seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    shapes = ((K, C * M, D), (K, C * M), (C * M, D))
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", DTYPES)
def test_class_vector_weights_are_equations_13_and_14(dtype):
    weights, biases, prototypes = classifiers(0, dtype)
    found = class_vector_weights(weights, biases, prototypes)
    assert found.shape == (C * M, K)
    assert found.dtype == dtype
    w, b, p = np64(weights, biases, prototypes)
    expected = np.zeros((C * M, K))
    for j in range(C * M):
        quality = np.array([ref_softmax(w[k] @ p[j] + b[k])[j] for k in range(K)])
        expected[j] = ref_softmax(quality)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12 if dtype == torch.float64 else 2e-5)
    np.testing.assert_allclose(found.double().sum(dim=1), 1.0, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("scale", [0.0, *EXTREME])
def test_class_vector_weights_stay_a_distribution_at_extreme_classifiers(scale):
    weights, biases, prototypes = classifiers(1)
    found = class_vector_weights(weights * scale, biases * scale, prototypes)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found.sum(dim=1), torch.ones(C * M, dtype=torch.float64))
    # A quality lies in [0, 1], so no client outweighs another by more than a factor e.
    assert (found.max(dim=1).values / found.min(dim=1).values <= math.e + 1e-9).all()


def test_equal_classifiers_weigh_the_same_and_the_better_one_weighs_more():
    weights, biases, prototypes = classifiers(2)
    same = class_vector_weights(weights[:1].expand(K, -1, -1), biases[:1].expand(K, -1), prototypes)
    torch.testing.assert_close(same, torch.full((C * M, K), 1 / K, dtype=torch.float64))
    biases[:] = weights[:] = 0
    biases[3, 5] = 10.0  # client 3 recognises fine class 5 ...
    found = class_vector_weights(weights, biases, prototypes)
    assert found[5].argmax() == 3
    assert found[0].argmin() == 3  # ... at the price of every other


def test_class_vector_weights_follow_the_clients_order_and_one_client_gets_everything():
    weights, biases, prototypes = classifiers(3)
    order = torch.tensor([3, 0, 4, 1, 2])
    found = class_vector_weights(weights, biases, prototypes)
    torch.testing.assert_close(class_vector_weights(weights[order], biases[order], prototypes), found[:, order])
    alone = class_vector_weights(weights[:1], biases[:1], prototypes)
    torch.testing.assert_close(alone, torch.ones(C * M, 1, dtype=torch.float64), rtol=0, atol=0)


# --- counts, means, k-means --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
def test_fine_counts(mask):
    _, labels, fine, _ = case(14)
    expected = np.zeros((C, M), dtype=np.int64)
    for c, m in zip(labels.tolist(), fine.tolist()):
        expected[c, m] += int(MASKS[mask][c, m])
    assert fine_counts(labels, fine, MASKS[mask]).tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_fine_means_are_feature_means_and_keep_the_prototype_where_there_is_no_sample(dtype):
    z, labels, fine, prototypes = case(15, dtype, classes=[0, 3])
    found = fine_means(z, labels, fine, prototypes)
    assert found.dtype == dtype
    features, own, m_of, expected = (a.copy() for a in np64(z, labels, fine, prototypes))
    for c in range(C):
        for m in range(M):
            held = (own == c) & (m_of == m)
            if held.any():
                expected[c, m] = features[held].mean(axis=0)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize(("samples", "centres"), [(1, 1), (2, 2), (3, 3), (9, 3)])
def test_k_means_gives_no_more_centres_than_distinct_samples(samples, centres, recwarn):
    g = torch.Generator().manual_seed(samples)
    points = torch.randn(samples, D, generator=g)
    found = cluster_class(points.repeat(4, 1), M, seed=0)  # every sample four times
    assert found.shape == (centres, D)
    assert found.dtype == torch.float32
    assert not [w for w in recwarn if "cluster" in str(w.message)]
    if samples <= M:  # then the centres are the samples, in an order that no rounding changes
        torch.testing.assert_close(found, points)


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_the_centres_does_not_depend_on_rounding(seed):
    points = torch.randn(M, D, generator=torch.Generator().manual_seed(0))
    almost = torch.nextafter(points[:1], torch.tensor(9.0))  # a sample twice, with another last bit
    torch.testing.assert_close(cluster_class(torch.cat([points, almost]), M, seed), points)


def test_k_means_depends_on_its_seed_only():
    points = torch.randn(40, D, generator=torch.Generator().manual_seed(0))
    np.random.seed(1)  # the global streams must not matter
    torch.manual_seed(1)
    first = cluster_class(points, M, seed=7)
    np.random.seed(2)
    torch.manual_seed(2)
    torch.testing.assert_close(cluster_class(points, M, seed=7), first, rtol=0, atol=0)


# --- capture -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def frozen_classifier():
    torch.manual_seed(0)
    return nn.Linear(D, C).requires_grad_(False)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["assign", "hpc", "bpr", "gid", "kl", "dcl", "weights"])
def test_every_equation_compiles_into_one_graph(name, frozen_classifier):
    z, labels, fine, prototypes = case(16, torch.float32)
    teacher, student, _ = logits_case(16, torch.float32)
    known, importance = MASKS["some"], IMPORTANCES["zeros"]
    function = {
        "assign": lambda x: assign_fine_classes(x, labels, prototypes, known),
        "hpc": lambda x: hpc_loss(x, labels, fine, prototypes, importance=importance, known=known),
        "bpr": lambda x: batch_prototype_loss(x, labels, frozen_classifier, C),
        "gid": lambda x: gid_loss(teacher, x, labels, xi=0.5, importance=importance),
        "kl": lambda x: kl_loss(teacher, x, importance=importance),
        "dcl": lambda x: dcl_loss(x, labels, importance=importance),
        "weights": lambda x: class_vector_weights(x, torch.zeros(K, C * M), prototypes.flatten(0, 1)),
    }[name]
    x = {"gid": student, "kl": student, "dcl": student, "weights": torch.randn(K, C * M, D)}.get(name, z)
    x = x.clone().requires_grad_()
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    value, expected = compiled(x), function(x)
    torch.testing.assert_close(value, expected)
    if name != "assign":
        torch.testing.assert_close(*[torch.autograd.grad(v.sum(), x)[0] for v in (value, expected)])
