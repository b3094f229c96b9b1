"""FedDF: the loss against NumPy, the ensemble's logits, one step by hand, identities, whole runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedcore import ConfigError, Plugin, PluginConflictError, hookimpl
from fedcore_feddf import distillation_loss, learning_rate
from fedcore_testing import (
    PersonalClassifier,
    committed,
    federations,
    records,
    weights,
    with_batch_norm,
)
from tests.sentences import raises

PUBLIC = {"public": 0.1}
FEW = {"steps": 5, "batch_size": 32}
go = federations()


# --- the equations -----------------------------------------------------------------------------------------------


def softmax(logits):
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    return shifted / shifted.sum(1, keepdims=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_value_and_gradient_against_numpy(dtype):
    rng = np.random.default_rng(0)
    s, t = 3 * rng.standard_normal((6, 4)), 3 * rng.standard_normal((6, 4))
    student = torch.tensor(s, dtype=dtype, requires_grad=True)
    value = distillation_loss(student, torch.tensor(t, dtype=dtype))
    value.backward()
    p, q = softmax(t), softmax(s)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    assert value.item() == pytest.approx((p * (np.log(p) - np.log(q))).sum(1).mean(), rel=tolerance)
    np.testing.assert_allclose(student.grad, (q - p) / 6, rtol=tolerance, atol=tolerance)


def test_by_hand():
    """Teacher (1/2, 1/2), student (3/4, 1/4): ln 2 / 2 + ... = (ln(2/3) + ln 2) / 2."""
    student = torch.tensor([[np.log(3.0), 0.0]])
    expected = (np.log(2 / 3) + np.log(2)) / 2
    assert distillation_loss(student, torch.zeros(1, 2)).item() == pytest.approx(expected, rel=1e-6)
    assert distillation_loss(student, student).item() == pytest.approx(0, abs=1e-7)


def test_the_rate_is_annealed():
    rates = [learning_rate(0.2, step, 4) for step in range(5)]
    assert rates == pytest.approx([0.2, 0.1 * (1 + 0.5**0.5), 0.1, 0.1 * (1 - 0.5**0.5), 0.0], abs=1e-15)


# --- whole runs --------------------------------------------------------------------------------------------------


LOGITS = {}


class Watches(Plugin):
    """Computes the clients' logits by themselves, in float64, and the student's loss before distillation."""

    @hookimpl
    def accumulate(self, server, update):
        with torch.no_grad():
            logits = server.network(update.model)(server.public.inputs(torch.arange(len(server.public))))[1]
        LOGITS.setdefault(server.round, []).append(logits.double())
        LOGITS["public"] = server.public

    @hookimpl
    def server_step(self, server, mean):
        LOGITS["mean"] = {name: tensor.clone() for name, tensor in mean.items()}


def test_the_student_moves_to_the_ensemble(go):
    LOGITS.clear()
    options = {**PUBLIC, "partition": "classes", "rounds": 1, "local_epochs": 3}
    result = go({Watches: {}, "feddf": {"steps": 150, "lr": 1e-3}}, **options)
    public = LOGITS["public"]
    teacher = torch.stack(LOGITS[0]).mean(dim=0)
    found = {}
    for name, state in (("mean", LOGITS["mean"]), ("distilled", weights(result))):
        result.model.load_state_dict(state)
        with torch.no_grad():
            logits = result.model.eval()(public.inputs(torch.arange(len(public))))[1]
        found[name] = distillation_loss(logits.double(), teacher).item()
    assert found["distilled"] < 0.5 * found["mean"]


def test_one_step_by_hand(go):
    """Adam's first step moves every entry by the rate, against its gradient's sign."""
    LOGITS.clear()
    options = {**PUBLIC, "rounds": 1}
    stepped = weights(go({Watches: {}, "feddf": {"steps": 1, "lr": 0.01}}, **options))
    moved = torch.cat([(stepped[name] - mean).flatten() for name, mean in LOGITS["mean"].items()])
    assert moved.abs().max() <= 0.0101
    assert (moved.abs() > 0.0099).float().mean() > 0.5


def test_memory_holds_one_sum_of_logits_which_is_gone_at_the_end(go):
    assert "feddf" not in committed(go({"feddf": FEW}, **PUBLIC)).plugins


def test_batch_norm_keeps_the_mean_of_the_clients_statistics(go):
    options = {**PUBLIC, "rounds": 1, "model": with_batch_norm}
    distilled, plain = weights(go({"feddf": FEW}, **options)), weights(go({}, **options))
    for name in plain:
        assert torch.equal(distilled[name], plain[name]) == ("running" in name or "tracked" in name), name


def test_another_data_set_is_public(go):
    result = go({"feddf": FEW}, public="digits")
    assert all(line["failures"] == [] for line in records(result))
    assert records(result)[0]["bytes"] == records(go({}, public="digits"))[0]["bytes"]


class KeepsNothing(Plugin):
    @hookimpl
    def personal_parameters(self):
        return []


def test_what_is_refused(go):
    with raises(ConfigError, "'feddf'", "--public", "0.1"):
        go({"feddf": {}})
    with raises(PluginConflictError, "'feddf'", "'personalclassifier'"):
        go({"feddf": {}, KeepsNothing: {}, PersonalClassifier: {}}, **PUBLIC)
    with raises(ConfigError, "--buffers"):
        go({"feddf": {}}, model=with_batch_norm, buffers="local", **PUBLIC)
    with raises(PluginConflictError):
        go({"feddf": {}, "median": {}}, **PUBLIC)
