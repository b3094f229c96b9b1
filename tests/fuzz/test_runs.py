"""Runs of options that Hypothesis chooses: FedAvg is a plain loop, and a run has one result however it is executed."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedcore import Loss, Plugin, SplitModel, Step, hookimpl
from fedcore.base.errors import ConfigError, RoundFailedError
from fedcore_testing import federate, interrupted, small_config, weights
from fedcore_testing.compare import require_same
from fedcore_testing.federation import initial_weights, partition_of
from tests.fuzz.test_parsers import FEW
from tests.support import CORRECTED

NAMES = sorted({point.name for point in entry_points(group="fedcore.plugins")} - {"fedavg"})
MANY = settings(FEW, max_examples=100, derandomize=False)
SEEDED = {name: {"seed_noise": True} for name in ("dp", "dp-sgd", "local-dp")}


def normed(input_shape: tuple[int, ...], num_classes: int) -> SplitModel:
    """Its statistics are buffers, and it trains no batch of one sample."""
    return SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU()), 16, num_classes)


def partly_frozen(input_shape: tuple[int, ...], num_classes: int) -> SplitModel:
    """Its first weights are not trained."""
    model = SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU()), 16, num_classes)
    next(model.parameters()).requires_grad_(False)
    return model


OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["mlp", normed, partly_frozen]),
    "clients": st.integers(2, 5),
    "participation": st.sampled_from([1.0, 0.5]),
    "rounds": st.integers(1, 3),
    "batch_size": st.sampled_from([5, 16, 64]),
    "lr": st.sampled_from([0.01, 0.05]),
    "momentum": st.sampled_from([0.0, 0.9]),
    "weight_decay": st.sampled_from([0.0, 0.01]),
    "precision": st.sampled_from(["float32", "bf16"]),
    "partition": st.sampled_from(["iid", "dirichlet"]),
    "samples": st.sampled_from([60, 200]),
    "seed": st.integers(0, 99),
}
FURTHER: dict[str, st.SearchStrategy[Any]] = {
    "local_epochs": st.integers(2, 3),
    "local_steps": st.integers(1, 7),
    "clip_norm": st.sampled_from([0.1, 1.0]),
    "drop_last": st.just(True),
    "projection": st.just(True),
    "imbalance": st.just(5.0),
    "normalize": st.sampled_from(["global", "client"]),
}
OTHER: dict[str, st.SearchStrategy[Any]] = {
    "optimizer": st.sampled_from(["adam", "adamw"]),
    "lr_schedule": st.sampled_from(["cosine", "step"]),
    "buffers": st.just("local"),
    "client_test_fraction": st.just(0.3),
    "public": st.just("0.1"),
    "eval_every": st.just(2),
    "checkpoint_every": st.just(2),
    "class_weights": st.just("balanced"),
    "system": st.sampled_from([{"no_show": 0.3}, {"dropout": 0.3}, {"stragglers": 0.5}]),
}


class NotesBatches(Plugin):
    """Notes the batches of each client by round."""

    taken: dict[int, dict[int, list[tuple[Tensor, Tensor]]]] = {}

    @hookimpl
    def local_loss(self, step: Step) -> list[Loss]:
        """Add no term."""
        clients = self.taken.setdefault(step.round, {})
        clients.setdefault(step.client.id, []).append((step.x.clone(), step.y.clone()))
        return []


def check_fedavg(options: dict[str, Any], folder: Path) -> None:
    """Compare a run with a loop of torch over the same batches."""
    NotesBatches.taken.clear()
    try:
        result = federate(folder, NotesBatches, **options)
    except (ConfigError, ValueError):
        return
    model, sizes = result.network, partition_of(result).train.sizes
    state = initial_weights(small_config(folder, **options))
    model.load_state_dict(state)
    for clients in NotesBatches.taken.values():
        state = mean_of({client: trained(model, state, own, options) for client, own in clients.items()}, sizes)
    few = 2e-3 if options["precision"] == "bf16" else 1e-4
    for name, tensor in weights(result).items():
        torch.testing.assert_close(tensor, state[name], rtol=few, atol=few)


def trained(model: nn.Module, start: dict[str, Tensor], batches: Any, options: dict[str, Any]) -> dict[str, Tensor]:
    """Return a client's model after SGD."""
    model.load_state_dict(start)
    own = [p for p in model.train().parameters() if p.requires_grad]
    rates = {"lr": options["lr"], "momentum": options["momentum"], "weight_decay": options["weight_decay"]}
    optimizer = torch.optim.SGD(own, **rates)
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if options["precision"] == "bf16" else nullcontext():
            logits = model(x)[1]
        nn.functional.cross_entropy(logits.float(), y).backward()
        if "clip_norm" in options:
            nn.utils.clip_grad_norm_(own, options["clip_norm"])
        optimizer.step()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def mean_of(models: dict[int, dict[str, Tensor]], sizes: Any) -> dict[str, Tensor]:
    """Return the mean by samples; counts, such as a BatchNorm's, take the largest."""
    first = next(iter(models.values()))
    shares = torch.tensor([float(sizes[client]) for client in models], dtype=torch.float64)
    mean = {}
    for name, tensor in first.items():
        rows = torch.stack([own[name] for own in models.values()])
        weighted = torch.tensordot(shares / shares.sum(), rows.double(), dims=1).to(tensor.dtype)
        mean[name] = weighted if tensor.is_floating_point() else rows.amax(dim=0)
    return mean


def check_one_result(data: st.DataObject, folder: Path) -> None:
    """Compare a run with workers, and one that was stopped, to the bit; a configuration may be refused."""
    options = data.draw(st.fixed_dictionaries(OPTIONS, optional=FURTHER | OTHER))
    names = data.draw(st.lists(st.sampled_from(NAMES), max_size=2, unique=True))
    stack, after = data.draw(st.sampled_from([1, 2, "auto"])), data.draw(st.integers(0, options["rounds"] - 1))
    plugins = [(name, {**SEEDED.get(name, {}), **CORRECTED.get(name, {})}) for name in names]
    try:
        result = federate(folder, *plugins, stack=stack, **options)
    except (ConfigError, RoundFailedError, ValueError):
        return
    require_same(result, federate(folder, *plugins, stack=stack, **options, workers=2), "with workers")
    require_same(result, interrupted(folder, *plugins, stack=stack, after=after, **options), "stopped and resumed")


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"model": normed, "drop_last": True, "clip_norm": 0.1},
        {"model": partly_frozen, "participation": 0.5, "local_steps": 5},
    ],
    ids=lambda options: " ".join(options),
)
def test_fedavg_is_a_plain_loop(tmp_path: Path, options: dict[str, Any]) -> None:
    usual = {"clients": 3, "rounds": 2, "batch_size": 8, "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
    check_fedavg({"model": "mlp", "precision": "float32", "samples": 90, **usual, **options}, tmp_path)


@pytest.mark.slow
@MANY
@given(options=st.fixed_dictionaries(OPTIONS, optional=FURTHER))
def test_many_fedavgs_are_plain_loops(options: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_fedavg(options, Path(folder))


@pytest.mark.slow
@MANY
@given(data=st.data())
def test_a_run_has_one_result_however_it_is_executed(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_one_result(data, Path(folder))
