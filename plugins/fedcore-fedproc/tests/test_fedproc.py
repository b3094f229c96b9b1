"""FedProc: two rounds by hand in NumPy and autograd of our own, the equations one by one, and the ablations."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedcore import ConfigError, Plugin, PluginConflictError, RoundFailedError, hookimpl
from fedcore.data import load_dataset, load_partition
from fedcore.hooks import create_plugin
from fedcore_functional import UnitLength
from fedcore_testing import federations, installed, model_bytes, plugin_state, records
from tests.sentences import raises

LOG: list[tuple] = []


class Probe(Plugin):
    """Notes the global model of each round and each client's trained model."""

    @hookimpl
    def begin_round(self, server):
        LOG.append(("round", server.round, {name: tensor.clone() for name, tensor in server.model.items()}))

    @hookimpl
    def accumulate(self, server, update):
        LOG.append(("client", update.client, {name: tensor.clone() for name, tensor in update.model.items()}))


go = federations(samples=300)


@pytest.fixture(autouse=True)
def _fresh_log():
    LOG.clear()


def noted(kind, key):
    return next(model for what, k, model in LOG if (what, k) == (kind, key))


def clients_of(result):
    """Each client's inputs (n, 64) and labels (n,) as float64 and int64 arrays."""
    data = load_dataset("digits")
    parts = load_partition(result.directory / "partition.json", data).train
    return [(data.train.gather(part).flatten(1).double(), data.train.labels[part]) for part in parts]


# --- two rounds by hand -------------------------------------------------------------------------------------


def features_of(w, x):
    """z of the mlp with its projection head."""
    for layer, relu in (("base.fc1", 1), ("base.fc2", 1), ("projection.l1", 1), ("projection.l2", 0)):
        x = x @ w[f"encoder.{layer}.weight"].T + w[f"encoder.{layer}.bias"]
        x = x.clamp(min=0) if relu else x
    return x


def own_prototypes(w, x, y):
    z = features_of(w, x).detach().numpy()
    return {c: z[y.numpy() == c].mean(axis=0) for c in range(10) if (y == c).any()}


def over_holders(sent, previous, labels=None):
    """Means over the clients that hold a class; with each client's ``labels``, over all its samples."""
    result = dict(previous)
    for c in {c for prototypes in sent for c in prototypes}:
        weights = [1 if labels is None else int((labels[i] == c).sum()) for i, p in enumerate(sent) if c in p]
        result[c] = np.average([p[c] for p in sent if c in p], axis=0, weights=weights)
    return result


def contrast(z, y, prototypes):
    """L_gpc (Eq. 4), the mean over samples; c runs over the known classes."""
    classes = sorted(prototypes)
    c = torch.tensor(np.stack([prototypes[k] for k in classes]))
    psi = torch.exp(z @ c.T / (z.norm(dim=1)[:, None] * c.norm(dim=1)))
    total = 0.0
    for sample, label in zip(psi, y.tolist(), strict=True):
        if label in prototypes:
            total = total - torch.log(sample[classes.index(label)] / sample.sum())
    return total / len(y)


def gradient_step(w, x, y, prototypes, alpha, lr):
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in w.items()}
    z = features_of(leaves, x)
    loss = alpha * contrast(z, y, prototypes) if alpha else 0.0
    if alpha < 1:
        logits = z @ leaves["classifier.weight"].T + leaves["classifier.bias"]
        loss = loss + (1 - alpha) * F.cross_entropy(logits, y)
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {name: (w[name] if g is None else w[name] - lr * g) for name, g in zip(leaves, gradients, strict=True)}


