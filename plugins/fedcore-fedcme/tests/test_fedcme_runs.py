"""FedCME in whole runs on digits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedcore import ConfigError, Loss, Plugin, PluginConflictError, PluginOptions, hookimpl
from fedcore.data import load_dataset
from fedcore.models import build_model
from fedcore_fedcme.plugin import FeatureAlignment
from fedcore_testing import (
    PersonalClassifier,
    federations,
    installed,
    model_bytes,
    one_sample,
    partition_of,
    plugin_state,
    records,
    weights,
    with_batch_norm,
)
from tests.sentences import raises, warns

go = federations(local_epochs=2, batch_size=200)


def evaluation_part(run, client):
    return plugin_state(run, "fedcme", client)["evaluation"]


class Recorder(Plugin):
    """Keeps each client's weights at the start of every epoch, and the features of every batch."""

    begun: dict = {}
    batches: dict = {}

    @hookimpl
    def local_loss(self, step):
        key = (step.round, step.client.id)
        state = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
        self.begun.setdefault((*key, step.epoch), state)
        self.batches.setdefault(key, []).append((step.features.detach().double().numpy(), step.y.numpy()))


class OneOptions(PluginOptions):
    client: int = 1
    round: int = 0
    epoch: int = 0


class Fails(Plugin):
    """One client fails: its backward raises, as a device out of memory would."""

    Options = OneOptions

    @hookimpl
    def local_loss(self, step):
        if (step.client.id, step.round, step.epoch) == (self.options.client, self.options.round, self.options.epoch):
            step.logits.register_hook(self.fail)

    def fail(self, gradient):
        raise RuntimeError("planted failure")


class Diverges(Plugin):
    """One client's weights become nan in its first epoch."""

    Options = OneOptions

    @hookimpl
    def local_loss(self, step):
        if (step.client.id, step.round, step.epoch) == (self.options.client, self.options.round, self.options.epoch):
            return Loss(step.logits.sum() * float("nan"))
        return None


class NewClassifier(Plugin):
    """A method that declares a classifier of another shape."""

    @hookimpl
    def configure_model(self, task):
        task.reshape_classifier(self.name)


class Displacement(Plugin):
    """Derives state from w_t - y_k, as SCAFFOLD does."""

    assumes = ("displacement",)


@pytest.fixture
def recorded():
    Recorder.begun.clear()
    Recorder.batches.clear()
    return Recorder


OFF = {"mu": 0.0, "exchange": "none"}
DISJOINT = {
    "clients": 2,
    "partition": "classes",
    "classes_per_client": 5,
    "rounds": 1,
    "local_epochs": 4,
    "batch_size": 200,
}


# --- the exchange ---------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(
    ("exchange", "swapped"), [("classifier", "classifier."), ("encoder", "encoder."), ("model", ""), ("none", "-")]
)
def test_two_clients_swap_exactly_what_is_asked(go, recorded, exchange, swapped, layers):
    run = go({"fedcme": {**OFF, "classifier_layers": layers}, Recorder: {}}, **DISJOINT)
    classes = [set(load_dataset("digits", None).train.labels[part].tolist()) for part in partition_of(run).train]
    assert len(classes[0]) == len(classes[1]) == 5
    assert not classes[0] & classes[1]
    alone = dict(recorded.begun)
    recorded.begun.clear()
    go({"fedcme": {"mu": 0.0, "exchange": exchange, "classifier_layers": layers}, Recorder: {}}, **DISJOINT)
    names = recorded.begun[0, 0, 0]
    assert sum(name.startswith("classifier.") for name in names) == 2 * layers
    for client in (0, 1):
        for epoch in (0, 1):
            for name, tensor in recorded.begun[0, client, epoch].items():
                assert torch.equal(tensor, alone[0, client, epoch][name])
        for name, tensor in recorded.begun[0, client, 2].items():
            giver = 1 - client if name.startswith(swapped) else client
            assert torch.equal(tensor, alone[0, giver, 2][name]), name
            assert not torch.equal(alone[0, 0, 2][name], alone[0, 1, 2][name]), name


