"""FedCD in the real round loop: what travels, who moves, which gradient goes where, what every option changes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedcore import ConfigError, Loss, Plugin, PluginConflictError, UnknownNameError, hookimpl
from fedcore.data import load_dataset
from fedcore_fedcd import FedCD, FedCDOptions, FedCDVariants, FedCDVariantsOptions
from fedcore_fedcd.equations import assign_fine_classes
from fedcore_testing import Cohorts, OwnTaskLoss, StepsOnServer, model_bytes, records
from tests.sentences import raises

WEIGHT, BIAS = "classifier.fine.weight", "classifier.fine.bias"
LOG: list[dict] = []


@pytest.fixture(autouse=True)
def _fresh_log():
    LOG.clear()


# --- plugins and partitions of these tests ---------------------------------------------------------------------


class Watching:
    """Notes what a plugin is given and what it makes of it."""

    @hookimpl
    def local_loss(self, step):
        losses = super().local_loss(step)
        scale = {(x.name, x.weight, x.task_scale) for x in losses}
        LOG.append({"kind": "scales", "round": step.round, "progress": step.progress, "losses": scale})
        return losses

    @hookimpl
    def end_local(self, client):
        in_losses = client.scratch["known"].numpy().copy()
        sent = super().end_local(client)
        features, _, labels = client.forward()
        LOG.append(
            {
                "kind": "up",
                "round": client.round,
                "client": client.id,
                "features": features.double().numpy(),
                "labels": labels.numpy(),
                "class_counts": client.class_counts.tolist(),
                "received": {name: t.numpy().copy() for name, t in client.received.items()},
                "start": client.scratch["start"].numpy().copy(),
                "known": client.scratch["known"].numpy().copy(),
                "in_losses": in_losses,
                "prototypes": sent["prototypes"].detach().numpy().copy(),
                "counts": sent["counts"].numpy().copy(),
            }
        )
        return sent

    @hookimpl
    def aggregate(self, server, updates):
        part = super().aggregate(server, updates)
        models = {u.client: {k: v.double().numpy().copy() for k, v in u.model.items()} for u in updates}
        samples = {u.client: u.samples for u in updates}
        part = {} if part is None else part
        out = {name: t.numpy().copy() for name, t in part.items()}
        LOG.append({"kind": "aggregate", "round": server.round, "models": models, "samples": samples, "out": out})
        return part or None

    @hookimpl
    def report(self, server):
        state = {name: server.state[name].numpy().copy() for name in server.state}
        LOG.append({"kind": "state", "round": server.round, "state": state})


class Probing(Watching):
    """Also notes where every loss's gradient goes."""

    @hookimpl
    def task_loss(self, step):
        value = super().task_loss(step)
        note_gradients(step, "dcl", value)
        return value

    @hookimpl
    def local_loss(self, step):
        losses = super().local_loss(step)
        for loss in losses:
            if loss.value is not None and loss.value.requires_grad:
                note_gradients(step, loss.name, loss.value)
        return losses


class Watched(Watching, FedCD):
    pass


class WatchedVariants(Watching, FedCDVariants):
    pass


class Probed(Probing, FedCD):
    pass


class ProbedVariants(Probing, FedCDVariants):
    pass


def note_gradients(step, name, value):
    """Note which parts of the local problem a loss reaches."""
    model, classifier = step.model, step.model.classifier
    parts = {
        "encoder": next(model.encoder.parameters()),
        "classifier": classifier.fine.weight,
        "prototypes": step.added.get("prototypes", classifier.fine.weight),
        "features": step.features,
        "teacher": step.global_model.classifier.fine.weight,
    }
    wanted = {part: tensor for part, tensor in parts.items() if tensor.requires_grad}
    found = torch.autograd.grad(value, list(wanted.values()), retain_graph=True, allow_unused=True)
    gradients = dict(zip(wanted, found))
    entry = {
        "kind": "gradients",
        "round": step.round,
        "epoch": step.epoch,
        "loss": name,
        "value": float(value.detach()),
        "same_as_global": torch.equal(classifier.fine.weight, step.global_model.classifier.fine.weight),
        "reached": {part for part, g in gradients.items() if g is not None and bool((g != 0).any())},
        "z": gradients["features"],
    }
    if name == "gid":  # z reaches L_gid through the student only: the teacher's logits are constants
        z = step.features.detach().clone().requires_grad_()
        teacher = step.global_model.classifier(step.features.detach()).softmax(dim=1)
        student, own = classifier(z).softmax(dim=1), step.y.unsqueeze(1)
        rest = 1 - F.one_hot(step.y, 10)
        t, s = teacher.gather(1, own), student.gather(1, own)
        hat_t, hat_s = teacher / (1 - t), student / (1 - s)
        tckd = t * (t / s).log() + (1 - t) * ((1 - t) / (1 - s)).log()
        nckd = (rest * hat_t * (hat_t / hat_s).log()).sum(dim=1, keepdim=True)
        entry["z_expected"] = torch.autograd.grad((tckd + 0.5 * nckd).mean(), z)[0]
    if name == "dcl":
        entry["z_expected"] = torch.autograd.grad(
            F.cross_entropy(step.logits, step.y), step.features, retain_graph=True
        )[0]
    LOG.append(entry)


