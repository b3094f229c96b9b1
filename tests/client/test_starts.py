"""What begin_local returns: the round's start, for the training, the reference and the frozen global model."""

from __future__ import annotations

import pytest
import torch

from fedcore import Loss, Plugin, PluginConflictError, PluginContractError, hookimpl
from fedcore_testing import (
    PersonalClassifier,
    Quadratic,
    W,
    analytic_federation,
    client_state,
    federate,
    interrupted,
    model_bytes,
    records,
    weights,
)
from tests.sentences import raises

FEW = {"dataset": "module:fedcore_testing.problems.few_digits", "batch_size": 16}


class AtOnes(Plugin):
    """Every client starts from ones, whatever it received."""

    starts = ("encoder.*",)

    @hookimpl
    def begin_local(self, client):
        assert client.model.encoder.base.w.tolist() != [1.0, 1.0], "the model is the received one"
        return {W: torch.ones(2, dtype=torch.float64)}


class Mixes(Plugin):
    """Starts half from the client's previous model, half from the received one."""

    starts = ("classifier.*",)
    reads = ("previous", "global")

    @hookimpl
    def begin_local(self, client):
        previous = client.previous_model
        if previous is None:
            return None
        own = dict(client.model.classifier.named_parameters(prefix="classifier"))
        old = dict(previous.classifier.named_parameters(prefix="classifier"))
        return {name: 0.5 * (value + old[name]) for name, value in own.items()}

    @hookimpl
    def local_loss(self, step):
        if step.client.steps == 0:
            outputs = step.frozen("global")
            assert torch.equal(outputs.logits, step.logits), "the frozen global model is the start"
            assert all(torch.equal(a, b) for a, b in zip(step.reference, step.parameters)), "so is the reference"


class KeepsAndStarts(PersonalClassifier):
    """Keeps the classifier on the client and lets it start from zeros."""

    starts = ("classifier.*",)

    @hookimpl
    def begin_local(self, client):
        return {"classifier.bias": torch.zeros(10)}

    @hookimpl
    def task_loss(self, step):
        return (step.features.sum() + step.logits.sum()) * 0.0


def test_one_step_from_the_start_by_hand(tmp_path):
    """From (1, 1) the gradient of |w - (2, 0)|^2 / 2 is (-1, 1); lr 0.5 leads to (1.5, 0.5), whatever was received."""
    options = {**analytic_federation([[2.0, 0.0]]), "rounds": 2, "lr": 0.5}
    assert weights(federate(tmp_path, Quadratic, AtOnes, **options))[W].tolist() == [1.5, 0.5]


def test_a_proximal_term_pulls_to_the_start_by_hand(tmp_path):
    """Two steps from (1, 1): the second has gradient (-0.5, 0.5) + mu (0.5, -0.5), which is 0 for mu = 1."""
    options = {**analytic_federation([[2.0, 0.0]]), "rounds": 1, "local_epochs": 2, "lr": 0.5}
    result = federate(tmp_path, Quadratic, AtOnes, ("fedprox", {"mu": 1.0}), **options)
    assert weights(result)[W].tolist() == [1.5, 0.5]


class Looks(Plugin):
    """Sees in ``begin_local`` from where the client starts."""

    @hookimpl
    def begin_local(self, client):
        one = torch.ones(2, dtype=torch.float64)
        assert torch.equal(client.model.encoder.base.w, one)
        assert torch.equal(client.start[W], one)
        assert torch.equal(client.network().encoder.base.w, one)


@pytest.mark.parametrize("plugins", [(Looks, AtOnes), (AtOnes, Looks)])
def test_other_plugins_see_the_start_before_the_first_step(tmp_path, plugins):
    result = federate(tmp_path, Quadratic, *plugins, **{**analytic_federation([[2.0, 0.0]]), "rounds": 1})
    assert records(result)[0]["failures"] == []  # Looks would raise


