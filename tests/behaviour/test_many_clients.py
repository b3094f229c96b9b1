"""What a run costs must not depend on how many clients are registered: cohorts, manifests, start-up."""

import json
import time

import pytest
import torch

import fedcore
from fedcore.base.seeding import choose, generator
from fedcore.client.messages import ClientSite
from fedcore.data import Dataset, ResidentSamples
from fedcore.runs.api import resume
from fedcore.runs.resolve import resolve_config, resolve_partition
from fedcore.runs.training import Experiment
from fedcore_bench import scale
from fedcore_bench.measure import engine
from fedcore_bench.scale import SCALE, peak_memory, same_rounds, scaled_config
from fedcore_workers import pack_site, unpack_site
from tests import support


@pytest.mark.parametrize("population", [1, 2, 999, 25_000, 100_003, 1_000_000])
@pytest.mark.parametrize("count", [1, 7, 50])
def test_a_cohort_is_the_head_of_a_random_permutation(population, count):
    for seed in range(3):
        chosen = choose(population, count, generator(seed, "cohort"))
        assert chosen == torch.randperm(population, generator=generator(seed, "cohort"))[:count].tolist()


def test_a_site_carries_the_partition_as_it_is(tmp_path):
    config, dataset = resolve_config(support.config(tmp_path, clients=5, client_test_fraction=0.2))
    partition = resolve_partition(config, dataset)
    partition.train.size(0)  # it caches an array
    packed = pack_site(ClientSite(config, dataset, partition, tmp_path))
    assert packed["site"].nbytes < 8_000
    again = unpack_site(packed).partition
    assert (again.sha256, again.info) == (partition.sha256, partition.info)


@pytest.mark.slow
def test_a_million_registered_clients_take_little_memory():
    """The partition takes 48 bytes per client. While it is written it is in memory up to four times.

    A worker maps it, which counts here although all have it once.
    """
    few, many = (peak_memory(scaled_config("fedavg", n, {"workers": 1, "device": "cpu"}), 2) for n in (1000, 1_000_000))
    assert (many.parent - few.parent) * 2**20 < 4.5 * 48 * 1_000_000
    assert (many.worker - few.worker) * 2**20 < 64 * 1_000_000


TINY = {"workers": 0, "device": "cpu", "dataset": "digits"}


def test_clients_that_share_windows_of_samples(tmp_path):
    config, dataset = resolve_config(scaled_config("fedavg", 150, {**TINY, "seed": 4}))
    partition = resolve_partition(config, dataset)
    assert set(partition.train.sizes.tolist()) == {10}
    held = partition.train.positions
    assert held[: len(dataset.train)].unique().numel() == len(dataset.train)
    assert torch.equal(held[len(dataset.train) :], held[: 1500 - len(dataset.train)])


@pytest.mark.parametrize("method", ["fedavg", "moon"])
def test_repeated_rounds_draw_the_same_clients_and_these_go_on(method, monkeypatch):
    monkeypatch.setattr(scale, "COHORT", 6)
    with engine(scaled_config(method, 60, TINY)) as ours:
        same_rounds(ours, 2)
        before = dict(ours.state.manifest)
        same_rounds(ours, 2)
        records = ours.experiment.directory.metrics.read()
        assert [record["cohort"] for record in records[:2]] == [record["cohort"] for record in records[2:]]
        assert dict(ours.state.manifest) == before
        assert {version is None for version in before.values()} == {method == "fedavg"}
        assert ("contrast" in str(records[2]["losses"])) == (method == "moon")


def test_rounds_come_again_once_their_checkpoint_is_on_the_disk(monkeypatch):
    """It deletes the versions of earlier rounds, which those that come again write."""
    settled, one_round = [], Experiment.one_round

    def noted(experiment, state):
        settled.append(experiment._writing is None)
        return one_round(experiment, state)

    monkeypatch.setattr(Experiment, "one_round", noted)
    with engine(scaled_config("fedavg", 6, TINY)) as ours:
        same_rounds(ours, 2)
        same_rounds(ours, 2)
    assert settled == [True, False, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("partition", [SCALE.config["partition"], "iid"])
def test_a_run_of_100_000_clients_starts_within_seconds(tmp_path, partition):
    options = {"partition": partition, "out": tmp_path / "run", "rounds": 1, "workers": 0, "device": "cpu"}
    if partition == "iid":
        options["dataset"] = f"module:{__name__}.many_samples"
    config = scaled_config("fedavg", 100_000, options)
    began = time.perf_counter()
    result = fedcore.run(config)
    assert time.perf_counter() - began < 30
    assert len(support.lines(result)[0]["cohort"]) == 50
    content = json.loads((result.directory / "partition.json").read_text())
    assert len(content["train"]) == 100_000
    began = time.perf_counter()
    resume(result.directory, allow_code=True)
    assert time.perf_counter() - began < 30


def many_samples(data_dir=None):
    stream = torch.Generator().manual_seed(0)
    train, test = (
        ResidentSamples(torch.randn(n, 1, 4, 4, generator=stream), torch.arange(n) % 10, [0.0], [1.0])
        for n in (1_000_000, 100)
    )
    return Dataset("many", train, test, 10, (1, 4, 4))