def pick(labels, **wanted):
    """Return the first samples of each class: ``c3=20`` for 20 samples of class 3."""
    return np.concatenate([np.flatnonzero(labels == int(name[1:]))[:n] for name, n in wanted.items()])


def analytic_federation(labels, num_clients, **_):
    """Class 0 with clients 0 and 1, 2 with 0 only, 3 and 5 with 2, 4 is one sample of 3, 6 to 9 with nobody."""
    class_0 = np.flatnonzero(labels == 0)
    return [
        np.concatenate([class_0[:30], pick(labels, c1=20, c2=25)]),
        np.concatenate([class_0[30:50], np.flatnonzero(labels == 1)[20:60]]),
        pick(labels, c3=40, c5=2),
        pick(labels, c4=1),
    ]


def skewed(labels, num_clients, **_):
    """Two clients with two classes each, one in common."""
    return [pick(labels, c0=30, c1=40), np.concatenate([np.flatnonzero(labels == 1)[40:70], pick(labels, c2=30)])]


def all_classes(labels, num_clients, **_):
    return np.array_split(np.arange(600), num_clients)


def kept(kind, log=None, **filters):
    entries = LOG if log is None else log
    return [e for e in entries if e["kind"] == kind and all(e[name] == value for name, value in filters.items())]


SKEWED = {"clients": 2, "rounds": 2, "local_epochs": 2, "partition": skewed, "batch_size": 32}


OPTIONS, OF_VARIANTS = (
    {field.alias or name for name, field in cls.model_fields.items()} for cls in (FedCDOptions, FedCDVariantsOptions)
)


def hand_run(go, cohorts, options=None, plugins=(Watched, WatchedVariants), **config):
    """Run FedCD, or its variants where an option is theirs."""
    options = options or {}
    plugins = {plugins[not options.keys() <= OPTIONS]: options, Cohorts: {"rounds": cohorts}}
    config = {"partition": analytic_federation, "rounds": len(cohorts), "batch_size": 16, **config}
    return go(plugins, **config)


# --- Eqs. 1 and 2 through the round loop --------------------------------------------------------------------------


def cosines(z, prototypes):
    norm = lambda x: x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-8)  # noqa: E731
    return norm(z) @ norm(prototypes).T


COHORTS = [[0, 1], [2], [0, 2, 3], [1, 3]]


@pytest.fixture(scope="module", params=["before", "after"])
def story(go, request):
    """Return the log of four rounds under partial participation."""
    LOG.clear()
    hand_run(go, COHORTS, {"kmeans": request.param}, weight_decay=0.1)
    return list(LOG)


def test_equation_1_round_by_round_under_partial_participation(story):
    expected = np.zeros((10, 3, 256))
    counts = np.zeros((10, 3), dtype=np.int64)
    for number, cohort in enumerate(COHORTS):
        up = kept("up", story, round=number)
        assert sorted(e["client"] for e in up) == cohort
        n = np.stack([e["counts"] for e in up])
        total = n.sum(axis=0)
        weighted = sum(e["counts"][..., None] * e["prototypes"].astype(np.float64) for e in up)
        held = total > 0
        expected[held] = weighted[held] / total[held][:, None]
        counts[held] = total[held]
        state = kept("state", story, round=number)[0]["state"]
        assert set(state) == {"prototypes", "counts"}
        assert (state["counts"] == counts).all()
        np.testing.assert_allclose(state["prototypes"], expected, rtol=1e-5, atol=1e-7)
    assert (counts.sum(axis=1) > 0).tolist() == [True] * 6 + [False] * 4
    assert (counts[6:] == 0).all(), "nobody holds classes 6 to 9"
    # Class 2 is client 0's alone: rounds 1 and 3 keep its prototypes to the bit, round 2 does not.
    for keeping in (1, 3):
        before, after = (kept("state", story, round=r)[0]["state"]["prototypes"][2] for r in (keeping - 1, keeping))
        assert (before == after).all()
    one, two = (kept("state", story, round=r)[0]["state"]["prototypes"][2] for r in (1, 2))
    assert (one != two).any()


