"""What the tests of SCAFFOLD, FedDyn and FedDC share: quadratics that drift apart, and a state for each parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcore import RunResult
from fedcore_testing.analytic import FloatArray, Quadratic, analytic_federation
from fedcore_testing.federation import plugin_state, same_tensors, weights
from fedcore_testing.problems import one_sample, with_batch_norm
from fedcore_testing.stub_plugins import Cohorts, FrozenEncoder, PersonalClassifier
from fedcore_testing.sync import steps_without_host_sync

Options = Mapping[str, Any]
Run = Callable[..., RunResult]

CENTRES, SIZES = np.array([[2.0, 0.0], [0.0, 4.0], [-1.0, 1.0]]), (1, 3, 2)

COHORTS = [[0, 1], [1], [1, 2], [0, 2], [0], [0, 1, 2]]
"""The clients of each round of :data:`SIMULATED`."""

SIMULATED = {
    **analytic_federation(CENTRES.tolist(), SIZES),
    "rounds": len(COHORTS),
    "local_epochs": 3,
    "batch_size": 1,
    "lr": 0.02,
    "lr_decay": 0.7,
    "momentum": 0.5,
    "weight_decay": 0.1,
}
"""Momentum, weight decay, a falling rate, clients of different K, clients that sit rounds out."""

STEPS = (3, 9, 6)
"""K_i in a round of :data:`SIMULATED`: samples * epochs, in batches of one."""


TOY = {**analytic_federation(CENTRES[:2].tolist(), SIZES[:2]), "rounds": 1, "local_epochs": 2, "lr": 0.5}
"""Two steps on two quadratics of 1 and 3 samples."""


def toy_of(go: Run) -> Run:
    """Return ``go`` on :data:`TOY`."""
    return lambda plugins, **options: go({Quadratic: {}, **plugins}, **{**TOY, **options})


def near(tensor: Tensor, values: FloatArray | list[float], tolerance: float = 1e-6) -> None:
    """Require that a tensor has these values, but for rounding."""
    np.testing.assert_allclose(tensor.double().numpy(), values, rtol=0, atol=tolerance)


def parameter_of(key: str) -> str:
    """Return the parameter to which a key of the state belongs, such as ``encoder.w`` to ``c.encoder.w``."""
    return key[2:] if key[1] == "." else key


def absent_clients_keep_their_state(go: Run, name: str, options: Options) -> None:
    """Whoever is not sampled keeps what it had; before its first participation a client has nothing."""
    plugins = {name: options, Cohorts: {"rounds": [[0, 1], [1, 2], [2, 3]]}}
    first, last = go(plugins, rounds=1), go(plugins, rounds=3)
    assert plugin_state(first, name, 2) == {}
    assert same_tensors(plugin_state(last, name, 0), plugin_state(first, name, 0))


def frozen_parameters_keep_their_state(go: Run, name: str, options: Options) -> None:
    """Parameters that all clients freeze neither move nor change their state."""
    plugins = {name: options, FrozenEncoder: {}}
    one, two = go(plugins, rounds=1), go(plugins, rounds=2)
    for key, before in plugin_state(one, name, 0).items():
        assert torch.equal(plugin_state(two, name, 0)[key], before) == ("encoder" in key)
        parameter = parameter_of(key)
        assert torch.equal(weights(two)[parameter], weights(one)[parameter]) == ("encoder" in key)
    for key, before in plugin_state(one, name).items():
        assert torch.equal(plugin_state(two, name)[key], before) == ("encoder" in key)


def personal_parameters_have_no_state(go: Run, name: str, options: Options) -> None:
    """Parameters that stay on the clients are neither corrected nor sent."""
    result = go({name: options, PersonalClassifier: {}}, rounds=3)
    for client in (None, 0):
        kept = plugin_state(result, name, client)
        assert kept
        assert not any("classifier" in key for key in kept)


def buffers_have_no_state(go: Run, name: str, options: Options) -> None:
    """While weights are corrected, buffers are averaged as ever."""
    result = go({name: options}, model=with_batch_norm, rounds=3)
    parameters = {parameter for parameter, _ in result.model.named_parameters()}
    for client in (None, 0):
        assert {parameter_of(key) for key in plugin_state(result, name, client)} == parameters
    buffers = dict(result.model.named_buffers())
    assert buffers["encoder.base.norm.num_batches_tracked"].dtype == torch.int64
    assert (buffers["encoder.base.norm.running_var"] > 0).all()


def buffers_are_fedavgs(go: Run, name: str, options: Options) -> None:
    """With weights that do not move (lr 1e-30) BatchNorm's statistics are FedAvg's, to the bit."""
    run = {"model": with_batch_norm, "lr": 1e-30, "weight_decay": 0.0, "rounds": 3}
    buffers, fedavg = (dict(go(plugins, **run).model.named_buffers()) for plugins in ({name: options}, {}))
    assert (fedavg["encoder.base.norm.running_mean"] != 0).all()
    assert fedavg["encoder.base.norm.num_batches_tracked"] > 0
    assert same_tensors(buffers, fedavg)


def clients_without_steps_have_no_state(go: Run, name: str, options: Options) -> None:
    """BatchNorm cannot train on one sample."""
    result = go({name: options}, partition=one_sample, model=with_batch_norm, rounds=3)
    assert plugin_state(result, name, 0) == {}
    assert all(tensor.isfinite().all() for tensor in plugin_state(result, name).values())


def steps_read_the_client_alone(go: Run, name: str, options: Options) -> None:
    """A step waits for no device, and reads neither its round nor its number: it can be captured in a graph."""
    with steps_without_host_sync() as looked:
        go({name: options}, local_epochs=2)
    assert max(looked, key=len) == {"client"}


STATE_CHECKS: tuple[Callable[[Run, str, Options], None], ...] = (
    absent_clients_keep_their_state,
    frozen_parameters_keep_their_state,
    personal_parameters_have_no_state,
    buffers_have_no_state,
    buffers_are_fedavgs,
    clients_without_steps_have_no_state,
    steps_read_the_client_alone,
)