@pytest.mark.parametrize(("epochs", "middle"), [(2, 1), (3, 1), (4, 2), (6, 3), (7, 3)])
def test_the_exchange_is_at_the_start_of_epoch_half(go, recorded, epochs, middle):
    options = {**DISJOINT, "local_epochs": epochs, "batch_size": 400}
    found = []
    for settings in (OFF, {"mu": 0.0}):
        recorded.begun.clear()
        go({"fedcme": settings, Recorder: {}}, **options)
        found.append([[recorded.begun[0, k, e]["classifier.weight"] for k in (0, 1)] for e in range(epochs)])
    alone, matched = found
    changed = [epoch for epoch in range(epochs) if not torch.equal(alone[epoch][0], matched[epoch][0])]
    assert changed == list(range(middle, epochs))
    assert torch.equal(matched[middle][0], alone[middle][1])
    assert torch.equal(matched[middle][1], alone[middle][0])


def test_one_epoch_has_no_middle(go):
    with warns(RuntimeWarning, "fedcme", "--local-epochs 2"):
        run = go({"fedcme": {"mu": 0.0}}, local_epochs=1)
    assert model_bytes(run) == model_bytes(go({}, local_epochs=1))
    assert "notes" not in records(go({"fedcme": OFF}, local_epochs=1))[0]


# --- the whole method by hand ---------------------------------------------------------------------------------

LAYERS = ("encoder.base.fc1", "encoder.base.fc2", "classifier")
HAND = {
    "clients": 5,
    "alpha": 0.3,
    "rounds": 3,
    "local_epochs": 3,
    "batch_size": 2000,
    "lr": 0.1,
    "lr_decay": 0.9,
    "momentum": 0.9,
    "weight_decay": 0.01,
}


def least_similar_pairs(vectors):
    """Section IV-A in NumPy."""

    def cosine(a, b):
        return round(float(a @ b) / (max(np.linalg.norm(a), 1e-8) * max(np.linalg.norm(b), 1e-8)), 9)

    mean = sum(vectors.values()) / len(vectors)
    order, pairs = [k for _, k in sorted((cosine(v, mean), k) for k, v in vectors.items())], {}
    while len(order) > 1:
        k = order.pop(0)
        j = min(order, key=lambda i: (cosine(vectors[k], vectors[i]), i))
        order.remove(j)
        pairs[k], pairs[j] = j, k
    return pairs


def analytic_federation(
    run, *, mu, norm="mean", swap=True, head=1, fresh=None, memory=True, evaluated=None, config=HAND
):
    """FedCME in float64 with full batches, from the paper's text; the switches make it wrong on purpose.

    :param norm: the squared norm of Eq. 9 over the features, ``mean`` or ``sum``.
    :param head: the last layers that are the classifier; features are what goes into them.
    :param fresh: layers whose momentum starts anew at the exchange; None is those of the classifier.
    :param evaluated: a run whose clients drew the parts to evaluate on, where this one's drew none.
    """
    dataset, partition = load_dataset("digits", None), partition_of(run)
    start = build_model("mlp", num_classes=10, input_shape=(1, 8, 8), seed=0, projection=False)[0].state_dict()
    w = {name: tensor.double() for name, tensor in start.items()}
    clients = range(config["clients"])
    data = [(dataset.train.gather(i).double(), dataset.train.labels[i]) for i in partition.train]
    own = [evaluation_part(evaluated or run, k) for k in clients]
    vectors, zeta, matches = {k: np.zeros(10) for k in clients}, {}, []
    fresh = LAYERS[-head:] if fresh is None else fresh

    def forward(weights, x):
        h = z = x.flatten(1)
        for layer in LAYERS:
            z = h if layer == LAYERS[-head] else z
            h = h @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]
            h = h if layer == "classifier" else h.clamp(min=0)
        return z, h

    for t in range(config["rounds"]):
        matches.append(least_similar_pairs(vectors))
        local = {k: {name: tensor.clone().requires_grad_() for name, tensor in w.items()} for k in clients}
        speed = {k: {name: torch.zeros_like(tensor) for name, tensor in w.items()} for k in clients}
        seen = {k: {c: [] for c in range(10)} for k in clients}
        for epoch in range(config["local_epochs"]):
            if swap and epoch == config["local_epochs"] // 2:
                given = {
                    k: {n: local[j][n].detach().clone() for n in w if n.startswith(LAYERS[-head:])}
                    for k, j in matches[-1].items()
                }
                for k, part in given.items():
                    for name, tensor in part.items():
                        local[k][name] = tensor.requires_grad_()
                    for name in w:
                        if name.startswith(fresh):
                            speed[k][name] = torch.zeros_like(w[name])
            for k in clients:
                x, y = data[k]
                z, logits = forward(local[k], x)
                loss = F.cross_entropy(logits, y)
                for c in range(10):
                    if (y == c).any():
                        seen[k][c].append(z[y == c].detach())
                        if c in zeta:
                            loss = loss + mu * getattr((z[y == c].mean(0) - zeta[c]).square(), norm)()
                gradients = torch.autograd.grad(loss, list(local[k].values()))
                with torch.no_grad():
                    for (name, tensor), g in zip(local[k].items(), gradients):
                        speed[k][name] = config["momentum"] * speed[k][name] + g + config["weight_decay"] * tensor
                        tensor -= config["lr"] * config["lr_decay"] ** t * speed[k][name]
        local = {k: {name: tensor.detach() for name, tensor in local[k].items()} for k in clients}
        for k in clients:
            x, y = data[k][0][own[k]], data[k][1][own[k]]
            right = forward(local[k], x)[1].argmax(1) == y
            vectors[k] = np.array([float(right[y == c].double().mean()) if (y == c).any() else 0 for c in range(10)])
        new = {}
        for c in range(10):
            held = [torch.cat(seen[k][c]).mean(0) for k in clients if seen[k][c]]
            if c in zeta and memory:
                held += [zeta[c]] * (len(clients) - len(held))
            if held:
                new[c] = sum(held) / len(held)
        zeta = {**zeta, **new}
        n = [len(part) for part in partition.train]
        w = {name: sum(n[k] * local[k][name] for k in clients) / sum(n) for name in w}
    return w, zeta, vectors, matches