def test_what_went_up_is_received_in_the_next_round(story):
    for number in (1, 2, 3):
        state = kept("state", story, round=number - 1)[0]["state"]
        for e in kept("up", story, round=number):
            assert (e["received"]["prototypes"] == state["prototypes"]).all()
            assert (e["received"]["counts"] == state["counts"]).all()
    assert all(e["received"] == {} for e in kept("up", story, round=0))


def test_counts_are_equation_2_on_the_final_models_features(story):
    for e in kept("up", story):
        expected = np.zeros((10, 3), dtype=np.int64)
        for z, c in zip(e["features"], e["labels"]):
            similar = cosines(z[None], e["start"][c].astype(np.float64))[0]
            similar[~e["known"][c]] = -np.inf
            expected[c, similar.argmax()] += 1
        assert (e["counts"] == expected).all()
        assert e["counts"].sum(axis=1).tolist() == e["class_counts"]


def test_every_batch_is_assigned_against_p_g_and_not_the_moving_p_k(go, monkeypatch):
    seen = []

    def noting(features, labels, prototypes, known):
        seen.append(prototypes.detach().numpy().copy())
        return assign_fine_classes(features, labels, prototypes, known)

    monkeypatch.setattr("fedcore_fedcd.equations.assign_fine_classes", noting)
    hand_run(go, [[0], [0]], {"kmeans": "before"}, local_epochs=2)
    first, second = (e["start"] for e in kept("up"))
    assert (second == kept("up", round=1)[0]["received"]["prototypes"]).all()
    assert all((used == first).all() or (used == second).all() for used in seen)
    assert sum((used == second).all() for used in seen) == 2 * 5 + 1, "every batch of two epochs, then the counts"


def test_a_first_appearance_starts_from_k_means_and_a_known_class_from_p_g(story):
    for e in kept("up", story):
        counts = e["received"].get("counts", np.zeros((10, 3), dtype=np.int64))
        for c in range(10):
            if (counts[c] > 0).any():
                assert (e["known"][c] == (counts[c] > 0)).all()
                assert (e["start"][c] == e["received"]["prototypes"][c]).all()
            else:  # no more prototypes than distinct samples
                assert e["known"][c].sum() == min(3, e["class_counts"][c])
                assert (np.abs(e["start"][c]).sum(axis=1) > 0).tolist() == e["known"][c].tolist()
    late = kept("up", story, round=1)[0]  # client 2 brings classes 3 and 5 in the second round
    assert late["known"][[3, 5]].sum(axis=1).tolist() == [3, 2]
    single = kept("up", story, round=2, client=3)[
        0
    ]  # one sample: its only prototype is that sample's feature under w_t
    assert single["known"][4].tolist() == [True, False, False]
    assert single["counts"][4].tolist() == [1, 0, 0]


