"""FDCL in whole runs on digits."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from fedcore import ConfigError, Plugin, PluginConflictError, hookimpl
from fedcore.client import evaluate
from fedcore.data import load_dataset
from fedcore.models import build_model
from fedcore_fdcl import encoder_loss
from fedcore_testing import (
    PersonalClassifier,
    PersonalModel,
    federations,
    installed,
    model_bytes,
    partition_of,
    records,
    weights,
    with_batch_norm,
)
from tests.sentences import raises, warns

go = federations(batch_size=100)


class Recorder(Plugin):
    """Keeps what frozen models and outputs each batch saw, and each client's trained weights."""

    reads = ("global", "previous")
    batches: list = []
    trained: dict = {}

    @hookimpl
    def local_loss(self, step):
        previous = step.frozen("previous")
        outputs = [step.features, step.logits, *step.frozen("global"), *(previous or ())]
        self.batches.append((step.round, step.client.id, [tensor.detach().double().clone() for tensor in outputs]))

    @hookimpl
    def end_local(self, client):
        self.trained[client.round, client.id] = copy.deepcopy(client.model).eval()


class Batches(Plugin):
    """Notes each client's batches, by round, client and local epoch."""

    taken: dict = {}

    @hookimpl
    def local_loss(self, step):
        self.taken.setdefault((step.round, step.client.id, step.epoch), []).append(step.indices.clone())


class Own(Plugin):
    """Another method with a personal model."""

    @hookimpl
    def personal_model(self, client):
        return None


class NewClassifier(Plugin):
    """A method that declares a classifier of another shape."""

    @hookimpl
    def configure_model(self, task):
        task.reshape_classifier(self.name)


@pytest.fixture
def recorded():
    Recorder.batches.clear()
    Recorder.trained.clear()
    return Recorder


# --- the whole method by hand ---------------------------------------------------------------------------------

LAYERS = ("encoder.base.fc1", "encoder.base.fc2", "classifier")
HAND = {
    "clients": 2,
    "rounds": 3,
    "local_epochs": 3,
    "batch_size": 400,
    "lr": 0.1,
    "lr_decay": 0.9,
    "momentum": 0.9,
    "weight_decay": 0.01,
    "alpha": 0.3,
}


def analytic_federation(
    run,
    batches,
    *,
    mu,
    tau=0.5,
    encoder=1.0,
    classifier=1.0,
    p_is="participation",
    P_c=lambda logits: logits.exp() / logits.exp().sum(1, keepdim=True),
    config=HAND,
):
    """FDCL in float64 on the run's batches, from the paper's text; +1 is its sign of a term, -1 the opposite."""
    dataset = load_dataset("digits", None)
    partition = partition_of(run)
    start = build_model("mlp", num_classes=10, input_shape=(1, 8, 8), seed=0, projection=False)[0].state_dict()
    w = {name: tensor.double() for name, tensor in start.items()}
    previous = {}

    def forward(weights, x):
        h = x.flatten(1)
        for layer in LAYERS[:2]:
            h = (h @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]).clamp(min=0)
        return h, h @ weights["classifier.weight"].T + weights["classifier.bias"]

    def s(a, b):
        return torch.exp((a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1)) / tau)

    for t in range(config["rounds"]):
        trained = {}
        for k, indices in enumerate(partition.train):
            own_x, own_y = dataset.train.gather(indices).double(), dataset.train.labels[indices]
            local = {name: tensor.clone().requires_grad_() for name, tensor in w.items()}
            speed = {name: torch.zeros_like(tensor) for name, tensor in w.items()}
            for e in range(config["local_epochs"]):
                p = previous.get(k)
                if p_is == "epoch":  # as epoch e - 1 left it; the first epoch has none
                    p = {name: tensor.detach().clone() for name, tensor in local.items()} if e else None
                for batch in batches[t, k, e]:
                    x, y = own_x[batch], own_y[batch]
                    pe, pc = forward(local, x)
                    loss = F.cross_entropy(pc, y)
                    if p:
                        (ge, gc), (pre_e, pre_c) = forward(w, x), forward(p, x)
                        l_e = -torch.log(s(pe, ge) / (s(pe, ge) + s(pe, pre_e))).mean()
                        pc, gc, pre_c = P_c(pc), P_c(gc), P_c(pre_c)
                        l_c = -torch.log(s(pc, pre_c) / (s(pc, gc) + s(pc, pre_c))).mean()
                        loss = loss + mu * (encoder * l_e + classifier * l_c)
                    gradients = torch.autograd.grad(loss, list(local.values()))
                    with torch.no_grad():
                        for (name, tensor), g in zip(local.items(), gradients):
                            speed[name] = config["momentum"] * speed[name] + g + config["weight_decay"] * tensor
                            tensor -= config["lr"] * config["lr_decay"] ** t * speed[name]
            trained[k] = {name: tensor.detach() for name, tensor in local.items()}
        n = [len(indices) for indices in partition.train]
        w = {name: sum(n[k] * trained[k][name] for k in trained) / sum(n) for name in w}
        previous = trained
    return w