def distance(weights, other):
    return max(float((weights[name].double() - other[name]).abs().max()) for name in other)


MOVED = {"encoder.base.fc2": "classifier.0", "classifier": "classifier.2"}


def as_unmoved(weights):
    """Rename what ``classifier_layers = 2`` moved back to what ``mlp`` calls it."""
    assert not [name for name in weights if name.startswith("encoder.base.fc2")]
    back = {new: old for old, new in MOVED.items()}
    renamed = {}
    for name, tensor in weights.items():
        layer, _, kind = name.rpartition(".")
        renamed[f"{back.get(layer, layer)}.{kind}"] = tensor
    return renamed


def test_a_run_is_the_paper_computed_by_hand(go):
    run = go({"fedcme": {"mu": 5.0}}, **HAND)
    w, zeta, vectors, matches = analytic_federation(run, mu=5.0)
    assert distance(weights(run), w) < 2e-5
    state = plugin_state(run, "fedcme")
    assert state["known"].tolist() == [c in zeta for c in range(10)]
    for c, feature in zeta.items():
        torch.testing.assert_close(state["features"][c].double(), feature, rtol=1e-4, atol=1e-5)
    for k, vector in vectors.items():
        np.testing.assert_allclose(state["vectors"][k].numpy(), vector, atol=1e-12)
    assert dict(state["donors"]) == matches[-1]
    assert matches[0] == {0: 1, 1: 0, 2: 3, 3: 2}  # no vectors yet: by id, the last one alone
    assert matches[-1] != matches[0]
    wrong = {
        "no exchange": {"swap": False},
        "no optimizer state reset": {"fresh": ("nothing",)},
        "all of it reset": {"fresh": ("classifier", "encoder")},
        "no memory in Eq. 6": {"memory": False},
    }
    for what, switches in wrong.items():
        assert distance(weights(run), analytic_federation(run, **{"mu": 5.0, **switches})[0]) > 1e-4, what
    assert distance(weights(run), analytic_federation(run, mu=0.0)[0]) > 1e-3
    assert distance(weights(run), analytic_federation(run, mu=5.0, norm="sum")[0]) > 1e-3


def test_the_norm_as_a_sum_by_hand(go):
    run = go({"fedcme": {"mu": 0.1, "distance": "sum"}}, **HAND)
    assert distance(weights(run), analytic_federation(run, mu=0.1, norm="sum")[0]) < 2e-5


