"""MOON: the hand case, the frozen models of the contrast, and what survives rounds of absence."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedcore import Plugin, PluginConflictError, hookimpl
from fedcore_functional import model_contrastive_loss
from fedcore_moon import Moon, MoonOptions
from fedcore_testing import (
    Cohorts,
    PersonalClassifier,
    PersonalModel,
    client_state,
    committed,
    federations,
    model_bytes,
    records,
    same_tensors,
    with_batch_norm,
)
from tests.sentences import raises, warns

LOG: list[dict] = []
go = federations(samples=300)


@pytest.fixture(autouse=True)
def _fresh_log():
    LOG.clear()


def copied(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


class Watched(Moon):
    """MOON that notes the models and the term of every batch."""

    @hookimpl
    def local_loss(self, step):
        loss = super().local_loss(step)
        previous, frozen = step.previous_model, step.global_model
        entry = {
            "kind": "step",
            "round": step.round,
            "client": step.client.id,
            "value": None if loss.value is None else loss.value.item(),
            "previous": None if previous is None else copied(previous),
            "global": copied(frozen),
        }
        if loss.value is not None:
            with torch.no_grad():
                z = [model(step.x).features.double().numpy() for model in (frozen, previous)]
            of_frozen = [step.frozen(name).features for name in ("global", "previous")]
            gradient = torch.autograd.grad(loss.value, step.features, retain_graph=True)[0]
            entry |= {
                "weight": loss.weight,
                "reference": reference(step.features.detach().double().numpy(), *z, self.options.temperature),
                "training": [m.training for model in (frozen, previous) for m in model.modules()],
                "requires": [p.requires_grad for model in (frozen, previous) for p in model.parameters()],
                "attached": [features.requires_grad for features in of_frozen],
                "z_moves": bool((gradient != 0).any()),
            }
        LOG.append(entry)
        return loss

    @hookimpl
    def end_local(self, client):
        LOG.append({"kind": "end", "round": client.round, "client": client.id, "model": copied(client.model)})


def reference(z, near, far, tau):
    """Mean of -log(e^(s_g/tau) / (e^(s_g/tau) + e^(s_p/tau))) by loops in float64."""
    total = 0.0
    for a, g, p in zip(z, near, far):
        s_g, s_p = (float(a @ b) / max(np.linalg.norm(a), 1e-8) / max(np.linalg.norm(b), 1e-8) for b in (g, p))
        total -= math.log(math.exp(s_g / tau) / (math.exp(s_g / tau) + math.exp(s_p / tau)))
    return total / len(z)


def kept(kind, **filters):
    return [e for e in LOG if e["kind"] == kind and all(e[name] == value for name, value in filters.items())]


# --- the equation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e4])
def test_extreme_features_and_temperatures_stay_finite(scale):
    z, near, far = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(0))
    z = (z * scale).requires_grad_()
    loss = model_contrastive_loss(z, near, far, temperature=1e-4)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(z.grad).all()


def test_a_step_against_the_gradient_turns_z_to_the_global_and_away_from_the_previous():
    z, near, far = torch.randn(3, 9, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    z.requires_grad_()
    model_contrastive_loss(z, near, far).backward()
    moved = (z - 0.1 * z.grad).detach()
    margin = [torch.cosine_similarity(x, near) - torch.cosine_similarity(x, far) for x in (z.detach(), moved)]
    assert (margin[1] > margin[0]).all()


# --- the neutral element -----------------------------------------------------------------------------------------


def test_mu_0_is_fedavg_with_the_projection_head(go):
    assert model_bytes(go({"moon": {"mu": 0.0}})) == model_bytes(go({}, projection=True))


def test_the_first_round_is_fedavg(go):
    """A client without a previous model has no term, as in the official code."""
    result = go({"moon": {"mu": 5.0}}, rounds=1)
    assert model_bytes(result) == model_bytes(go({}, rounds=1, projection=True))
    assert set(records(result)[0]["losses"]) == {"task"}


# --- the term in the round loop ----------------------------------------------------------------------------------


def test_the_term_is_equation_3_of_the_three_models(go):
    go({Watched: {"mu": 5.0, "temperature": 0.3}}, rounds=3)
    assert all(e["value"] is None for e in kept("step", round=0))
    later = [e for e in kept("step") if e["round"] > 0]
    assert later
    for e in later:
        assert e["value"] == pytest.approx(e["reference"], rel=1e-4)
        assert e["weight"] == 5.0
        assert e["z_moves"]
    assert len({round(e["value"], 4) for e in later}) > 5


@pytest.mark.slow
def test_every_option_changes_the_trajectory(go):
    changes = [{}, {"mu": 5.0}, {"temperature": 0.1}, {"projection": False}, {"mu": 0.0}]
    assert len({model_bytes(go({"moon": change})) for change in changes}) == len(changes)


COHORTS = [[0, 1], [1, 2], [1, 2], [0, 2], [0, 1]]


def test_previous_is_the_model_of_the_last_participation_however_long_ago(go):
    result = go({Watched: {}, Cohorts: {"rounds": COHORTS}}, rounds=len(COHORTS))
    trained = {(e["round"], e["client"]): e["model"] for e in kept("end")}
    last: dict[int, int] = {}
    for number, cohort in enumerate(COHORTS):
        for client in cohort:
            steps = kept("step", round=number, client=client)
            assert steps
            for e in steps:
                if client not in last:
                    assert e["previous"] is None
                    assert e["value"] is None
                else:
                    assert same_tensors(e["previous"], trained[last[client], client])
                    assert not same_tensors(e["previous"], e["global"])
                    assert e["value"] > 0
            last[client] = number
    assert last == {0: 4, 1: 4, 2: 3}
    # What lies in the clients' state is what was trained last, also by those who then sat out.
    assert committed(result).manifest == last
    for client, number in last.items():
        state = client_state(result, client)["fedcore"]
        own = torch.cat([tensor.flatten() for tensor in trained[number, client].values()])
        assert same_tensors(state, {"previous/parameters": own})


def test_the_term_begins_with_each_clients_second_participation(go):
    result = go({"moon": {}, Cohorts: {"rounds": [[0], [1], [2], [1]]}}, rounds=4)
    logged = ["moon.contrast" in line["losses"] for line in records(result)]
    assert logged == [False, False, False, True]


def test_frozen_models_are_in_eval_mode_without_gradient_and_keep_their_statistics(go):
    go({Watched: {}}, model=with_batch_norm, rounds=2, local_epochs=2, clients=2)
    steps = kept("step", round=1)
    assert steps
    for e in steps:
        assert not any(e["training"])
        assert not any(e["requires"])
        assert e["attached"] == [False, False]
        assert e["z_moves"]
    for client in (0, 1):  # BatchNorm's statistics of neither frozen model drift while the client trains
        own = kept("step", round=1, client=client)
        assert len(own) > 1
        assert all(
            same_tensors(e["global"], own[0]["global"]) and same_tensors(e["previous"], own[0]["previous"]) for e in own
        )


def test_the_frozen_models_are_not_asked_for_where_there_is_no_term():
    class Step:
        def frozen(self, name):
            asked.append(name)

    asked: list[str] = []
    assert Moon(MoonOptions(mu=0.0)).local_loss(Step()).value is None
    assert asked == []
    assert Moon(MoonOptions()).local_loss(Step()).value is None
    assert asked == ["previous"]


# --- options and company ---------------------------------------------------------------------------------------


def test_with_fedprox(go):
    result = go({"moon": {}, "fedprox": {"mu": 0.1}})
    assert set(records(result)[1]["losses"]) == {"task", "moon.contrast", "fedprox.proximal"}


def test_a_note_says_that_the_term_is_constant_where_the_encoder_stays_on_the_clients(go):
    with warns(RuntimeWarning, "moon", "'personalmodel'"):
        result = go({"moon": {}, PersonalModel: {}})
    assert records(result)[1]["losses"]["moon.contrast"] == pytest.approx(math.log(2))
    assert records(go({"moon": {}, PersonalClassifier: {}}))[1]["losses"]["moon.contrast"] != pytest.approx(math.log(2))


class Narrow(Plugin):
    @hookimpl
    def configure_model(self, model, task):
        task.ensure_projection(model, width=32)


def test_another_width_of_the_projection_head_is_refused(go):
    with raises(PluginConflictError, 32, 256):
        go({"moon": {}, Narrow: {}})
