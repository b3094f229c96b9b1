"""Partitioners with the prefix ``flwr:``, compared with direct calls of flwr-datasets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedcore import ConfigError, RunConfig, UnknownNameError, generator, run
from fedcore.data import load_dataset, make_partition

pytest.importorskip("flwr_datasets", reason="fedcore-flower[partitioners] is not installed")

DIGITS = load_dataset("digits")
LABELS = DIGITS.train.labels.numpy()


def parts(name, clients=5, dataset=DIGITS, **options):
    made = make_partition(dataset, RunConfig(partition=name, clients=clients, **{"alpha": 0.3, "seed": 3, **options}))
    return [part.tolist() for part in made.train]


def by_the_library(cls, **options):
    """Return the parts of a partitioner of the library, on the samples in the order of the run's stream."""
    from datasets import Dataset

    order = torch.randperm(len(LABELS), generator=generator(3, "partition")).tolist()
    made = cls(**options)
    made.dataset = Dataset.from_dict({"label": LABELS[order], "at": order})
    return [made.load_partition(k)["at"][:] for k in range(made.num_partitions)]


def test_pathological_clients_have_two_classes():
    from flwr_datasets.partitioner import PathologicalPartitioner

    name = "flwr:pathological?num_classes_per_partition=2&class_assignment_mode=deterministic"
    found = parts(name)
    assert [sorted(set(LABELS[part])) for part in found] == [[0, 1], [1, 2], [2, 3], [3, 4], [4, 5]]
    how = {"num_partitions": 5, "partition_by": "label", "num_classes_per_partition": 2, "seed": 3}
    assert found == by_the_library(PathologicalPartitioner, **how, class_assignment_mode="deterministic")


def test_alpha_and_seed_are_the_runs_unless_they_are_named():
    from flwr_datasets.partitioner import DirichletPartitioner

    how = {"num_partitions": 5, "partition_by": "label", "seed": 3}
    assert parts("flwr:dirichlet") == by_the_library(DirichletPartitioner, **how, alpha=0.3)
    assert parts("flwr:dirichlet?alpha=1.0e+2&seed=7") == by_the_library(
        DirichletPartitioner, **{**how, "seed": 7}, alpha=100
    )


@pytest.mark.parametrize(
    ("name", "used"), [("flwr:dirichlet", True), ("flwr:dirichlet?alpha=0.3", False), ("flwr:iid", False)]
)
def test_an_alpha_without_effect_is_noted(name, used, tmp_path):
    config = RunConfig(
        partition=name, alpha=0.3, clients=5, model="mlp", rounds=1, workers=0, out=str(tmp_path / "run")
    )
    notes = []
    run(config, notify=lambda event, values: notes.extend(values["notes"]) if event == "start" else None)
    assert any("--alpha 0.3 has no effect" in note for note in notes) == (not used)


def test_linear_sizes_and_lists_of_sizes():
    sizes = [len(part) for part in parts("flwr:linear")]
    assert np.diff(sizes) == pytest.approx(len(LABELS) / 15, abs=5)
    assert [len(part) for part in parts("flwr:size?partition_sizes=[100,200,300]", clients=3)] == [100, 200, 300]


def test_natural_ids_are_the_samples_sources():
    sources = torch.arange(len(LABELS)) % 4
    dataset = replace(DIGITS, sources=sources)
    found = parts("flwr:natural-id", clients=4, dataset=dataset)
    assert sorted(sorted(part) for part in found) == [(sources == k).nonzero().flatten().tolist() for k in range(4)]


def test_a_run_on_some_of_the_samples(tmp_path):
    result = run(
        partition="flwr:shard?num_shards_per_partition=2",
        samples=300,
        client_test_fraction=0.2,
        clients=5,
        rounds=1,
        local_epochs=1,
        workers=0,
        out=tmp_path / "run",
        progress=False,
    )
    assert result.metrics["global_local"]["clients"] == 5
    assert result.config.partition == "flwr:shard?num_shards_per_partition=2"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("flwr:patological", "Did you mean 'flwr:pathological'"),
        ("flwr:vertical-even", "unknown partitioner"),
        ("flwr:pathological?classes=2", r"unknown argument 'classes'.*\(of flwr:pathological\)"),
        ("flwr:pathological?num_classes_per_partition=2&num_classes_per_partition=3", "stands twice"),
        ("flwr:pathological", "num_classes_per_partition"),
        ("flwr:pathological?num_classes_per_partition=99", "greater than the number of unique classes"),
        ("flwr:size?partition_sizes=[9,9]", r"--clients is 5, but flwr:size makes 2 parts"),
        ("flwr:natural-id", "the data set has no column 'source'"),
    ],
)
def test_wrong_arguments_are_refused(name, problem):
    with pytest.raises((ConfigError, UnknownNameError), match=problem):
        parts(name)