def test_a_classifier_of_two_layers_by_hand(go):
    """Both travel, with fresh momentum, and the features of Eqs. 5, 6 and 9 are what goes into them, 128 wide."""
    run = go({"fedcme": {"mu": 5.0, "classifier_layers": 2}}, **HAND)
    found = as_unmoved(weights(run))
    w, zeta, vectors, matches = analytic_federation(run, mu=5.0, head=2)
    assert distance(found, w) < 2e-5
    state = plugin_state(run, "fedcme")
    assert state["features"].shape == (10, 128)
    for c, feature in zeta.items():
        torch.testing.assert_close(state["features"][c].double(), feature, rtol=1e-4, atol=1e-5)
    for k, vector in vectors.items():
        np.testing.assert_allclose(state["vectors"][k].numpy(), vector, atol=1e-12)
    assert dict(state["donors"]) == matches[-1]
    assert distance(found, analytic_federation(run, mu=5.0, head=1)[0]) > 1e-3
    assert distance(found, analytic_federation(run, mu=5.0, head=2, fresh=("classifier",))[0]) > 1e-4


@pytest.mark.slow
def test_alignment_alone_and_exchange_alone_by_hand(go):
    run = go({"fedcme": {"align": False, "mu": 5.0}}, **HAND)
    assert distance(weights(run), analytic_federation(run, mu=0.0)[0]) < 2e-5
    exchanging = run
    run = go({"fedcme": {"exchange": "none", "mu": 5.0}}, **HAND)
    assert distance(weights(run), analytic_federation(run, mu=5.0, swap=False, evaluated=exchanging)[0]) < 2e-5


# --- what is observed and sent --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:classes")
def test_local_features_are_means_over_all_batches_and_epochs(go, recorded):
    run = go({"fedcme": {"mu": 1.0}, Recorder: {}}, **{**DISJOINT, "clients": 1, "classes_per_client": 7})
    z, y = (np.concatenate(parts) for parts in zip(*recorded.batches[0, 0]))
    state, held = plugin_state(run, "fedcme"), set(y.tolist())
    assert len(y) == 4 * len(partition_of(run).train[0])
    assert len(held) == 7
    for c in range(10):
        assert bool(state["known"][c]) == (c in held)
        if c in held:
            np.testing.assert_allclose(state["features"][c], z[y == c].mean(axis=0), rtol=1e-5, atol=1e-6)


def test_memory_fills_in_for_the_accepted_clients_only(go, recorded):
    options = {"clients": 4, "partition": "classes", "classes_per_client": 5}
    before = plugin_state(go({"fedcme": {"exchange": "none"}, Recorder: {}}, **options, rounds=1), "fedcme")
    recorded.batches.clear()
    after = plugin_state(
        go({"fedcme": {"exchange": "none"}, Fails: {"round": 1}, Recorder: {}}, **options, rounds=2), "fedcme"
    )
    filled = {c: [] for c in range(10)}
    for client in (0, 2, 3):
        z, y = (np.concatenate(parts) for parts in zip(*recorded.batches[1, client]))
        for c in range(10):
            filled[c].append(z[y == c].mean(axis=0) if (y == c).any() else before["features"][c].numpy())
    for c in range(10):
        np.testing.assert_allclose(after["features"][c], np.mean(filled[c], axis=0), rtol=1e-4, atol=1e-5)


def test_alignment_starts_once_there_are_global_features(go, recorded):
    run = go({"fedcme": {"mu": 0.01}, Recorder: {}}, rounds=2)
    assert "fedcme.alignment" not in records(run)[0]["losses"]
    assert records(run)[1]["losses"]["fedcme.alignment"] > 0
    first = plugin_state(go({"fedcme": {"mu": 0.01}, Recorder: {}}, rounds=1), "fedcme")
    sizes, means = [], []
    for client, part in enumerate(partition_of(run).train):
        values = []
        for z, y in recorded.batches[1, client]:
            distances = [((z[y == c].mean(0) - first["features"][c].numpy()) ** 2).mean() for c in set(y.tolist())]
            values.append(sum(distances))
        sizes.append(len(part))
        means.append(np.mean(values))
    expected = np.average(means, weights=sizes)
    assert records(run)[1]["losses"]["fedcme.alignment"] == pytest.approx(expected, rel=1e-4)


def test_evaluation_part_is_a_fixed_fifth_of_the_own_data(go):
    one, three = go({"fedcme": {}}, rounds=1), go({"fedcme": {}}, rounds=3)
    parts = [evaluation_part(run, k) for run in (one, three) for k in range(3)]
    for k, part in enumerate(partition_of(one).train):
        assert torch.equal(parts[k], parts[3 + k])
        assert len(parts[k]) == round(0.2 * len(part)) == len(set(parts[k].tolist()))
        assert parts[k].max() < len(part)
    assert not torch.equal(parts[0], torch.arange(len(parts[0])))
    other = evaluation_part(go({"fedcme": {}}, rounds=1, seed=1), 0)
    assert not torch.equal(other[:20], parts[0][:20])