def distance(weights, other):
    return max(float((weights[name].double() - other[name]).abs().max()) for name in other)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("options", "scales"),
    [
        ({"mu": 1.0}, {}),
        ({"mu": 2.0, "temperature": 0.2, "classifier_term": False}, {"tau": 0.2, "classifier": 0.0}),
        ({"mu": 2.0, "encoder_term": False}, {"encoder": 0.0}),
        ({"mu": 0.5, "previous": "epoch"}, {"p_is": "epoch"}),
        ({"mu": 1.0, "outputs": "logits"}, {"P_c": lambda logits: logits}),
    ],
)
def test_a_run_is_the_paper_computed_by_hand(go, options, scales):
    Batches.taken.clear()
    run = go({"fdcl": options, Batches: {}}, **HAND)
    by_hand = partial(analytic_federation, run, Batches.taken, mu=options["mu"])
    assert distance(weights(run), by_hand(**scales)) < 1e-5
    for term in ("encoder", "classifier"):
        wrong = {**scales, term: -1.0 if scales.get(term, 1.0) else 1.0}  # the other sign, or the term that is off
        assert distance(weights(run), by_hand(**wrong)) > 1e-3
    other = {**scales, "p_is": "participation" if "p_is" in scales else "epoch"}
    assert distance(weights(run), by_hand(**other)) > 1e-3


class EndOfEpoch(Plugin):
    """Computes the features of p: weights and statistics as the last batch of the epoch before left them."""

    expected: list = []

    @hookimpl
    def local_loss(self, step):
        scratch = step.client.scratch
        if step.epoch and scratch["epoch"] != step.epoch:
            scratch["p"] = step.client.network(scratch["statistics"])
        scratch["epoch"] = step.epoch
        if step.epoch:
            self.expected.append(scratch["p"](step.x).features)

    @hookimpl
    def observe(self, step):
        step.client.scratch["statistics"] = {name: buffer.clone() for name, buffer in step.model.named_buffers()}


def test_the_previous_epochs_model_has_the_statistics_of_that_epoch(go, monkeypatch):
    """The first batch of an epoch had renewed them: with mu 1 the weights of six rounds were 1.5 % off."""
    EndOfEpoch.expected.clear()
    seen = []

    def noted(local, received, previous, **options):
        seen.append(previous)
        return encoder_loss(local, received, previous, **options)

    monkeypatch.setattr("fedcore_fdcl.plugin.encoder_loss", noted)
    go({"fdcl": {"previous": "epoch"}, EndOfEpoch: {}}, model=with_batch_norm, rounds=1, local_epochs=3)
    assert len(seen) == len(EndOfEpoch.expected) > 0
    assert all(map(torch.equal, seen, EndOfEpoch.expected))


def test_one_local_epoch_has_no_previous_one_and_is_fedavg(go):
    run = go({"fdcl": {"mu": 5.0, "previous": "epoch"}}, rounds=3, local_epochs=1)
    assert model_bytes(run) == model_bytes(go({}, rounds=3, local_epochs=1))