@pytest.mark.parametrize("weights", ["clients", "samples"])
@pytest.mark.parametrize("first_round", ["contrast", "task"])
def test_two_rounds_by_hand(go, first_round, weights):
    """A cohort of two, classes missing on clients and unknown to the cohort, one full batch per client."""
    lr = 0.5
    result = go(
        {"fedproc": {"first_round": first_round, "prototype_weights": weights}, Probe: {}},
        clients=4, participation=0.5, partition="classes", classes_per_client=3, batch_size=2000, lr=lr,
        momentum=0.0, weight_decay=0.0,
    )  # fmt: skip
    data = clients_of(result)
    cohorts = [record["cohort"] for record in records(result) if "cohort" in record]
    w = {name: tensor.double() for name, tensor in noted("round", 0).items()}

    def collect(models, cohort, previous):
        labels = [data[k][1] for k in cohort] if weights == "samples" else None
        return over_holders([own_prototypes(models[k], *data[k]) for k in cohort], previous, labels)

    prototypes = {}
    if first_round == "contrast":
        prototypes = collect(dict.fromkeys(cohorts[0], w), cohorts[0], {})
        assert len(prototypes) < 10  # some class is not known
    held = [{c for k in cohort for c in data[k][1].tolist()} for cohort in cohorts]
    assert held[0] - held[1]  # some prototype is kept
    assert held[1] - held[0]  # some class first gets one in round 1
    for t, cohort in enumerate(cohorts):
        alpha = 1 - t / 2 if prototypes else 0
        local = {k: gradient_step(w, *data[k], prototypes, alpha, lr) for k in cohort}
        sizes = {k: len(data[k][1]) for k in cohort}
        prototypes = collect(local, cohort, prototypes)
        w = {name: sum(sizes[k] * local[k][name] for k in cohort) / sum(sizes.values()) for name in w}
    for name, tensor in result.model.state_dict().items():
        np.testing.assert_allclose(tensor.numpy(), w[name].numpy(), rtol=1e-4, atol=2e-6, err_msg=name)
    state = plugin_state(result, "fedproc")
    assert state["known"].nonzero().flatten().tolist() == sorted(prototypes)
    for c, prototype in prototypes.items():
        np.testing.assert_allclose(state["prototypes"][c].numpy(), prototype, rtol=1e-3, atol=2e-5)
    assert set(state) == {"prototypes", "known"}


def test_prototypes_are_those_of_the_trained_models_in_eval_mode_over_all_samples(go):
    result = go({"fedproc": {"prototype_weights": "clients"}, Probe: {}}, rounds=1, alpha=0.1)
    trained = {k: {n: t.double() for n, t in noted("client", k).items()} for k in range(3)}
    expected = over_holders([own_prototypes(trained[k], *d) for k, d in enumerate(clients_of(result))], {})
    state = plugin_state(result, "fedproc")
    for c, prototype in expected.items():
        np.testing.assert_allclose(state["prototypes"][c].numpy(), prototype, rtol=1e-4, atol=1e-5)


# --- the loss -----------------------------------------------------------------------------------------------


def step_of(z, y, prototypes, known, *, round=0, rounds=4):
    received = {"prototypes": prototypes, "known": known}
    client = SimpleNamespace(received=received, scratch={}, round=round, rounds=rounds)
    return SimpleNamespace(features=z, y=y, client=client, round=round, rounds=rounds)


def local_loss_of(options, step):
    """The term as a client computes it: what a round makes ready first, then the batch."""
    plugin = create_plugin("fedproc", options)
    plugin.members[0].begin_local(step.client)
    return plugin.local_loss(step)


def random_step(**where):
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(6, 5, generator=draw, dtype=torch.float64, requires_grad=True)
    prototypes = torch.randn(4, 5, generator=draw, dtype=torch.float64)
    return step_of(z, torch.tensor([0, 1, 1, 2, 3, 0]), prototypes, torch.tensor([True, True, False, True]), **where)


@pytest.mark.parametrize(
    ("options", "round", "alpha"),
    [
        ({}, 0, 1.0), ({}, 1, 0.75), ({}, 3, 0.25), ({"alpha": 0.5}, 0, 0.5), ({"two_stage": True}, 1, 1.0),
        ({"two_stage": True}, 2, 0.0),
        ({"schedule_rounds": 100}, 3, 0.97), ({"schedule_rounds": 4}, 3, 0.25), ({"schedule_rounds": 2}, 1, 0.5),
    ],
)  # fmt: skip
def test_the_loss_is_alpha_times_eq_4_and_scales_the_task(options, round, alpha):
    step = random_step(round=round)
    loss = local_loss_of(options, step)
    known = {c: step.client.received["prototypes"][c].numpy() for c in (0, 1, 3)}
    if alpha:
        assert loss.value.item() == pytest.approx(float(contrast(step.features.detach(), step.y, known)), rel=1e-12)
    else:
        assert loss.value is None
    assert (loss.weight, loss.task_scale) == (alpha, 1 - alpha)


def test_a_sample_whose_class_is_not_known_contributes_nothing():
    step = random_step()
    (gradient,) = torch.autograd.grad(local_loss_of({}, step).value, step.features)
    assert gradient[3].abs().max() == 0
    assert (gradient[[0, 1, 2, 4, 5]].abs().amax(dim=1) > 0).all()


