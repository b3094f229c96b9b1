"""The hook gradients and its further passes: what they compute, what they leave alone, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedcore import Loss, Plugin, PluginConflictError, PluginContractError, hookimpl
from fedcore.base.serial import dumps
from fedcore.base.tensors import flatten
from fedcore_functional import proximal_term
from fedcore_testing import (
    W,
    analytic_federation,
    client_state,
    federate,
    linear,
    model_bytes,
    records,
    weights,
    with_batch_norm,
)
from tests.sentences import raises

SMALL = {"dataset": "module:fedcore_testing.problems.few_digits", "local_epochs": 2, "batch_size": 8, "clients": 2}


class Ascends(Plugin):
    """The gradient one half of the gradient further up."""

    @hookimpl
    def gradients(self, step, gradients):
        ascended = {name: step.model.get_parameter(name) + 0.5 * g for name, g in gradients.items()}
        return step.gradients_at(ascended)


class Pulls(Plugin):
    @hookimpl
    def local_loss(self, step):
        return Loss(proximal_term(step.parameters, step.reference), weight=2.0)


class TakesPasses(Plugin):
    """Takes passes elsewhere and on some rows, and leaves the gradients as they are."""

    @hookimpl
    def gradients(self, step, gradients):
        step.gradients_at({name: g + 1 for name, g in gradients.items()})
        step.gradients_at({}, rows=slice(0, 2))


class ReturnsThem(Plugin):
    @hookimpl
    def gradients(self, gradients):
        return dict(gradients)


def test_a_step_along_the_gradient_elsewhere_by_hand(tmp_path):
    """Gradient w - 2: from 0 the gradient is -2, half of it further up (at -1) it is -3, and lr 0.5 leads to 1.5."""
    from fedcore_testing import Quadratic

    result = federate(tmp_path, Quadratic, Ascends, **analytic_federation([[2.0, 0.0]]), rounds=1, lr=0.5)
    assert weights(result)[W].tolist() == [1.5, 0.0]


def test_the_terms_of_all_plugins_take_part_by_hand(tmp_path):
    """With 2 * |w - w_t|^2 / 2: the gradient at 0 is -2, at -1 it is -3 - 2."""
    from fedcore_testing import Quadratic

    options = {**analytic_federation([[2.0]]), "rounds": 1, "lr": 0.5}
    result = federate(tmp_path, Quadratic, Pulls, Ascends, **options)
    assert weights(result)[W].tolist() == [2.5]


def test_the_gradient_on_some_rows_against_numpy(go):
    found = []

    class Looks(Plugin):
        @hookimpl
        def gradients(self, step, gradients):
            if not found:
                rows = torch.tensor([5, 1, 2])
                start = {name: step.model.get_parameter(name).detach().clone() for name in gradients}
                shifted = {name: value + 0.01 for name, value in start.items()}
                found.append((shifted, step.x[rows], step.y[rows], step.gradients_at(shifted, rows=rows)))
                for name, value in start.items():
                    assert torch.equal(step.model.get_parameter(name), value)

    go(Looks, model=linear, clients=1)
    w, x, y, gradient = found[0]
    inputs = x.flatten(1).double().numpy()
    logits = inputs @ w["classifier.weight"].double().numpy().T + w["classifier.bias"].double().numpy()
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    error = (shares - np.eye(10)[y.numpy()]) / 3
    np.testing.assert_allclose(gradient["classifier.weight"], error.T @ inputs, atol=1e-6)
    np.testing.assert_allclose(gradient["classifier.bias"], error.sum(axis=0), atol=1e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("others", [(), ("ditto",), ("fedcme",), ("scaffold",), ("moon",)], ids=str)
def test_passes_leave_no_trace(go, others):
    """The model has dropout and BatchNorm."""
    plain, result = (go(*others, *more, model=with_batch_norm, **SMALL) for more in ((), (TakesPasses,)))
    assert model_bytes(result) == model_bytes(plain)
    assert [line["losses"] for line in records(result)] == [line["losses"] for line in records(plain)]
    for client in range(2):  # Ditto keeps BatchNorm's statistics of its own model there
        one, other = (dumps(*flatten(client_state(run, client))) for run in (result, plain))
        assert one == other


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1}, {"precision": "bf16"}], ids=str)
def test_the_given_gradients_change_nothing(go, options):
    assert model_bytes(go(ReturnsThem, **SMALL, **options)) == model_bytes(go(**SMALL, **options))


def test_dropout_draws_the_same_in_each_pass(go):
    pairs = []

    class Compares(Plugin):
        @hookimpl
        def gradients(self, step, gradients):
            pairs.append((gradients["classifier.weight"].clone(), step.gradients_at({})["classifier.weight"]))

    go(Compares, model=with_batch_norm, **SMALL)
    assert all(torch.equal(first, second) for first, second in pairs)
    assert len(pairs) > 10


def test_a_parameter_that_is_left_out_does_not_move(go):
    class OnlyClassifier(Plugin):
        @hookimpl
        def gradients(self, gradients):
            return {name: g for name, g in gradients.items() if name.startswith("classifier.")}

    before, after = weights(go(OnlyClassifier, **SMALL)), weights(go(OnlyClassifier, **{**SMALL, "rounds": 3}))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"classifier.weight", "classifier.bias"}


class Sparse(Plugin):
    """Every third weight is 0 from the start on."""

    starts = ("*",)

    @hookimpl
    def begin_local(self, client):
        return self.masked(client.start)

    @hookimpl
    def gradients(self, gradients):
        return self.masked(gradients)

    def masked(self, tensors):
        return {name: t * (torch.arange(t.numel()).view_as(t) % 3 > 0) for name, t in tensors.items()}


@pytest.mark.parametrize(
    "options",
    [{"momentum": 0.9, "weight_decay": 0.01, "clip_norm": 0.5}, {"optimizer": "adam"}, {"optimizer": "adamw"}],
    ids=str,
)
def test_weights_under_a_mask_stay_zero(go, options):
    for tensor in weights(go(Sparse, **SMALL, **{"weight_decay": 0.1, **options})).values():
        zero = torch.arange(tensor.numel()).view_as(tensor) % 3 == 0
        assert not tensor[zero].any()
        assert tensor[~zero].any()


def returning(value):
    class Returns(Plugin):
        @hookimpl
        def gradients(self, step, gradients):
            return value(step, gradients)

    return Returns


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (lambda step, g: {"classifier.wieght": g["classifier.weight"]}, ()),
        (lambda step, g: {"classifier.weight": g["classifier.bias"]}, ("'classifier.weight'", "10")),
        (lambda step, g: [1.0], ()),
    ],
)
def test_what_is_no_gradient_is_refused(go, value, named):
    with raises(PluginContractError, *named):
        go(returning(value))


@pytest.mark.parametrize(
    ("weights_of", "named"),
    [
        (lambda g: {"classifier.wieght": g["classifier.weight"]}, ()),
        (lambda g: {"classifier.weight": g["classifier.bias"]}, ("10",)),
    ],
)
def test_weights_that_do_not_fit_are_named(go, weights_of, named):
    with raises(PluginContractError, *named):
        go(returning(lambda step, gradients: step.gradients_at(weights_of(gradients))))


def test_passes_are_taken_in_the_hook_only(go):
    class TooEarly(Plugin):
        @hookimpl
        def local_loss(self, step):
            step.gradients_at({})

    for others in ((), (Ascends,)):
        with raises(PluginContractError):
            go(TooEarly, *others)


def test_only_one_plugin_changes_gradients(go):
    with raises(PluginConflictError):
        go(Ascends, ReturnsThem)