def test_recorded_losses_are_those_of_the_frozen_models(go, recorded):
    run = go({"fdcl": {"mu": 0.5, "temperature": 0.3}, Recorder: {}}, clients=3, participation=2 / 3, rounds=3)
    joined: set[int] = set()
    for number, record in enumerate(records(run)):
        means = {}
        for client in record["cohort"]:
            batches = [outputs for t, k, outputs in recorded.batches if (t, k) == (number, client)]
            assert all(len(outputs) == (6 if client in joined else 4) for outputs in batches)
            if client in joined:
                values = [
                    [
                        F.softplus((F.cosine_similarity(far, z) - F.cosine_similarity(near, z)) / 0.3).mean()
                        for near, far, z in ((ge, pe, e), (pc.softmax(1), gc.softmax(1), c.softmax(1)))
                    ]
                    for e, c, ge, gc, pe, pc in batches
                ]
                means[client] = torch.tensor(values).mean(dim=0)
        names = {"fdcl.encoder", "fdcl.classifier"}
        if not means:
            assert not names & set(record["losses"])
        else:
            sizes = {k: len(part) for k, part in enumerate(partition_of(run).train)}
            total = sum(sizes[k] for k in means)
            expected = sum(sizes[k] * means[k] for k in means) / total
            assert record["losses"]["fdcl.encoder"] == pytest.approx(float(expected[0]), rel=1e-4)
            assert record["losses"]["fdcl.classifier"] == pytest.approx(float(expected[1]), rel=1e-4)
        joined |= set(record["cohort"])
    firsts = {min(t for t, k, _ in recorded.batches if k == client) for client in joined}
    assert len(firsts) > 1  # somebody joined later, in a round in which others had both terms


# --- neutral and options --------------------------------------------------------------------------------------


def test_without_both_terms_it_is_fedavg_bit_by_bit(go):
    plain = go({}, rounds=3)
    assert model_bytes(go({"fdcl": {"encoder_term": False, "classifier_term": False}}, rounds=3)) == model_bytes(plain)
    assert model_bytes(go({"fdcl": {}}, rounds=3)) != model_bytes(plain)


def test_the_first_round_is_fedavg(go):
    assert model_bytes(go({"fdcl": {"mu": 5.0}}, rounds=1)) == model_bytes(go({}, rounds=1))


def test_mu_0_with_a_moved_split_is_fedavg_under_other_names(go):
    plain, moved = weights(go({})), weights(go({"fdcl": {"mu": 0.0, "head_layers": 2}}))
    assert list(moved) != list(plain)
    renamed = {"encoder.base.fc2": "classifier.0", "classifier": "classifier.2"}
    for name, tensor in plain.items():
        layer, _, kind = name.rpartition(".")
        assert torch.equal(moved[f"{renamed.get(layer, layer)}.{kind}"], tensor)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"mu": 0.3},
        {"temperature": 0.1},
        {"encoder_term": False},
        {"classifier_term": False},
        {"head_layers": 2},
        {"previous": "epoch"},
        {"outputs": "logits"},
    ],
)
def test_each_option_changes_the_run(go, change):
    base, changed = go({"fdcl": {}}, local_epochs=2), go({"fdcl": change}, local_epochs=2)
    pairs = zip(weights(base).values(), weights(changed).values())
    assert any(not torch.equal(a, b) for a, b in pairs)


@pytest.mark.slow
def test_the_terms_pull_outputs_where_the_paper_says(go, recorded):
    """With a large mu features end nearer the global model's, logits nearer the previous model's, than without."""

    def margins(options):
        recorded.batches.clear()
        go({"fdcl": options, Recorder: {}}, rounds=2, local_epochs=4, lr=0.02, alpha=0.1)
        last = [outputs for t, _, outputs in recorded.batches if t == 1][-6:]
        e, c, ge, gc, pe, pc = (torch.cat(column) for column in zip(*last))
        return (
            float((F.cosine_similarity(e, ge) - F.cosine_similarity(e, pe)).mean()),
            float((F.cosine_similarity(c, pc) - F.cosine_similarity(c, gc)).mean()),
        )

    plain = margins({"mu": 0.0})
    assert margins({"mu": 3.0, "classifier_term": False})[0] > plain[0] + 0.005
    assert margins({"mu": 3.0, "encoder_term": False})[1] > plain[1] + 0.005


