"""Runs on graphs: every method, any number of workers, clients with a single graph, what is refused."""

import os
import sys
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

from fedcore import ConfigError, PluginContractError, RoundFailedError, UnknownNameError
from fedcore.data import load_dataset
from fedcore.models import build_model
from fedcore.tools import RunDirectory
from fedcore_testing import model_bytes, name_of, needs_of, records, runner, weights
from tests.sentences import raises

OURS = sorted(point.name for point in entry_points(group="fedcore.plugins") if point.dist.name.startswith("fedcore"))
OURS.remove("dp-sgd")  # refuses gin's BatchNorm


@pytest.fixture(scope="module")
def graphs(tmp_path_factory, tu):
    return tu.write(tmp_path_factory.mktemp("graphs"), "MUTAG", tu.rings_and_stars(60))


@pytest.fixture
def go(tmp_path, graphs):
    mutag = {"dataset": "mutag", "data_dir": graphs, "model": "gin", "alpha": 1.0, "clients": 5, "batch_size": 8}
    return runner(tmp_path, **{**mutag, "rounds": 2, "local_epochs": 2, "lr": 0.01})


def one_graph(labels, num_clients, **_):
    """Give client 0 one graph, client 1 nine (with batches of eight, one is left), the others the rest."""
    order = list(range(len(labels)))
    rest = order[10:]
    return [order[:1], order[1:10], *(rest[k :: num_clients - 2] for k in range(num_clients - 2))]


def singles(labels, num_clients, **_):
    return [[k] for k in range(num_clients)]


# The papers', and one of each other kind: of own models, of distillation, of prototypes alone.
QUICK = {"fedcd", "fedeccr", "fedproc", "fdcl", "fedcme", "moon", "ditto", "fedproto"}
OPTIONS = {"noisy-clients": {"inputs": 0.0, "labels": 0.5}}  # graphs are no inputs that take its noise


@pytest.mark.sampled(4)
@pytest.mark.parametrize("plugin", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in OURS])
def test_every_method_trains_on_graphs(go, plugin):
    noised = {"dp", "local-dp"} & {plugin}  # refuses BatchNorm's statistics beside noised weights
    options = {"clients": 3, "batch_size": 16, "client_test_fraction": 0.2, **needs_of(plugin)}
    result = go((plugin, OPTIONS.get(plugin, {})), buffers="local" if noised else "global", **options)
    assert all(not record.get("failures") for record in records(result)), records(result)
    held_out = [name for name in ("personal", "global_local") if name in result.metrics]
    assert held_out
    assert all(0 <= result.metrics[name]["accuracy"] <= 1 for name in held_out)
    start = build_model("gin", num_classes=2, input_shape=(3,), seed=0, projection=False)[0].state_dict()
    moved = [name for name, tensor in weights(result).items() if name in start and not torch.equal(tensor, start[name])]
    assert moved or plugin in ("fedamp", "fedproto", "fedtgp", "solo")  # there all of the model stays on the clients


@pytest.mark.slow
def test_gin_tells_rings_from_stars(go):
    result = go(partition="iid", clients=2, rounds=8, local_epochs=3, lr=0.05)
    assert result.metrics["global"]["accuracy"] == 1.0


@pytest.mark.slow
def test_graphs_give_the_same_bits_for_any_number_of_workers(go):
    assert len({model_bytes(go("moon", "ditto", workers=workers)) for workers in (0, 1, 2)}) == 1


def test_frozen_outputs_on_graphs_are_the_models_own(go):
    """FDCL at mu 0 is FedAvg bit by bit, also where its terms look at frozen models of graphs."""
    assert model_bytes(go(("fdcl", {"mu": 0.0}))) == model_bytes(go())


def test_a_client_with_one_graph_is_left_out_by_name_and_the_others_go_on(go):
    first = records(go(partition=name_of(one_graph), clients=4, rounds=1))[0]
    assert [(failure["client"], failure["kind"]) for failure in first["failures"]] == [(0, "no_steps")]
    message = first["failures"][0]["message"]
    assert message.startswith("client 0 has 1 samples and made no optimizer step; with BatchNorm in the model a batch")
    with raises(RoundFailedError, "0", "4"):
        go(partition=name_of(singles), clients=4)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"model": "mlp"}, ("'mutag'", "--model")),
        ({"model": "simple-cnn"}, ("--model",)),
        ({"augment": True}, ("'mutag'",)),
        ({"dataset": "digits"}, ("'digits'",)),
    ],
    ids=["mlp", "cnn", "augment", "digits"],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(go, tmp_path, options, named):
    with pytest.raises(ConfigError) as refused:  # its sentence lists the models that are installed
        go(**options, out=tmp_path / "run")
    assert all(word in str(refused.value) for word in named)
    assert not (tmp_path / "run").exists()


def test_a_split_that_the_model_does_not_have_is_refused(go):
    with raises(ConfigError, "fdcl.head_layers", 3):
        go(("fdcl", {"head_layers": 3}))


@pytest.mark.slow
def test_the_issues_command(graphs, tmp_path, cli):
    command = "train --plugin fdcl --dataset mutag --model gin --alpha 1.0 --rounds 2 --workers 0 --quiet"
    done = cli(*command.split(), "--data-dir", graphs, "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_auto_is_gin(go):
    assert RunDirectory(go(model="auto", rounds=1).directory).read_config().model == "gin"


def test_without_torch_geometric_the_message_says_what_to_install(monkeypatch, graphs):
    for name in [name for name in sys.modules if name.partition(".")[0] in ("fedcore_graph", "torch_geometric")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch_geometric", None)
    monkeypatch.setattr(sys, "meta_path", [_Absent("torch_geometric"), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "torch_geometric")
    with raises(PluginContractError, "'mutag'", "pip install torch_geometric"):
        load_dataset("mutag", graphs)


def test_without_this_package_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr("fedcore.base.registry.available", lambda kind: {})
    for look_up in (
        partial(load_dataset, "mutag", None),
        partial(build_model, "gin", num_classes=2, input_shape=(7,), seed=0, projection=False),
    ):
        with raises(UnknownNameError):
            look_up()


class _Absent:
    """Finds no module of a package, as if it were not installed."""

    def __init__(self, package):
        self.package = package

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


REAL = Path(os.environ.get("FEDCORE_TEST_DATA", "/nonexistent"))


@pytest.mark.slow
def test_fedavg_learns_the_real_mutag(go):
    if not (REAL / "MUTAG" / "raw").is_dir():
        pytest.skip("FEDCORE_TEST_DATA does not have it")
    result = go(data_dir=REAL, rounds=30, local_epochs=5, batch_size=32)
    assert result.metrics["global"]["accuracy"] > 13 / 19  # what the larger class alone gives