def test_the_server_keeps_the_last_vector_of_a_client_that_sits_out(go):
    options = {"clients": 4, "participation": 0.5, "rounds": 3}
    vectors, cohorts = [], []
    for rounds in (1, 2, 3):
        run = go({"fedcme": {}}, **{**options, "rounds": rounds})
        vectors.append(plugin_state(run, "fedcme")["vectors"])
        cohorts.append(records(run)[-1]["cohort"])
    assert cohorts[0] != cohorts[1]
    for number, cohort in enumerate(cohorts):
        for client in range(4):
            if client not in cohort:
                before = vectors[number - 1][client] if number else torch.zeros(10)
                assert torch.equal(vectors[number][client], before.double())
            else:
                assert vectors[number][client].sum() > 0


def test_ledger_counts_what_the_card_says(go):
    run = go({"fedcme": {}}, rounds=2, clients=3)
    classifier, vector, features, held = 4 * (64 * 10 + 10), 8 * 10, 4 * 10 * 64, 10
    sent = [record["bytes"]["by_plugin"]["fedcme"] for record in records(run)]
    assert sent[0] == {"down": 2 * classifier, "up": 3 * (classifier + vector + features + held)}
    assert sent[1] == {"down": 2 * classifier + 3 * (features + held), "up": sent[0]["up"]}
    quiet = go({"fedcme": OFF})
    assert "fedcme" not in records(quiet)[0]["bytes"]["by_plugin"]
    assert not plugin_state(quiet, "fedcme")


# --- counterparts that fail -----------------------------------------------------------------------------------


@pytest.mark.parametrize("matching", ["one-to-one", "many-to-one"])
@pytest.mark.parametrize("trouble", [Fails, Diverges])
def test_a_survivor_keeps_its_own_classifier(go, trouble, matching):
    with warns(RuntimeWarning, "fedcme, round 1", "client 0", "client 1,"):
        run = go({"fedcme": {"mu": 0.0, "matching": matching}, trouble: {}}, **DISJOINT)
    assert plugin_state(run, "fedcme")["left_alone"] == [[0, 0, 1]]
    assert [failure["client"] for failure in records(run)[0]["failures"]] == [1]
    assert records(run)[0]["accepted"] == 1
    assert model_bytes(run) == model_bytes(go({"fedcme": OFF, trouble: {}}, **DISJOINT))


def test_a_client_that_takes_no_step_hands_nothing_over(go):
    options = {"clients": 2, "model": with_batch_norm, "partition": one_sample, "rounds": 1}
    with warns(RuntimeWarning, "fedcme, round 1", "client 1", "client 0,"):
        run = go({"fedcme": {"mu": 0.0}}, **options)
    assert [(failure["client"], failure["kind"]) for failure in records(run)[0]["failures"]] == [(0, "no_steps")]
    assert model_bytes(run) == model_bytes(go({"fedcme": OFF}, **options))


def test_the_others_go_on_exchanging(go, recorded):
    options = {**DISJOINT, "clients": 4, "rounds": 2}
    with pytest.warns(RuntimeWarning):
        run = go({"fedcme": {"mu": 0.0}, Fails: {"client": 1}, Recorder: {}}, **options)
    assert plugin_state(run, "fedcme")["left_alone"] == [[0, 0, 1]]  # 0 and 1, 2 and 3 in the first round
    swapped = dict(recorded.begun)
    recorded.begun.clear()
    go({"fedcme": OFF, Fails: {"client": 1}, Recorder: {}}, **options)
    name = "classifier.weight"
    assert torch.equal(swapped[0, 0, 2][name], recorded.begun[0, 0, 2][name])
    assert torch.equal(swapped[0, 2, 2][name], recorded.begun[0, 3, 2][name])
    assert torch.equal(swapped[0, 3, 2][name], recorded.begun[0, 2, 2][name])
    assert records(run)[1]["accepted"] == 4


