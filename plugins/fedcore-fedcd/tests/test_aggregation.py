"""FedCD's server side on its own: Eq. 1 and Eqs. 12 to 15 on updates made by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedcore import ClientUpdate
from fedcore_fedcd import FedCD, FedCDOptions, FedCDVariants, FedCDVariantsOptions
from fedcore_fedcd.equations import FineClassifier
from fedcore_fedcd.variants import MeanClassifier, ProbabilityClassifier, matched_order

C, M, D = 3, 2, 5
WEIGHT, BIAS = "classifier.fine.weight", "classifier.fine.bias"


def update(client, counts, *, samples=None, seed=None):
    g = torch.Generator().manual_seed(client if seed is None else seed)
    counts = torch.tensor(counts)
    model = {WEIGHT: torch.randn(C * M, D, generator=g), BIAS: torch.randn(C * M, generator=g)}
    prototypes = torch.randn(C, M, D, generator=g)
    return ClientUpdate(
        client=client,
        model=model,
        samples=samples or max(1, int(counts.sum())),
        steps=1,
        lr=0.1,
        momentum=0.0,
        payload={"prototypes": prototypes, "counts": counts},
    )


class State(dict):
    """A server's state with its running sums."""

    def add(self, name, tensor):
        self[name] = self[name] + tensor if name in self else tensor


def made(**options):
    """Return FedCD, or its variants where an option is theirs."""
    if options.keys() <= FedCDOptions.model_fields.keys():
        return FedCD(FedCDOptions(**options))
    return FedCDVariants(FedCDVariantsOptions(**options))


def commit(updates, state=None, **options):
    """Take one round's updates; returns the partial state and the server's state."""
    classes, per_class, width = updates[0].payload["prototypes"].shape
    sizes = torch.full((1 + max(one.client for one in updates),), 1000)
    server = SimpleNamespace(state=State(state or {}), num_classes=classes, feature_dim=width, client_sizes=sizes)
    plugin = made(fine_classes=per_class, **options)
    for one in updates:
        plugin.accumulate(server, [one])
    owned = plugin.aggregate(server, updates) if plugin.owns else None  # as the core calls it
    plugin.end_round(server)
    return owned, server.state


def first():
    return [update(0, [[4, 1], [0, 3], [0, 0]]), update(1, [[9, 0], [0, 2], [0, 0]])]


def payloads(updates):
    found = [(u.payload["counts"].numpy(), u.payload["prototypes"].double().numpy()) for u in updates]
    return np.stack([n for n, _ in found]), np.stack([p for _, p in found])


def fedavg(updates, name):
    n = np.array([u.samples for u in updates], dtype=np.float64)
    stacked = np.stack([u.model[name].double().numpy() for u in updates])
    return np.tensordot(n / n.sum(), stacked, axes=1)


def test_equation_1_is_the_count_weighted_mean_of_each_fine_class():
    updates = first()
    counts, prototypes = payloads(updates)
    _, state = commit(updates)
    assert state["counts"].tolist() == [[13, 1], [0, 5], [0, 0]]
    for c in range(C):
        for m in range(M):
            n = counts[:, c, m]
            if n.sum():
                expected = (n[:, None] * prototypes[:, c, m]).sum(axis=0) / n.sum()
                np.testing.assert_allclose(state["prototypes"][c, m], expected, rtol=1e-6)
    # One holder only: its prototype to the bit.
    assert torch.equal(state["prototypes"][0, 1], torch.tensor(prototypes[0, 0, 1]).float())
    assert set(state) == {"prototypes", "counts"}, "the sums of a round do not outlive it"


def test_what_nobody_in_the_cohort_holds_keeps_its_previous_prototype_and_count():
    _, state = commit(first())
    before = {name: tensor.clone() for name, tensor in state.items()}
    _, state = commit([update(2, [[0, 0], [2, 0], [0, 7]])], state)
    assert state["counts"].tolist() == [[13, 1], [2, 5], [0, 7]]
    assert torch.equal(state["prototypes"][0], before["prototypes"][0])
    assert torch.equal(state["prototypes"][1, 1], before["prototypes"][1, 1])
    new = update(2, [[0, 0], [2, 0], [0, 7]]).payload["prototypes"]
    assert torch.equal(state["prototypes"][1, 0], new[1, 0])
    assert torch.equal(state["prototypes"][2, 1], new[2, 1])


