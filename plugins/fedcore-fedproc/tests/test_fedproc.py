"""FedProc: two rounds by hand in NumPy and autograd of our own, the equations one by one, and the ablations."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from fedcore import Plugin, hookimpl
from fedcore.data import load_dataset, load_partition
from fedcore.errors import ConfigError, PluginConflictError, RoundFailedError
from fedcore.plugins import create_plugin
from fedcore.testing import committed, federate, installed, model_bytes, records
from fedcore_fedproc import FedProcOptions

LOG: list[tuple] = []


class Probe(Plugin):
    """Notes the global model of each round and each client's trained model."""

    @hookimpl
    def begin_round(self, server):
        LOG.append(("round", server.round, {name: tensor.clone() for name, tensor in server.model.items()}))

    @hookimpl
    def accumulate(self, server, update):
        LOG.append(("client", update.client, {name: tensor.clone() for name, tensor in update.model.items()}))


@pytest.fixture
def go(tmp_path):
    LOG.clear()
    return lambda plugins, **options: federate(tmp_path, *plugins.items(), **options)


def state_of(result):
    return committed(result).plugins["fedproc"]


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


def over_holders(sent, previous):
    held = {c for prototypes in sent for c in prototypes}
    return {**previous, **{c: np.mean([p[c] for p in sent if c in p], axis=0) for c in held}}


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
    loss = alpha * contrast(z, y, prototypes)
    if alpha < 1:
        logits = z @ leaves["classifier.weight"].T + leaves["classifier.bias"]
        loss = loss + (1 - alpha) * F.cross_entropy(logits, y)
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {name: (w[name] if g is None else w[name] - lr * g) for name, g in zip(leaves, gradients, strict=True)}


def test_two_rounds_by_hand(go):
    """A cohort of two, classes missing on clients and unknown to the cohort, one full batch per client."""
    lr = 0.5
    result = go(
        {"fedproc": {}, Probe: {}},
        clients=4, participation=0.5, partition="classes", classes_per_client=3, batch_size=2000, lr=lr,
        momentum=0.0, weight_decay=0.0,
    )  # fmt: skip
    data = clients_of(result)
    cohorts = [record["cohort"] for record in records(result) if "cohort" in record]
    w = {name: tensor.double() for name, tensor in noted("round", 0).items()}
    prototypes = over_holders([own_prototypes(w, *data[k]) for k in cohorts[0]], {})
    assert len(prototypes) < 10  # some class is not known
    held = [{c for k in cohort for c in data[k][1].tolist()} for cohort in cohorts]
    assert held[0] - held[1]  # some prototype is kept
    assert held[1] - held[0]  # some class first gets one in round 1
    for t, cohort in enumerate(cohorts):
        local = {k: gradient_step(w, *data[k], prototypes, 1 - t / 2, lr) for k in cohort}
        sizes = {k: len(data[k][1]) for k in cohort}
        prototypes = over_holders([own_prototypes(local[k], *data[k]) for k in cohort], prototypes)
        w = {name: sum(sizes[k] * local[k][name] for k in cohort) / sum(sizes.values()) for name in w}
    for name, tensor in result.model.state_dict().items():
        np.testing.assert_allclose(tensor.numpy(), w[name].numpy(), rtol=1e-4, atol=2e-6, err_msg=name)
    state = state_of(result)
    assert state["known"].nonzero().flatten().tolist() == sorted(prototypes)
    for c, prototype in prototypes.items():
        np.testing.assert_allclose(state["prototypes"][c].numpy(), prototype, rtol=1e-3, atol=2e-5)
    assert set(state) == {"prototypes", "known"}


def test_prototypes_are_those_of_the_trained_models_in_eval_mode_over_all_samples(go):
    result = go({"fedproc": {}, Probe: {}}, rounds=1, alpha=0.1)
    trained = {k: {n: t.double() for n, t in noted("client", k).items()} for k in range(3)}
    expected = over_holders([own_prototypes(trained[k], *d) for k, d in enumerate(clients_of(result))], {})
    state = state_of(result)
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
    plugin.begin_local(step.client)
    return plugin.local_loss(step)


def random_step(**where):
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(6, 5, generator=draw, dtype=torch.float64, requires_grad=True)
    prototypes = torch.randn(4, 5, generator=draw, dtype=torch.float64)
    return step_of(z, torch.tensor([0, 1, 1, 2, 3, 0]), prototypes, torch.tensor([True, True, False, True]), **where)


@pytest.mark.parametrize(
    ("options", "round", "alpha"),
    [({}, 0, 1.0), ({}, 1, 0.75), ({}, 3, 0.25), ({"alpha": 0.5}, 0, 0.5), ({"two_stage": True}, 1, 1.0)],
)
def test_the_loss_is_alpha_times_eq_4_and_scales_the_task(options, round, alpha):
    step = random_step(round=round)
    loss = local_loss_of(options, step)
    known = {c: step.client.received["prototypes"][c].numpy() for c in (0, 1, 3)}
    assert loss.value.item() == pytest.approx(float(contrast(step.features.detach(), step.y, known)), rel=1e-12)
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