def test_k_means_centres_are_those_of_the_initial_models_features(go):
    hand_run(go, [[2]], {"kmeans": "before"}, local_epochs=1, lr=1e-30)  # the final features are those of w_0
    e = kept("up")[0]
    two = e["features"][e["labels"] == 5]  # two samples: the centres are the samples
    found = e["start"][5][:2]
    order = lambda x: x[x[:, 0].argsort()]  # noqa: E731
    np.testing.assert_allclose(order(found), order(two), rtol=1e-5, atol=1e-7)
    of_3, centres = e["features"][e["labels"] == 3], e["start"][3].astype(np.float64)
    nearest = ((of_3[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1)
    for m in range(3):  # a fixed point of Lloyd's algorithm
        np.testing.assert_allclose(centres[m], of_3[nearest == m].mean(axis=0), rtol=1e-4, atol=1e-6)


def check_centres(entry, c):
    """Assert that the prototypes of a class are a fixed point of Lloyd's algorithm on the final features."""
    of_c, held = entry["features"][entry["labels"] == c], min(3, entry["class_counts"][c])
    centres = entry["prototypes"][c, :held].astype(np.float64)
    nearest = ((of_c[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1)
    for m in range(held):
        np.testing.assert_allclose(centres[m], of_c[nearest == m].mean(axis=0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hpc", [True, False])
def test_k_means_after_training_starts_from_the_trained_features(go, hpc):
    hand_run(go, COHORTS, {"first_t": 1, "hpc": hpc})
    appeared = []
    for e in kept("up"):
        counts = e["received"].get("counts", np.zeros((10, 3), dtype=np.int64))
        assert (e["in_losses"] == (counts > 0)).all(), "a class without a prototype takes no part in the round's losses"
        for c in np.flatnonzero(e["class_counts"]):
            if e["in_losses"][c].any():
                moved = (e["prototypes"][c] != e["start"][c]).any(axis=1)
                assert not hpc or (moved == e["in_losses"][c]).all()
            else:
                appeared.append((e["round"], e["client"], int(c)))
                if hpc:  # else they are the means of the fine classes, which cosines assign
                    check_centres(e, c)
        assert e["counts"].sum(axis=1).tolist() == e["class_counts"]
    assert (1, 2, 3) in appeared, "client 2 brings class 3 in the second round"
    assert (2, 3, 4) in appeared, "and client 3 its only sample in the third"
    assert len(appeared) == 3 + 2 + 2 + 1


def test_k_means_after_training_moves_the_first_round_by_samples_alone(go):
    """In the first round P^k is no part of any loss: the model is that of k-means before training, to the bit."""
    runs = [hand_run(go, [[0]], {"kmeans": when, "aggregation": "fedavg"}) for when in ("before", "after")]
    assert model_bytes(runs[0]) == model_bytes(runs[1])
    before, after = kept("up")
    assert (before["features"] == after["features"]).all()
    assert (before["prototypes"] != after["prototypes"]).any()


def test_p_k_rests_in_round_0_and_moves_from_round_1_on(story):
    for e in kept("up", story):
        moved = (e["prototypes"] != e["start"]).any(axis=2)
        assert (moved == (e["in_losses"] & (e["round"] > 0))).all()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("rebalance", ["averaged", "appended", "mixed", "none"])
@pytest.mark.parametrize("kmeans", ["before", "after"])
def test_honest_prototypes_are_within_the_servers_bounds_at_large_rates(go, rebalance, kmeans):
    options = {"rebalance": rebalance, "prototype_weight": 5.0, "kmeans": kmeans, "normalize": True, "temperature": 0.2}
    result = hand_run(go, [[0], [0, 1], [2], [0, 2]], options, lr=0.3)
    assert [line["failures"] for line in records(result)] == [[]] * 4
    moved = [np.abs(e["prototypes"] - e["start"])[e["known"]].max() for e in kept("up", round=3)]
    assert max(moved) > 0.02  # of length 1 at the start


def test_weight_decay_and_masks_leave_prototypes_alone(go):
    """A known prototype moves by L_hpc's gradient, which is orthogonal to it: decay would shorten it."""
    hand_run(go, [[0], [0]], {"rebalance": "none"}, lr=1e-3, momentum=0.0, weight_decay=100.0)
    e = kept("up", round=1)[0]
    length = [np.linalg.norm(e[name][e["known"]], axis=1) for name in ("start", "prototypes")]
    assert (length[1] >= length[0] * (1 - 1e-6)).all()


@pytest.mark.parametrize("kmeans", ["before", "after"])
def test_without_hpc_prototypes_are_the_means_of_the_final_features(go, kmeans):
    hand_run(go, [[0, 1], [0, 1]], {"hpc": False, "kmeans": kmeans})
    for e in kept("up"):
        for c, m in np.argwhere(e["counts"] > 0):
            similar = cosines(e["features"], e["start"][c].astype(np.float64))
            similar[:, ~e["known"][c]] = -np.inf
            own = (e["labels"] == c) & (similar.argmax(axis=1) == m)
            np.testing.assert_allclose(e["prototypes"][c, m], e["features"][own].mean(axis=0), rtol=1e-4, atol=1e-6)
        assert (e["prototypes"][e["counts"] == 0] == e["start"][e["counts"] == 0]).all()


# --- Eqs. 12 to 15 in a run ---------------------------------------------------------------------------------------


def test_class_vectors_in_a_run(go):
    result = hand_run(go, [[0, 1], [0, 1, 2]])
    softmax = lambda x: np.exp(x - x.max()) / np.exp(x - x.max()).sum()  # noqa: E731
    for e in kept("aggregate"):
        state = kept("state", round=e["round"])[0]["state"]
        clients = list(e["models"])
        n = np.array([e["samples"][k] for k in clients], dtype=np.float64)
        for j in range(30):
            p = state["prototypes"].reshape(30, 256)[j].astype(np.float64)
            v = n / n.sum()
            if state["counts"].reshape(30)[j] > 0:
                logits = [e["models"][k][WEIGHT] @ p + e["models"][k][BIAS] for k in clients]
                v = softmax(np.array([softmax(x)[j] for x in logits]))
            weight = sum(share * e["models"][k][WEIGHT][j] for share, k in zip(v, clients))
            bias = sum(share * e["models"][k][BIAS][j] for share, k in zip(v, clients))
            np.testing.assert_allclose(e["out"][WEIGHT][j], weight, rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(e["out"][BIAS][j], bias, rtol=1e-4, atol=1e-6)
    assert (result.model.state_dict()[WEIGHT].numpy() == kept("aggregate")[-1]["out"][WEIGHT]).all()


def test_one_client_alone_gives_fedavgs_classifier(go):
    """v^j of one client is 1: adaptive aggregation and FedAvg's agree to the bit."""
    one = [model_bytes(hand_run(go, [[0], [0]], {"aggregation": a})) for a in ("adaptive", "fedavg", "count")]
    assert one[0] == one[1] == one[2]


# --- Eq. 11: weights, and where each gradient goes ---------------------------------------------------------------


def test_the_weights_of_equation_11(go):
    hand_run(go, [[0]] * 4, {"gamma": 0.2, "lambda": 0.3})
    for e in kept("scales"):
        mu = 1 - e["round"] / 4
        assert e["progress"] == e["round"] / 4
        assert e["losses"] == {("hpc", 1 - mu, mu), ("bpr", 0.2, 1.0), ("gid", 0.3, 1.0)}


def test_the_weights_with_t_from_1_as_in_algorithm_2(go):
    """The last round has no L_dcl, and the classifier moves by L_gid alone."""
    result = hand_run(go, [[0]] * 4, {"first_t": 1, "kmeans": "before"})
    for e in kept("scales"):
        mu = 1 - (e["round"] + 1) / 4
        assert e["losses"] == {("hpc", 1 - mu, mu), ("bpr", 0.1, 1.0), ("gid", 0.1, 1.0)}
    assert ["task" in line["losses"] for line in records(result)] == [True, True, True, False]
    moved = (kept("up", round=0)[0]["prototypes"] != kept("up", round=0)[0]["start"]).any()
    assert moved, "L_hpc has weight 1/T in the first round"


@pytest.mark.parametrize("rebalance", ["averaged", "appended", "mixed", "none"])
def test_which_part_of_the_local_problem_each_loss_reaches(go, rebalance):
    hand_run(go, [[0], [0]], {"rebalance": rebalance}, plugins=(Probed, ProbedVariants), local_epochs=2)
    expected = {
        "dcl": {"encoder", "classifier", "features"},
        "hpc": {"encoder", "prototypes", "features"},
        "bpr": {"encoder", "features"},
        "gid": {"encoder", "classifier", "features"},
    }
    for e in kept("gradients", round=1):
        if e["loss"] != "gid" or not e["same_as_global"]:
            assert e["reached"] == expected[e["loss"]], (e["loss"], e["epoch"])


def test_gid_is_zero_before_the_first_step_of_a_round_and_positive_after_it(go):
    hand_run(go, [[0], [0]], plugins=(Probed, ProbedVariants), local_epochs=2)
    entries = kept("gradients", loss="gid")
    assert sum(e["same_as_global"] for e in entries) == 2, "the first batch of each round"
    for e in entries:
        assert e["value"] == 0.0 if e["same_as_global"] else e["value"] > 0


def test_z_reaches_gid_through_the_student_only(go):
    hand_run(go, [[0], [0]], {"rebalance": "none"}, plugins=(Probed, ProbedVariants), local_epochs=2)
    entries = [e for e in kept("gradients", loss="gid") if e["epoch"] == 1]
    assert entries
    for e in entries:
        torch.testing.assert_close(e["z"], e["z_expected"], rtol=1e-2, atol=1e-5)


def test_global_prototypes_train_the_classifier_and_not_the_encoder(go):
    """With appended prototypes z's gradient of L_dcl is the batch's own; averaged and mixed ones share its divisor."""
    hand_run(go, [[0], [0]], {"rebalance": "appended"}, plugins=(Probed, ProbedVariants))
    for e in kept("gradients", loss="dcl"):
        torch.testing.assert_close(e["z"], e["z_expected"])
    LOG.clear()
    hand_run(go, [[0], [0]], {"rebalance": "averaged", "prototype_weight": 3.0}, plugins=(Probed, ProbedVariants))
    for e in kept("gradients", loss="dcl"):
        torch.testing.assert_close(e["z"], e["z_expected"] / (1 if e["round"] == 0 else 4))
    LOG.clear()
    hand_run(go, [[0], [0]], {"rebalance": "mixed"}, plugins=(Probed, ProbedVariants))
    shares = [float(e["z"].norm() / e["z_expected"].norm()) for e in kept("gradients", loss="dcl", round=1)]
    assert min(shares) < 0.5
    assert max(shares) <= 1 + 1e-5


# --- edges ---------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("rebalance", ["averaged", "appended", "mixed", "none"])
def test_a_client_with_one_sample_trains_from_the_first_round_on(go, rebalance):
    result = hand_run(go, [[3], [3, 2], [3]], {"rebalance": rebalance})
    assert [line["accepted"] for line in records(result)] == [1, 2, 1]
    assert all(line["failures"] == [] for line in records(result))


def test_mixed_puts_every_known_prototype_into_exactly_one_batch_of_an_epoch(go):
    hand_run(go, [[0, 1], [0]], {"rebalance": "mixed"}, plugins=(Probed, ProbedVariants), local_epochs=1)
    n, known = 75, kept("state", round=0)[0]["state"]["counts"]
    entries = kept("gradients", loss="dcl", round=1)
    # The batch's share of z's gradient is |batch| / (|batch| + N_of_its_prototypes); put together: all counts.
    sizes = [16, 16, 16, 16, 11]
    totals = [s / float(e["z"].norm() / e["z_expected"].norm()) - s for s, e in zip(sizes, entries)]
    assert len(entries) == len(sizes)
    assert sum(sizes) == n
    assert sum(totals) == pytest.approx(float(known.sum()), rel=1e-3)


def test_what_travels(go):
    ledger = go({"fedcd": {}}, **SKEWED).summary["bytes"]["by_plugin"]["fedcd"]
    size = 10 * 3 * 256 * 4 + 10 * 3 * 8  # prototypes and counts
    assert ledger == {"down": 2 * size, "up": 2 * 2 * size}, "P^g goes down from the second round on"


# --- options ---------------------------------------------------------------------------------------------------------

CHANGES = [
    {"fine_classes": 1},
    {"fine_classes": 5},
    {"alpha": 0.0},
    {"alpha": 1.0},
    {"temperature": 0.5},
    {"gamma": 0.0},
    {"lambda": 0.0},
    {"lambda": 2.0},
    {"xi": 0.0},
    {"xi": 8.0},
    {"rebalance": "averaged"},
    {"rebalance": "mixed"},
    {"rebalance": "none"},
    {"first_t": 1},
    {"kmeans": "before"},
    {"prototype_weight": 0.5},
    {"W": "mean"},
    {"W": "probabilities"},
    {"normalize": True},
    {"match": "hungarian"},
    {"hpc": False},
    {"distillation": "kl"},
    {"aggregation": "count"},
    {"aggregation": "fedavg"},
]


def test_features_and_the_first_prototypes_are_of_unit_length_where_they_are_normalized(go):
    """K-means centres are means of unit vectors, and those of one cluster are close to each other."""
    result = go({WatchedVariants: {"normalize": True}}, **{**SKEWED, "rounds": 1})
    x = load_dataset("digits").test.gather(torch.arange(50))
    z = result.model.eval()(x).features
    torch.testing.assert_close(z.norm(dim=1), torch.ones(50))
    torch.testing.assert_close(result.model(x).logits, result.model.classifier(z))
    for up in kept("up"):
        lengths = np.linalg.norm(up["prototypes"], axis=2)[up["known"]]
        assert ((lengths > 0.5) & (lengths < 1 + 1e-6)).all()


@pytest.fixture(scope="module")
def final(go):
    """Return the final model's bytes of a run with these options, each run made once."""
    done: dict[str, bytes] = {}

    def weights(options):
        key = str(sorted(options.items()))
        if key not in done:
            result = go({"fedcd" if options.keys() <= OPTIONS else "fedcd-variants": options}, **SKEWED)
            assert [line["accepted"] for line in records(result)] == [2, 2]
            done[key] = model_bytes(result)
        return done[key]

    return weights


@pytest.mark.slow
@pytest.mark.parametrize("options", CHANGES, ids=str)
def test_every_option_changes_the_trajectory(final, options):
    assert final(options) != final({})


def test_every_option_is_among_those_that_were_changed():
    refuse_clients_only = {"feature_norm", "bound_moves"}
    assert {name for options in CHANGES for name in options} == OF_VARIANTS - refuse_clients_only


def test_the_variants_with_fedcds_options_are_fedcd(go):
    """The same bits and the same records but for the name, in rounds with and without global prototypes."""
    options = {"fine_classes": 2, "lambda": 0.3}
    runs = [go({name: options}, **SKEWED) for name in ("fedcd", "fedcd-variants")]
    assert model_bytes(runs[0]) == model_bytes(runs[1])
    one, two = ([(line["losses"], line["metrics"], line["bytes"]) for line in records(run)] for run in runs)
    assert json.dumps(one) == json.dumps(two).replace("fedcd-variants", "fedcd")


def test_an_option_of_the_variants_is_refused_with_the_place_where_it_is(go):
    for option, place in (("W", "fedcd-variants"), ("bpr", "gamma=0"), ("gid", "lambda=0")):
        with raises(UnknownNameError, f"'{option}'", place):
            go({"fedcd": {option: "mean"}})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"prototype_weight": 0.0}, {"rebalance": "none"}),
        ({"fine_classes": 1, "W": "mean"}, {"fine_classes": 1}),
        ({"fine_classes": 1, "W": "probabilities"}, {"fine_classes": 1}),
    ],
    ids=str,
)
def test_options_that_mean_the_same_give_the_same_bits(final, one, other):
    assert final(one) == final(other)


def test_a_first_round_without_any_term_is_refused(go):
    with raises(ConfigError, "first_t", 1):
        go({"fedcd-variants": {"first_t": 1, "hpc": False, "lambda": 0.0, "gamma": 0.0}})


@pytest.mark.slow
def test_it_learns(go):
    result = go({"fedcd": {}}, partition=all_classes, clients=2, rounds=4, local_epochs=2, batch_size=16)
    assert result.metrics["global"]["accuracy"] > 0.7


# --- beside other plugins --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [("fedcd", "moon"), ("moon", "fedcd")])
def test_with_moon(go, order):
    result = go({name: {} for name in order}, **SKEWED)
    names = [set(line["losses"]) for line in records(result)]
    own = {"task", "fedcd.bpr", "fedcd.gid"}
    assert names == [own, own | {"fedcd.hpc", "moon.contrast"}], "L_hpc has weight 0 in round 0"


def test_with_fedprox(go, final):
    result = go({"fedcd": {}, "fedprox": {"mu": 1.0}}, **SKEWED)
    assert set(records(result)[1]["losses"]) == {"task", "fedcd.hpc", "fedcd.bpr", "fedcd.gid", "fedprox.proximal"}
    assert records(result)[1]["losses"]["fedprox.proximal"] > 0
    assert model_bytes(result) != final({})


class OtherOwner(Plugin):
    owns = ("classifier.fine.bias",)

    @hookimpl
    def aggregate(self, server, updates):
        return None


class OtherShape(Plugin):
    @hookimpl
    def configure_model(self, task):
        task.reshape_classifier(self.name)


class OtherScale(Plugin):
    scales_task = True

    @hookimpl
    def local_loss(self, step):
        return Loss(step.features.sum(), task_scale=0.5)


@pytest.mark.parametrize("other", [OwnTaskLoss, OtherOwner, OtherShape, OtherScale, StepsOnServer])
@pytest.mark.parametrize("order", [1, -1])
def test_what_cannot_be_combined_is_refused_with_both_names(go, other, order):
    plugins = dict([("fedcd", {}), (other, {})][::order])
    with raises(PluginConflictError, "'fedcd'", f"'{other.__name__.lower()}'"):
        go(plugins)


def test_without_adaptive_aggregation_a_server_optimizer_is_welcome(go):
    assert go({"fedcd-variants": {"aggregation": "fedavg"}, StepsOnServer: {}}, **SKEWED).metrics["global"]