def test_prototypes_are_popped_from_the_updates_so_that_only_sums_stay_in_memory():
    updates = first()
    commit(updates)
    assert all(set(u.payload) == {"counts"} for u in updates)


def reference(updates, prototypes, known):
    """Eqs. 13 to 15 in NumPy; a column without known prototype is FedAvg's."""
    softmax = lambda x: np.exp(x - x.max()) / np.exp(x - x.max()).sum()  # noqa: E731
    w = np.stack([u.model[WEIGHT].double().numpy() for u in updates])
    b = np.stack([u.model[BIAS].double().numpy() for u in updates])
    weight, bias = fedavg(updates, WEIGHT), fedavg(updates, BIAS)
    for j in np.flatnonzero(known):
        quality = [softmax(w[k] @ prototypes[j] + b[k])[j] for k in range(len(updates))]
        v = softmax(np.array(quality))
        weight[j], bias[j] = v @ w[:, j], v @ b[:, j]
    return weight, bias


def test_class_vectors_are_weighed_by_the_new_prototypes():
    updates = first()
    part, state = commit(updates)
    prototypes, known = state["prototypes"].double().flatten(0, 1).numpy(), state["counts"].flatten().numpy() > 0
    assert known.tolist() == [True, True, False, True, False, False]
    weight, bias = reference(updates, prototypes, known)
    np.testing.assert_allclose(part[WEIGHT], weight, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(part[BIAS], bias, rtol=1e-5, atol=1e-7)
    assert part[WEIGHT].dtype == part[BIAS].dtype == torch.float32


def test_a_column_without_a_known_prototype_is_fedavgs_and_the_others_are_not():
    updates = first()
    part, _ = commit(updates)
    for j in range(C * M):
        same = np.allclose(part[WEIGHT][j], fedavg(updates, WEIGHT)[j], rtol=1e-6, atol=1e-8)
        assert same == (j in (2, 4, 5)), j


@pytest.mark.parametrize("aggregation", ["adaptive", "count"])
def test_equal_classifiers_give_exactly_themselves_as_fedavg_does(aggregation):
    updates = [update(client, [[n, 1], [0, n], [0, 0]], seed=9) for client, n in enumerate((1, 2, 7))]
    part, _ = commit(updates, aggregation=aggregation)
    for name in (WEIGHT, BIAS):
        assert torch.equal(part[name], updates[0].model[name])


def test_aggregation_by_counts_takes_each_fine_class_from_its_holders():
    updates = first()
    part, _ = commit(updates, aggregation="count")
    zero, one = (u.model[WEIGHT].double().numpy() for u in updates)
    np.testing.assert_allclose(part[WEIGHT][0], (4 * zero[0] + 9 * one[0]) / 13, rtol=1e-6, atol=1e-7)
    assert torch.equal(part[WEIGHT][1], updates[0].model[WEIGHT][1])  # held by client 0 only
    np.testing.assert_allclose(part[WEIGHT][3], (3 * zero[3] + 2 * one[3]) / 5, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(part[WEIGHT][4], fedavg(updates, WEIGHT)[4], rtol=1e-6, atol=1e-7)


def test_without_adaptive_aggregation_nothing_is_owned_but_prototypes_are_still_averaged():
    options = {"aggregation": "fedavg"}
    assert made(**options).owns == ()
    part, state = commit(first(), **options)
    assert part is None
    assert state["counts"].sum() == 19
    assert made().owns == made(aggregation="count").owns == ("classifier.*",)


def test_one_client_gives_its_own_classifier():
    only = update(3, [[1, 0], [0, 0], [0, 0]])
    part, _ = commit([only])
    assert torch.equal(part[WEIGHT], only.model[WEIGHT])
    assert torch.equal(part[BIAS], only.model[BIAS])


def test_the_order_of_updates_changes_rounding_only():
    updates = [update(k, np.random.default_rng(k).integers(0, 9, (C, M)).tolist()) for k in range(4)]
    again = [update(k, np.random.default_rng(k).integers(0, 9, (C, M)).tolist()) for k in (2, 0, 3, 1)]
    (one, state_one), (two, state_two) = commit(updates), commit(again)
    torch.testing.assert_close(one, two)
    torch.testing.assert_close(state_one["prototypes"], state_two["prototypes"])


def centres(client, places, counts, classes=1):
    """Return a client's update with centres at these places of a line, in one class or in all of them."""
    one = update(client, [counts] * classes)
    one.payload["prototypes"] = torch.tensor([[[place] for place in places]] * classes)
    return one


def test_matched_first_centres_are_averaged_with_their_nearest():
    """By hand: client 1 holds client 0's centres in another order, client 2 one centre, near client 0's last."""

    def given():
        return [
            centres(0, [0.0, 10.0, 20.0], [1, 1, 2]),
            centres(1, [21.0, 2.0, 9.0], [2, 3, 1]),
            centres(2, [23.0, 0.0, 0.0], [4, 0, 0]),
        ]

    updates = given()
    _, state = commit(updates, match="hungarian", aggregation="fedavg")
    assert state["counts"].tolist() == [[1 + 3, 1 + 1, 2 + 2 + 4]]
    np.testing.assert_allclose(state["prototypes"][0, :, 0], [6 / 4, 19 / 2, (40 + 42 + 92) / 8])
    assert [u.payload["counts"].tolist() for u in updates] == [[[1, 1, 2]], [[3, 1, 2]], [[0, 0, 4]]]
    _, plain = commit(given(), aggregation="fedavg")
    np.testing.assert_allclose(plain["prototypes"][0, :, 0], [(0 + 42 + 92) / 7, (10 + 6) / 4, (40 + 9) / 3])


def test_prototypes_that_started_from_global_ones_keep_their_order():
    state = {"prototypes": torch.tensor([[[0.0], [10.0]]]), "counts": torch.tensor([[1, 1]])}
    later = [centres(0, [0.0, 10.0], [1, 1]), centres(1, [10.0, 0.0], [1, 1])]
    _, state = commit(later, state, match="hungarian", aggregation="fedavg", bound_moves=False)
    assert state["prototypes"].flatten().tolist() == [5.0, 5.0]


def test_an_assignment_is_the_cheapest_of_all_pairs():
    """A greedy one would pair 0.9 with 1.0, and -4.0 with 5.0 at 81."""
    both = torch.ones(2, dtype=torch.bool)
    order = matched_order(torch.tensor([[0.9], [-4.0]]), both, torch.tensor([[1.0], [5.0]]), both)
    assert order.tolist() == [1, 0]


def test_a_lone_centre_joins_a_known_one_and_no_free_place():
    first, second = torch.tensor([True, False]), torch.tensor([False, True])
    order = matched_order(torch.tensor([[0.0], [7.0]]), second, torch.tensor([[1.0], [0.0]]), first)
    assert order.tolist() == [1, 0]


@pytest.mark.parametrize("kind", [FineClassifier, MeanClassifier])
def test_w_reduces_the_m_consecutive_outputs_of_each_class(kind):
    torch.manual_seed(0)
    classifier = kind(D, C, M)
    z = torch.randn(4, D)
    w = np.kron(np.eye(C), np.ones((M, 1))) / (M if kind is MeanClassifier else 1)  # (CM, C)
    expected = classifier.fine(z).detach().numpy() @ w
    np.testing.assert_allclose(classifier(z).detach(), expected, rtol=1e-5, atol=1e-6)
    assert [name for name, _ in classifier.named_parameters()] == ["fine.weight", "fine.bias"], "W is not trained"


def test_w_on_probabilities_adds_those_of_a_classes_fine_classes():
    torch.manual_seed(0)
    classifier, z = ProbabilityClassifier(D, C, M).double(), torch.randn(4, D, dtype=torch.float64)
    fine = np.exp(classifier.fine(z).detach().numpy())
    expected = fine / fine.sum(axis=1, keepdims=True) @ np.kron(np.eye(C), np.ones((M, 1)))
    np.testing.assert_allclose(classifier(z).softmax(dim=1).detach(), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("kind", "alike"), [(FineClassifier, True), (MeanClassifier, True), (ProbabilityClassifier, False)]
)
def test_the_outputs_of_a_class_get_different_gradients_from_w_on_probabilities_alone(kind, alike):
    """Logits that are added up leave the M outputs of a class one gradient, and no fine classifier to learn."""
    torch.manual_seed(0)
    classifier = kind(D, C, M)
    torch.nn.functional.cross_entropy(classifier(torch.randn(4, D)), torch.tensor([0, 1, 2, 0])).backward()
    own = classifier.fine.weight.grad.view(C, M, D)
    assert torch.equal(own[:, 0], own[:, 1]) == alike