def test_a_step_against_the_gradient_turns_a_sample_towards_its_prototype():
    step = random_step()
    prototypes = step.client.received["prototypes"]
    (gradient,) = torch.autograd.grad(local_loss_of({}, step).value, step.features)
    before = F.cosine_similarity(step.features, prototypes[step.y])
    after = F.cosine_similarity(step.features - 0.1 * gradient, prototypes[step.y])
    others = step.y != 2
    assert (after[others] > before[others]).all()


@pytest.mark.parametrize("options", [{}, {"schedule_rounds": 100}, {"alpha": 0.3}])
def test_without_prototypes_the_task_is_all_there_is(options):
    client = SimpleNamespace(received={}, scratch={}, round=0, rounds=4)
    assert local_loss_of(options, SimpleNamespace(client=client, round=0, rounds=4)) is None


# --- rounds -------------------------------------------------------------------------------------------------


def test_round_0_is_pure_contrast(go):
    go({"fedproc": {"first_round": "contrast"}, Probe: {}})
    first, second = noted("round", 0), noted("round", 1)
    for name in first:
        assert torch.equal(first[name], second[name]) == name.startswith("classifier.")


@pytest.mark.parametrize("weights", ["clients", "samples"])
def test_a_first_round_of_the_task_is_fedavgs_to_the_bit_and_collects_prototypes(go, weights):
    """Cross-entropy alone, no exchange of its own before it; the next round has the prototypes of what was trained."""
    first = {"first_round": "task", "prototype_weights": weights}
    alone = go({"fedproc": first}, rounds=1)
    assert model_bytes(alone) == model_bytes(go({}, projection=True, rounds=1))
    assert plugin_state(alone, "fedproc")["known"].all()
    result = go({"fedproc": first})
    assert [sorted(record["losses"]) for record in records(result)] == [["task"], ["fedproc.contrast", "task"]]
    sizes = [record["bytes"]["by_plugin"]["fedproc"] for record in records(result)]
    up = 3 * 10 * (4 * 256 + (1 if weights == "clients" else 8))  # three clients
    assert sizes == [{"down": 0, "up": up}, {"down": 3 * 10 * (4 * 256 + 1), "up": up}]


def test_a_contrast_in_the_first_round_asks_first(go):
    result = go({"fedproc": {"first_round": "contrast", "prototype_weights": "samples"}}, rounds=1)
    (record,) = records(result)
    assert sorted(record["losses"]) == ["fedproc.contrast"]
    assert record["bytes"]["by_plugin"]["fedproc"] == {"down": 30 * (4 * 256 + 1), "up": 2 * 30 * (4 * 256 + 8)}


def test_after_the_schedules_rounds_there_is_cross_entropy_alone(go):
    """The authors' code: round/100 weighs cross-entropy, and from round 100 on there is nothing else."""
    result = go({"fedproc": {"schedule_rounds": 2, "first_round": "contrast"}}, rounds=4)
    losses = [set(record["losses"]) for record in records(result)]
    assert losses == [{"fedproc.contrast"}, {"fedproc.contrast", "task"}, {"task"}, {"task"}]
    assert [bool(record["bytes"]["by_plugin"].get("fedproc")) for record in records(result)] == [True] * 2 + [False] * 2
    same = go({"fedproc": {"schedule_rounds": 4, "first_round": "contrast"}}, rounds=4)
    assert model_bytes(same) == model_bytes(go({"fedproc": {"first_round": "contrast"}}, rounds=4))


def test_features_are_of_unit_length_where_they_are_normalized(go):
    result = go({"fedproc": {"normalize": True}})
    plain = go({"fedproc": {}})
    assert result.model.state_dict().keys() == plain.model.state_dict().keys()
    x = load_dataset("digits").test.gather(torch.arange(50))
    for model, unit in ((result.model, True), (plain.model, False)):
        z = model.eval()(x).features
        assert torch.allclose(z.norm(dim=1), torch.ones(50)) == unit
        torch.testing.assert_close(model(x).logits, model.classifier(z))
    assert (
        plugin_state(result, "fedproc")["prototypes"].norm(dim=1) < 1
    ).all()  # means of unit vectors, as the authors' code has them


def test_the_baseline_with_normalized_features_is_alpha_0(go):
    """The authors' code normalizes for every method: this is FedAvg as it runs there."""
    result = go({"fedproc": {"alpha": 0.0, "normalize": True}})
    assert all(set(record["losses"]) == {"task"} for record in records(result))
    assert "fedproc" not in records(result)[0]["bytes"]["by_plugin"]
    assert model_bytes(result) != model_bytes(go({}, projection=True))