# --- evaluation -----------------------------------------------------------------------------------------------


def test_personal_and_global_are_both_reported(go, recorded):
    options = {"clients": 3, "participation": 1 / 3, "rounds": 2, "client_test_fraction": 0.3, "seed": 1}
    run = go({"fdcl": {"mu": 1.0}, Recorder: {}}, **options)
    dataset, partition = load_dataset("digits", None), partition_of(run)
    last = {client: model for (_, client), model in sorted(recorded.trained.items(), key=lambda item: item[0][0])}
    assert 0 < len(last) < 3
    correct = total = 0
    for client, held_out in enumerate(partition.test):
        own = last.get(client, run.model)
        counts = evaluate(own, dataset.train, 10, torch.device("cpu"), indices=held_out)
        correct, total = correct + int(counts.correct.sum()), total + int(counts.total.sum())
    personal = run.metrics["personal"]
    assert personal["accuracy"] == pytest.approx(correct / total, abs=1e-12)
    assert personal["untrained"] == 3 - len(last)
    counts = evaluate(run.model, dataset.test, 10, torch.device("cpu"))
    assert run.metrics["global"]["accuracy"] == int(counts.correct.sum()) / 360
    assert {"global_local", "personal_global"} <= set(run.metrics)
    assert run.metrics["global_local"]["accuracy"] != personal["accuracy"]


# --- beside other plugins -------------------------------------------------------------------------------------


def test_another_personal_model_is_refused(go):
    with raises(PluginConflictError, "'fdcl'", "'own'", "personal_mod"):
        go({"fdcl": {}, Own: {}})


def test_another_shape_of_the_classifier_is_refused_with_a_moved_split_only(go):
    with raises(PluginConflictError):
        go({"fdcl": {"head_layers": 2}, NewClassifier: {}})
    go({"fdcl": {}, NewClassifier: {}}, rounds=1)


def test_too_many_head_layers_are_refused_before_anything_is_written(go, tmp_path):
    with raises(ConfigError, "fdcl.head_layers", "7"):
        go({"fdcl": {"head_layers": 7}})
    assert not list(tmp_path.rglob("config.yaml"))


def test_a_note_says_that_the_terms_are_constant_where_the_model_stays_on_the_clients(go):
    with warns(RuntimeWarning, "fdcl", "'personalmodel'"):
        losses = records(go({"fdcl": {}, PersonalModel: {}}, client_test_fraction=0.2))[1]["losses"]
    assert losses["fdcl.encoder"] == losses["fdcl.classifier"] == pytest.approx(math.log(2))


def test_a_note_says_that_the_previous_epochs_model_has_received_layers(go):
    installed("fedcme")
    with warns(RuntimeWarning, "fdcl", "'fedcme'"):
        go({"fdcl": {"previous": "epoch"}, "fedcme": {}}, rounds=1, local_epochs=2)


def test_runs_beside_a_personal_classifier(go):
    run = go({"fdcl": {"mu": 1.0}, PersonalClassifier: {}}, client_test_fraction=0.2)
    assert "fdcl.classifier" in records(run)[1]["losses"]
    assert run.metrics["global"] is None
    assert run.metrics["personal"]["accuracy"] > 0.1


@pytest.mark.parametrize(
    ("head_layers", "other"),
    [
        pytest.param(layers, other, marks=() if (layers, other) == (1, "moon") else pytest.mark.slow)
        for layers in (1, 2)
        for other in ("fedprox", "moon", "uscc", "fedproc", "fedcd")
    ],
)
def test_runs_beside(go, other, head_layers):
    installed(other)
    plugins = {other: {}, "fdcl": {"head_layers": head_layers}}
    if other == "fedcd" and head_layers == 2:
        with raises(ConfigError, 2, "FineClassifier", "fdcl.head_layers=1"):
            go(plugins)
        return
    run = go(plugins)
    assert {"fdcl.encoder", "fdcl.classifier"} <= set(records(run)[1]["losses"])


def test_runs_in_bf16(go):
    run = go({"fdcl": {"mu": 1.0}}, precision="bf16")
    assert records(run)[1]["losses"]["fdcl.encoder"] > 0
