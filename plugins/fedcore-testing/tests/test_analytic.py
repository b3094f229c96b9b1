"""What authors check a method's arithmetic with: the federation for a hand, its references, its company."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcore import RoundFailedError, hookimpl
from fedcore_functional import effective_steps
from fedcore_testing import (
    Cohorts,
    EqualWeights,
    FrozenEncoder,
    OwnTaskLoss,
    PersonalClassifier,
    Quadratic,
    analytic_federation,
    distance_by_hand,
    federate,
    interrupted,
    model_bytes,
    plugin_state,
    records,
    steps_by_hand,
    steps_without_host_sync,
    weights,
)
from fedcore_testing.analytic import W
from tests.sentences import raises

TUTORIAL = Path(__file__).parents[3] / "docs" / "published-method.md"
TOY = {**analytic_federation([[2, 0], [0, 4]], [1, 3]), "rounds": 1, "lr": 0.5}


def test_the_tutorials_lines(tmp_path):
    (code,) = re.findall(
        r"```python\n(from fedcore_testing import Quadratic.*?)```", TUTORIAL.read_text("utf-8"), re.DOTALL
    )
    assert "assert " in code
    exec(code, {"folder": tmp_path})  # noqa: S102 - our own page


def test_every_client_is_one_batch_of_its_centre_and_starts_where_it_is_told(tmp_path):
    options = {**TOY, **analytic_federation([[2, 0, 1], [0, 4, 1]], [1, 3], start=[1, 1, 1])}
    assert weights(federate(tmp_path, Quadratic, **options))[W].tolist() == pytest.approx([0.75, 2.0, 1.0])
    assert weights(federate(tmp_path, Quadratic, EqualWeights, **TOY))[W].tolist() == [0.5, 1.0]
    one_each = federate(tmp_path, Quadratic, **{**TOY, **analytic_federation([[2, 0], [0, 4]])})
    assert weights(one_each)[W].tolist() == [0.5, 1.0]


def test_the_references_are_pytorchs_sgd_and_the_sum_of_its_steps():
    centre, w = torch.tensor([2.0, -1.0], dtype=torch.float64), torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(7):
        optimizer.zero_grad()
        (0.5 * (w - centre).square().sum()).backward()
        optimizer.step()
    found = steps_by_hand(np.zeros(2), lambda v: v - centre.numpy(), 7, lr=0.1, momentum=0.9, weight_decay=0.01)
    np.testing.assert_allclose(found, w.detach().numpy(), rtol=1e-12)
    assert distance_by_hand(50, 0.9) == pytest.approx(effective_steps(50, 0.9), rel=1e-12)


def test_cohorts_are_those_that_were_asked_for(tmp_path):
    rounds = [[1], [0, 1], [0]]
    result = federate(tmp_path, Quadratic, (Cohorts, {"rounds": rounds}), **{**TOY, "rounds": 3})
    assert [sorted(line["cohort"]) for line in records(result)] == rounds


def test_company_does_what_it_says(tmp_path):
    once, twice = (federate(tmp_path, FrozenEncoder, rounds=rounds) for rounds in (1, 2))
    for name, tensor in weights(once).items():
        assert torch.equal(tensor, weights(twice)[name]) == name.startswith("encoder")
    kept, initial = (
        weights(federate(tmp_path, PersonalClassifier)),
        weights(federate(tmp_path, lr=1e-30, weight_decay=0.0)),
    )
    for name, tensor in kept.items():
        assert torch.equal(tensor, initial[name]) == name.startswith("classifier")


def test_its_own_task_loss_is_the_cores(tmp_path):
    assert model_bytes(federate(tmp_path, OwnTaskLoss)) == model_bytes(federate(tmp_path))


class Keeps(Quadratic):
    """Keeps a number on each side."""

    @hookimpl
    def begin_round(self, server):
        server.state["round"] = server.round

    @hookimpl
    def end_local(self, client):
        client.state["client"] = client.id


def test_what_a_plugin_keeps_on_either_side(tmp_path):
    result = federate(tmp_path, Keeps, **{**TOY, "rounds": 2})
    assert plugin_state(result, "keeps") == {"round": 1}
    assert plugin_state(result, "keeps", 1) == {"client": 1}
    assert plugin_state(result, "quadratic") == plugin_state(result, "quadratic", 0) == {}


def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path):
    assert model_bytes(interrupted(tmp_path, Quadratic, after=0, **{**TOY, "rounds": 3})) == model_bytes(
        federate(tmp_path, Quadratic, **{**TOY, "rounds": 3})
    )
    with raises(AssertionError, "5"):
        interrupted(tmp_path, Quadratic, after=5, **TOY)


class Reads(Quadratic):
    """Waits for the device in its loss."""

    @hookimpl
    def task_loss(self, step):
        loss = super().task_loss(step)
        return loss * (1.0 if loss.item() > 0 else 2.0)


def test_a_step_that_waits_is_a_failure_and_others_are_noted(tmp_path):
    with steps_without_host_sync() as looked:
        federate(tmp_path, Quadratic, **TOY)
    assert looked == [set(), set()]
    with steps_without_host_sync(), raises(RoundFailedError, "_local_scalar_dense"):
        federate(tmp_path, Reads, **TOY)