def test_the_loss_never_reads_the_device():
    with FakeTensorMode():
        step = step_of(
            torch.empty(6, 5, requires_grad=True), torch.empty(6, dtype=torch.int64), torch.empty(4, 5),
            torch.empty(4, dtype=torch.bool),
        )  # fmt: skip
        assert local_loss_of({}, step).value.shape == ()


# --- rounds -------------------------------------------------------------------------------------------------


def test_round_0_is_pure_contrast(go):
    go({"fedproc": {}, Probe: {}})
    first, second = noted("round", 0), noted("round", 1)
    for name in first:
        assert torch.equal(first[name], second[name]) == name.startswith("classifier.")


def test_two_stages(go):
    result = go({"fedproc": {"two_stage": True}, Probe: {}}, rounds=3)
    models = [noted("round", t) for t in range(3)] + [result.model.state_dict()]
    for t, trained in enumerate(("encoder.", "encoder.", "classifier.")):
        for name in models[0]:
            assert torch.equal(models[t][name], models[t + 1][name]) != name.startswith(trained)
    assert [set(record["losses"]) for record in records(result)] == [{"fedproc.contrast"}] * 2 + [{"task"}]
    sent = [record["bytes"]["by_plugin"].get("fedproc", {}) for record in records(result)]
    assert sent[0]["up"] > 0
    assert not sent[2]


def server_of(**given):
    base = {"round": 0, "rounds": 4, "state": {}, "feature_dim": 5, "num_classes": 4}
    return SimpleNamespace(**{**base, "generator": lambda purpose: torch.Generator().manual_seed(8), **given})


def test_random_prototypes_ask_nobody_and_are_fixed():
    one, again = server_of(), server_of()
    for server in (one, again):
        create_plugin("fedproc", {"init": "random"}).begin_round(server)
    assert torch.equal(one.state["prototypes"], again.state["prototypes"])
    assert torch.allclose(one.state["prototypes"].norm(dim=1), torch.ones(4))
    assert one.state["known"].all()


def test_prototypes_are_initialised_once():
    first = torch.ones(4, 5)
    server = server_of(round=1, state={"prototypes": first})  # has nobody to ask
    create_plugin("fedproc", {}).begin_round(server)
    assert server.state == {"prototypes": first}


def test_a_later_round_initialises_them_where_the_ones_before_came_to_nothing():
    server = server_of(round=2)
    create_plugin("fedproc", {"init": "random"}).begin_round(server)
    assert server.state["known"].all()


def test_a_cohort_that_does_not_answer_stops_the_round():
    with pytest.raises(RoundFailedError, match="no client answered"):
        create_plugin("fedproc", {}).begin_round(server_of(ask=lambda question, **how: iter(())))


# --- options and combinations -------------------------------------------------------------------------------


def test_alpha_0_is_fedavg_bit_by_bit(go):
    assert model_bytes(go({"fedproc": {"alpha": 0.0, "projection": False}})) == model_bytes(go({}))
    assert model_bytes(go({"fedproc": {"alpha": 0.0}})) == model_bytes(go({}, projection=True))


def test_every_option_changes_the_trajectory(go):
    choices = [{}, {"alpha": 0.5}, {"two_stage": True}, {"init": "random"}, {"projection": False}]
    assert len({model_bytes(go({"fedproc": options})) for options in choices}) == len(choices)


def test_a_run_repeats_its_bits(go):
    assert model_bytes(go({"fedproc": {}})) == model_bytes(go({"fedproc": {}}))


def test_two_schedules_are_refused():
    with pytest.raises(ConfigError, match="leave alpha out"):
        create_plugin("fedproc", {"two_stage": True, "alpha": 0.5})


@pytest.mark.parametrize("other", ["fedprox", "moon"])
def test_runs_beside(go, other):
    assert model_bytes(go({"fedproc": {}, installed(other): {}})) != model_bytes(go({"fedproc": {}}))


@pytest.mark.parametrize("other", ["fedcd", "fedeccr"])
def test_is_refused_beside_what_scales_the_task_too(go, other):
    installed(other)
    with pytest.raises(PluginConflictError, match=f"'fedproc' and '{other}'.*both scale the task loss"):
        go({"fedproc": {}, other: {}})


def test_the_card_lists_every_option_with_its_default():
    card = (Path(__file__).parents[1] / "README.md").read_text()
    for option, field in FedProcOptions.model_fields.items():
        assert f"| `{option}` | `{field.default!r}` |" in card


def test_learns_digits(go):
    result = go({"fedproc": {}}, rounds=4, local_epochs=2, batch_size=16)
    assert result.metrics["global"]["accuracy"] > 0.6
