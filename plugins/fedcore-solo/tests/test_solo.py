"""SOLO: nobody sends, nobody averages; how its clients are evaluated."""

from __future__ import annotations

import re
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedcore
from fedcore import Plugin, RunConfig, SplitModel, hookimpl
from fedcore.data import Dataset, ResidentSamples, load_dataset, load_partition
from fedcore.errors import FedcoreError, PluginConflictError
from fedcore.evaluation import evaluate
from fedcore.functional import proximal_term
from fedcore.local import train_batch
from fedcore.rundir import RunDirectory
from fedcore.serial import read_tensors
from fedcore.testing import forbid_host_sync

README = Path(__file__).parents[1] / "README.md"
HERE = f"module:{__name__}."
DIGITS = {"workers": 0, "device": "cpu", "clients": 3, "rounds": 2, "local_epochs": 1, "batch_size": 64}


@pytest.fixture(scope="module")
def go(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")

    def run(plugins, notify=None, **options):
        config = RunConfig(**{**DIGITS, **options}, plugins=plugins, out=tempfile.mkdtemp(dir=root))
        return fedcore.run(config, notify=notify)

    return run


def weights(result):
    return read_tensors(result.directory / "model.safetensors")[0]


def lines(result):
    return RunDirectory(result.directory).read_metrics()


def committed(result):
    return RunDirectory(result.directory).checkpoints.load()


def own(result, client):
    """Return a client's own model as it was committed; None where it never took part."""
    manifest = committed(result).manifest
    if client not in manifest:
        return None
    state = RunDirectory(result.directory).clients.read(client, manifest[client])["fedcore"]
    return {name.removeprefix("personal."): tensor for name, tensor in state.items()}


def equal(one, other) -> bool:
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


class CohortOptions(fedcore.PluginOptions):
    rounds: list[list[int]] = []


class Cohorts(Plugin):
    """Prescribes every round's cohort."""

    Options = CohortOptions

    @hookimpl
    def select_clients(self, server):
        return self.options.rounds[server.round]


# --- training ----------------------------------------------------------------------------------------------------


class Point(nn.Module):
    """Features are the parameter, whatever the input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return self.w.expand(len(x), -1)


class PointModel(SplitModel):
    def make_classifier(self, feature_dim):
        return nn.Identity()


def at_origin(num_classes, input_shape):
    return PointModel(Point(), 2, 2)


def two_centres(data_dir=None):
    """The TOY of baselines.md: n_1 = 1 at (2, 0), n_2 = 3 at (0, 4)."""
    points = torch.tensor([[2.0, 0.0], [0.0, 4.0], [0.0, 4.0], [0.0, 4.0]]).view(4, 1, 1, 2)
    samples = ResidentSamples(points, torch.tensor([0, 1, 0, 1]), [0.0], [1.0])
    return Dataset("toy", samples, samples, num_classes=2, input_shape=(1, 1, 2))


def first_and_rest(labels, num_clients, **_):
    return [np.array([0]), np.arange(1, len(labels))]


class Quadratic(Plugin):
    """f_i(w) = |w - centre_i|^2 / 2."""

    @hookimpl
    def task_loss(self, step):
        return 0.5 * (step.logits - step.x.flatten(1)).pow(2).sum(dim=1).mean()


TOY = {
    "dataset": HERE + "two_centres",
    "model": HERE + "at_origin",
    "partition": HERE + "first_and_rest",
    "clients": 2,
    "local_epochs": 2,
    "lr": 0.5,
    "momentum": 0.0,
    "weight_decay": 0.0,
}


def test_the_toy_by_hand(go):
    """K = 2 steps of lr 0.5 per round: each client goes 3/4 of the way to its own centre, from where it was."""
    for rounds, first, second in ((1, [1.5, 0.0], [0.0, 3.0]), (2, [1.875, 0.0], [0.0, 3.75])):
        result = go({HERE + "Quadratic": {}, "solo": {}}, **TOY, rounds=rounds)
        assert own(result, 0)["encoder.base.w"].tolist() == first
        assert own(result, 1)["encoder.base.w"].tolist() == second
        assert weights(result)["encoder.base.w"].tolist() == [0.0, 0.0]


def test_one_client_is_the_fedavg_of_one_client(go):
    """Nothing is lost by being alone: the same batches, the same steps, the same bits."""
    options = {"clients": 1, "rounds": 3, "momentum": 0.9, "lr_decay": 0.9}
    assert equal(own(go({"solo": {}}, **options), 0), weights(go({}, **options)))


def test_what_others_hold_does_not_reach_a_client(go):
    """Client 0 trains to the same bits beside two clients and beside two that make other steps altogether."""
    beside = own(go({"solo": {}}), 0)
    assert equal(own(go({"solo": {}, HERE + "Different": {}}), 0), beside)
    assert not equal(own(go({"solo": {}, HERE + "Different": {}}), 1), own(go({"solo": {}}), 1))


class Different(Plugin):
    """Clients other than 0 add a term of their own."""

    @hookimpl
    def local_loss(self, step):
        return fedcore.Loss(step.logits.square().mean()) if step.client.id else None


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_long_round_is_many_short_ones_but_for_momentum(go, momentum):
    """MOON trains in one call: --rounds 1. Here with full batches, whose order does not matter."""
    options = {"batch_size": 5000, "momentum": momentum, "model": HERE + "linear"}
    long, short = (
        go({"solo": {}}, **options, local_epochs=6, rounds=1),
        go({"solo": {}}, **options, local_epochs=2, rounds=3),
    )
    differences = [(a - b).abs().max() for a, b in zip(own(long, 0).values(), own(short, 0).values(), strict=True)]
    assert (max(differences) < 1e-5) == (momentum == 0.0)


def linear(num_classes, input_shape):
    return SplitModel(nn.Sequential(nn.Flatten()), 64, num_classes)


def with_buffers(num_classes, input_shape):
    base = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU())
    return SplitModel(base, 16, num_classes)


def test_nothing_travels_and_the_global_model_stays_the_initial_one(go):
    result = go({"solo": {}}, model=HERE + "with_buffers")
    assert committed(result).ledger["up"] == committed(result).ledger["down"] == 0
    start = go({"solo": {}}, model=HERE + "with_buffers", rounds=1, lr=1e-30)
    assert equal(weights(result), weights(start))
    statistics = [own(result, client)["encoder.base.2.running_mean"] for client in range(3)]
    assert not any(torch.equal(a, b) for a, b in pairwise(statistics))
    assert own(result, 0)["encoder.base.2.num_batches_tracked"] > 0


def test_a_client_keeps_its_model_over_rounds_of_absence(go):
    cohorts = {"rounds": [[0, 1], [1], [1], [0]]}
    found = {rounds: go({"solo": {}, HERE + "Cohorts": cohorts}, rounds=rounds, lr=0.01) for rounds in (1, 3, 4)}
    assert equal(own(found[3], 0), own(found[1], 0))
    assert not equal(own(found[4], 0), own(found[3], 0))
    distance = [
        sum((w - weights(found[1])[name]).square().sum() for name, w in own(result, 0).items())
        for result in (found[1], found[4])
    ]
    assert distance[1] > distance[0] > 0, "the second participation goes on from the first"
    assert own(found[4], 2) is None


def test_the_same_seed_gives_the_same_bits_also_after_a_stop(go):
    options = {"rounds": 4, "clients": 4, "participation": 0.5}
    straight, where = go({"solo": {}}, **options), {}

    def stop(event, details):
        where.update(details if event == "start" else {})
        if event == "round" and details["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(FedcoreError, match="interrupted"):
        go({"solo": {}}, notify=stop, **options)
    resumed = fedcore.resume(where["directory"], allow_code=True)
    took_part = list(committed(straight).manifest)
    assert took_part == list(committed(resumed).manifest)
    assert all(equal(own(straight, client), own(resumed, client)) for client in took_part)


# --- evaluation --------------------------------------------------------------------------------------------------


def one_hot(data_dir=None):
    """Four classes whose samples are their one-hot vectors; the test set holds 3, 1, 2 and 4 of them."""

    def samples(labels):
        labels = torch.tensor(labels)
        return ResidentSamples(torch.eye(4)[labels].view(-1, 1, 1, 4), labels, [0.0], [1.0])

    train = samples([3] * 4 + [3, 1] * 4 + [3, 2] * 4)
    return Dataset("one-hot", train, samples([0] * 3 + [1] + [2] * 2 + [3] * 4), num_classes=4, input_shape=(1, 1, 4))


def by_blocks(labels, num_clients, **_):
    """Classes {3}, {3, 1} and {3, 2}: 4, 5 and 6 of 10 test samples."""
    return [np.arange(4), np.arange(4, 12), np.arange(12, 20)][:num_clients]


def on_one_hot(num_classes, input_shape):
    return SplitModel(nn.Sequential(nn.Flatten()), 4, num_classes)


def test_the_figure_of_moon_by_hand(go):
    """Accuracies .4, .5 and .6 on the global test set: .5 +- .0816497 (ddof 0); missing classes cap them."""
    options = {"dataset": HERE + "one_hot", "partition": HERE + "by_blocks", "model": HERE + "on_one_hot"}
    result = go({"solo": {}}, **options, rounds=1, local_epochs=200, lr=0.5)
    found = result.metrics["personal_global"]
    assert found["accuracy"] == pytest.approx(0.5, abs=1e-12)
    assert found["std"] == pytest.approx(0.0816497, abs=1e-7)
    assert found["clients"] == 3
    assert found["untrained"] == 0


def test_each_client_is_evaluated_with_its_own_model_and_untrained_ones_with_the_initial(go):
    result = go(
        {"solo": {}, HERE + "Cohorts": {"rounds": [[0], [0]]}}, client_test_fraction=0.3, rounds=2, local_epochs=3
    )
    data = load_dataset("digits", None)
    partition = load_partition(RunDirectory(result.directory).partition_file, data)
    start, trained = weights(result), own(result, 0)
    hits, totals, on_test = 0, 0, []
    for client, part in enumerate(partition.test):
        model = result.model
        model.load_state_dict(start if client else trained)
        counts = evaluate(model, data.train, 10, torch.device("cpu"), indices=part)
        hits, totals = hits + sum(counts["correct"]), totals + sum(counts["total"])
        on_test.append(sum(evaluate(model, data.test, 10, torch.device("cpu"))["correct"]) / len(data.test))
    metrics = result.metrics
    assert metrics["personal"]["accuracy"] == pytest.approx(hits / totals, abs=1e-12)
    assert metrics["personal_global"]["accuracy"] == pytest.approx(np.mean(on_test), abs=1e-12)
    assert metrics["personal_global"]["std"] == pytest.approx(np.std(on_test), abs=1e-12)
    assert metrics["personal"]["untrained"] == metrics["personal_global"]["untrained"] == 2
    assert on_test[0] > on_test[1]
    assert on_test[1] == on_test[2]


def test_there_is_no_global_model_to_evaluate(go):
    metrics = go({"solo": {}}, client_test_fraction=0.2, rounds=1).metrics
    assert metrics["global"] is None
    assert "stay on the clients" in metrics["global_reason"]
    assert "global_local" not in metrics


# --- beside other plugins ----------------------------------------------------------------------------------------


def test_a_step_does_not_wait_for_the_device(go, monkeypatch):
    seen = []

    def watching(*arguments):
        with forbid_host_sync():
            batch = train_batch(*arguments)
        seen.append(set(batch.depends_on))
        return batch

    monkeypatch.setattr("fedcore.local.train_batch", watching)
    go({"solo": {}}, rounds=1)
    assert seen
    assert not any(seen)


def test_a_term_on_shared_parameters_has_none_left(go):
    result = go({"solo": {}, HERE + "Proximal": {}})
    assert equal(own(result, 0), own(go({"solo": {}}), 0))


class Proximal(Plugin):
    @hookimpl
    def local_loss(self, step):
        assert step.parameters == step.reference == []
        return fedcore.Loss(proximal_term(step.parameters, step.reference))


class KeepsClassifier(Plugin):
    @hookimpl
    def personal_parameters(self):
        return ["classifier.*"]


class Owns(Plugin):
    owns = ("classifier.*",)


class Corrects(Plugin):
    corrects = ("classifier.*",)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ("KeepsClassifier", "both implement personal_parameters"),
        ("Owns", "which 'solo' keeps on each client"),
        ("Corrects", "which 'solo' keeps on each client"),
    ],
)
def test_what_needs_a_shared_model_is_refused(go, other, reason):
    with pytest.raises(PluginConflictError, match=reason):
        go({"solo": {}, HERE + other: {}})


def test_there_are_no_options(go):
    with pytest.raises(FedcoreError, match="mu"):
        go({"solo": {"mu": 1}})


# --- the method card ---------------------------------------------------------------------------------------------


def test_the_readmes_commands_are_valid():
    commands = re.findall(r"fedcore train (--[^`\n]+)", README.read_text(encoding="utf-8"))
    assert len(commands) == 2
    for command in commands:
        flags = re.findall(r"--(\S+)((?: (?!--)\S+)?)", command)
        values = {flag.replace("-", "_"): value.strip() or True for flag, value in flags if flag != "plugin"}
        plugins = [value.strip() for flag, value in flags if flag == "plugin"]
        assert "solo" in RunConfig.create({**values, "plugins": plugins}).plugins