def test_failing_after_the_exchange_leaves_the_partner_alone(go):
    run = go({"fedcme": {"mu": 0.0}, Fails: {"epoch": 3}}, **DISJOINT)
    assert records(run)[0]["accepted"] == 1
    assert "notes" not in records(run)[0]
    assert model_bytes(run) != model_bytes(go({"fedcme": OFF, Fails: {"epoch": 3}}, **DISJOINT))


# --- neutral, options, resume ---------------------------------------------------------------------------------


def test_neutral_with_a_moved_split_is_fedavg_under_other_names(go):
    moved = as_unmoved(weights(go({"fedcme": {**OFF, "classifier_layers": 2}}, rounds=3)))
    plain = weights(go({}, rounds=3))
    assert moved.keys() == plain.keys()
    assert all(torch.equal(moved[name], tensor) for name, tensor in plain.items())


def test_too_many_classifier_layers_are_refused_before_anything_is_written(go, tmp_path):
    with raises(ConfigError, "fedcme.classifier_layers", "3", "2"):
        go({"fedcme": {"classifier_layers": 3}})
    assert not list(tmp_path.rglob("config.yaml"))


def test_another_shape_of_the_classifier_is_refused_with_a_moved_split_only(go):
    with raises(PluginConflictError):
        go({"fedcme": {"classifier_layers": 2}, NewClassifier: {}})
    go({"fedcme": {}, NewClassifier: {}}, rounds=1)


def test_a_pause_alone_changes_nothing(go):
    """One client is never matched, so that its pause in mid-round must leave no trace."""
    options = {"clients": 1, "local_epochs": 5}
    assert model_bytes(go({"fedcme": {"mu": 0.0}}, **options)) == model_bytes(go({}, **options))


@pytest.mark.slow
def test_each_option_changes_the_run(go):
    options = {"clients": 8, "rounds": 3, "alpha": 0.2}
    changes = [
        {},
        {"mu": 0.1},
        {"align": False},
        {"exchange": "encoder"},
        {"exchange": "model"},
        {"exchange": "none"},
        {"classifier_layers": 2},
        {"matching": "many-to-one"},
        {"evaluation_fraction": 0.02},
    ]
    found = [model_bytes(go({"fedcme": change}, **options)) for change in changes]
    assert len(set(found)) == len(changes)


# --- beside other plugins -------------------------------------------------------------------------------------


def test_displacement_is_refused_while_something_is_exchanged(go):
    with raises(PluginConflictError, "'displacement'", "'fedcme'"):
        go({"fedcme": {}, Displacement: {}})
    go({"fedcme": {"exchange": "none"}, Displacement: {}}, rounds=1)


def test_a_personal_classifier_is_refused(go):
    with raises(PluginConflictError, "'fedcme'", "'personalclassifier'"):
        go({"fedcme": {}, PersonalClassifier: {}})
    go({"fedcme": {"exchange": "none"}, PersonalClassifier: {}}, rounds=1)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("other", ["fedprox", "moon", "fdcl", "uscc", "fedproc", "fedcd"])
def test_runs_beside(go, other):
    installed(other)
    run = go({"fedcme": {}, other: {}}, rounds=2)
    assert "fedcme.alignment" in records(run)[1]["losses"]
    assert not [record for record in records(run) if record.get("failures")]
    assert model_bytes(run) != model_bytes(go({other: {}}, rounds=2))


def test_fedprox_keeps_its_reference_over_the_exchange(go):
    run = go({"fedcme": {"mu": 0.0}, "fedprox": {"mu": 0.5}}, **DISJOINT)
    assert model_bytes(run) != model_bytes(go({"fedcme": {"mu": 0.0}}, **DISJOINT))
    assert model_bytes(run) != model_bytes(go({"fedprox": {"mu": 0.5}}, **DISJOINT))


def test_runs_in_bf16(go):
    run = go({"fedcme": {"mu": 0.1}}, precision="bf16")
    assert records(run)[1]["losses"]["fedcme.alignment"] > 0
    assert plugin_state(run, "fedcme")["features"].dtype == torch.float32


class LooksAtItsSums(FeatureAlignment):
    @hookimpl
    def local_loss(self, step):
        before = {name: sums.clone() for name, sums in step.client.scratch.items()}
        term = super().local_loss(step)
        assert all(torch.equal(sums, before[name]) for name, sums in step.client.scratch.items())
        return term


def test_the_term_is_pure_and_the_sums_are_made_in_observe(go):
    assert not any(record.get("failures") for record in records(go({LooksAtItsSums: {}})))