def test_a_projection_of_zero_stays_zero_and_has_a_finite_gradient():
    z = torch.zeros(2, 5, requires_grad=True)
    UnitLength()(z).sum().backward()
    assert torch.isfinite(z.grad).all()


def test_two_stages(go):
    result = go({"fedproc": {"two_stage": True, "first_round": "contrast"}, Probe: {}}, rounds=3)
    models = [noted("round", t) for t in range(3)] + [result.model.state_dict()]
    for t, trained in enumerate(("encoder.", "encoder.", "classifier.")):
        for name in models[0]:
            assert torch.equal(models[t][name], models[t + 1][name]) != name.startswith(trained)
    assert [set(record["losses"]) for record in records(result)] == [{"fedproc.contrast"}] * 2 + [{"task"}]
    sent = [record["bytes"]["by_plugin"].get("fedproc", {}) for record in records(result)]
    assert sent[0]["up"] > 0
    assert not sent[2]


RANDOM = {"first_round": "contrast", "init": "random"}


def server_of(**given):
    base = {"round": 0, "rounds": 4, "state": {}, "feature_dim": 5, "num_classes": 4}
    return SimpleNamespace(**{**base, "generator": lambda purpose: torch.Generator().manual_seed(8), **given})


def test_random_prototypes_ask_nobody_and_are_fixed():
    one, again = server_of(), server_of()
    for server in (one, again):
        create_plugin("fedproc", RANDOM).members[0].begin_round(server)
    assert torch.equal(one.state["prototypes"], again.state["prototypes"])
    assert torch.allclose(one.state["prototypes"].norm(dim=1), torch.ones(4))
    assert one.state["known"].all()


def test_prototypes_are_initialised_once():
    first = torch.ones(4, 5)
    server = server_of(round=1, state={"prototypes": first})  # has nobody to ask
    create_plugin("fedproc", {"first_round": "contrast"}).members[0].begin_round(server)
    assert server.state == {"prototypes": first}


def test_a_later_round_initialises_them_where_the_ones_before_came_to_nothing():
    server = server_of(round=2)
    create_plugin("fedproc", RANDOM).members[0].begin_round(server)
    assert server.state["known"].all()


def test_a_cohort_that_does_not_answer_stops_the_round():
    with raises(RoundFailedError):
        create_plugin("fedproc", {"first_round": "contrast"}).members[0].begin_round(
            server_of(ask=lambda clients, question, **how: iter(()))
        )


# --- options and combinations -------------------------------------------------------------------------------


def test_alpha_0_is_fedavg_with_the_projection_head(go):
    assert model_bytes(go({"fedproc": {"alpha": 0.0}})) == model_bytes(go({}, projection=True))


@pytest.mark.slow
def test_every_option_changes_the_trajectory(go):
    first = {"first_round": "contrast", "prototype_weights": "clients"}
    choices = [
        first, {**first, "alpha": 0.5}, {**first, "two_stage": True}, {**first, "init": "random"},
        {**first, "projection": False}, {**first, "first_round": "task"}, {**first, "prototype_weights": "samples"},
        {**first, "normalize": True}, {**first, "schedule_rounds": 100},
    ]  # fmt: skip
    assert len({model_bytes(go({"fedproc": options})) for options in choices}) == len(choices)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"two_stage": True, "alpha": 0.5}, ()),
        ({"schedule_rounds": 100, "alpha": 0.5}, ("two_stage",)),
        ({"schedule_rounds": 100, "two_stage": True}, ("two_stage",)),
        ({"normalize": True, "projection": False}, ("projection=false",)),
        (
            {"first_round": "task", "init": "random"},
            ("init=random", "first_round=contrast"),
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, named):
    with raises(ConfigError, *named):
        create_plugin("fedproc", options)


@pytest.mark.parametrize("other", ["fedprox", "moon"])
def test_runs_beside(go, other):
    assert model_bytes(go({"fedproc": {}, installed(other): {}})) != model_bytes(go({"fedproc": {}}))


@pytest.mark.parametrize("other", ["fedcd", "fedeccr"])
def test_is_refused_beside_what_scales_the_task_too(go, other):
    installed(other)
    with raises(PluginConflictError, "'fedproc'", other):
        go({"fedproc": {}, other: {}})


@pytest.mark.slow
def test_learns_digits(go):
    result = go({"fedproc": {}}, rounds=4, local_epochs=2, batch_size=16, samples=None)
    assert result.metrics["global"]["accuracy"] > 0.6