def test_a_stopped_run_ends_with_the_same_bits(tmp_path):
    plain = model_bytes(federate(tmp_path, Mixes, **FEW, rounds=3))
    assert plain != model_bytes(federate(tmp_path, **FEW, rounds=3))
    assert model_bytes(interrupted(tmp_path, Mixes, after=1, **FEW, rounds=3)) == plain


@pytest.mark.slow
def test_workers_end_with_the_same_bits(tmp_path):
    plain = model_bytes(federate(tmp_path, Mixes, **FEW))
    assert model_bytes(federate(tmp_path, Mixes, **FEW, workers=2)) == plain


def test_what_a_client_keeps_can_start_elsewhere(tmp_path):
    result = federate(tmp_path, KeepsAndStarts, **FEW, rounds=1, weight_decay=0.0)
    kept = client_state(result, 0)["fedcore"]
    assert kept["personal/classifier.bias"].tolist() == [0.0] * 10
    assert kept["personal/classifier.weight"].any()


def returning(tensors):
    class Returns(Plugin):
        starts = ("classifier.weight",)

        @hookimpl
        def begin_local(self, client):
            return tensors

    return Returns


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"classifier.bias": torch.zeros(10)}, ("'classifier.bias'",)),
        ({"classifier.weight": torch.zeros(10)}, ("'classifier.weight'", "10")),
        ([torch.zeros(10)], ("begin_local",)),
    ],
)
def test_what_does_not_fit_is_refused(go, tensors, named):
    with raises(PluginContractError, *named):
        go(returning(tensors), **FEW)


def test_a_parameter_that_is_not_trained_has_no_start(go):
    class Everything(Plugin):
        starts = ("*",)

        @hookimpl
        def begin_local(self, client):
            return dict(client.model.state_dict())

    model = "module:fedcore_testing.problems.with_fixed_layers"
    with raises(PluginContractError):
        go(Everything, model=model, **FEW)


def test_conflicts_name_both_and_the_reason(go):
    with raises(PluginConflictError, "'classifier.weight'"):
        go(Mixes, returning({}))
    with raises(PluginConflictError, "'mixes'", "'classifier.weight'", "'fedper'"):
        go(Mixes, "fedper")
    with raises(PluginConflictError, "'scaffold'", "'mixes'"):
        go(Mixes, "scaffold")


def test_a_start_of_what_stays_on_the_clients_is_no_conflict_with_a_measured_displacement(go):
    class OwnHead(Plugin):
        """FedPer, whose head starts where it is."""

        starts = ("classifier.*",)

        @hookimpl
        def personal_parameters(self):
            return ["classifier.*"]

        @hookimpl
        def begin_local(self, client):
            return {name: t for name, t in client.model.state_dict().items() if name.startswith("classifier.")}

    own, fedper = go(OwnHead, "scaffold", **FEW), go("fedper", "scaffold", **FEW)
    assert model_bytes(own) == model_bytes(fedper)


def test_a_start_is_no_view_of_the_model(go):
    """The model trains on; what began_local returned does not move with it."""
    seen = []

    class Same(Plugin):
        starts = ("*",)

        @hookimpl
        def begin_local(self, client):
            return dict(client.model.state_dict())

        @hookimpl
        def local_loss(self, step):
            moved = sum((a - b).abs().sum() for a, b in zip(step.parameters, step.reference))
            seen.append(float(moved.detach()))
            return Loss(0.0 * moved)

    result = go(Same, **FEW)
    assert seen[0] == 0
    assert seen[-1] > 0
    assert model_bytes(result) == model_bytes(go(**FEW))


def test_a_plugin_with_one_model_and_a_second_head_does_not_conflict_with_itself(go):
    class TwoHeads(Plugin):
        """Clients start from the averaged head; the global model has another one (CReFF)."""

        owns = starts = ("classifier.*",)
        assumes = ("one-model",)

        @hookimpl
        def begin_local(self, client):
            return None

        @hookimpl
        def aggregate(self, server):
            return None

    assert model_bytes(go(TwoHeads, **FEW)) == model_bytes(go(**FEW))
