"""A workload of fedcore's benchmark as files, and those files as a data set of fedcore's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import exported
import torch
from exported import Exported, Job

from fedcore import RunConfig
from fedcore.data import Dataset, ResidentSamples
from fedcore.runs.resolve import resolve_config, resolve_partition
from fedcore_bench.measure import configured
from fedcore_bench.reference import make_model
from fedcore_bench.workloads import Workload

PARTITION = "partition.json"
NEEDED = (
    "model", "projection", "clients", "participation", "local_epochs", "local_steps", "batch_size", "lr", "momentum",
    "weight_decay", "eval_every", "seed",
)  # fmt: skip


def export(workload: Workload, folder: Path, **options: Any) -> Exported:
    """Write a workload's data, partition, initial weights and settings into a folder.

    :param options: of RunConfig, such as ``data_dir``.
    """
    config, dataset = resolve_config(configured(workload, {"device": "cpu", **options}))
    partition = resolve_partition(config, dataset)
    partition.save(folder / PARTITION)
    train, test = dataset.train, dataset.test
    model = make_model(config, dataset.num_classes, dataset.input_shape)
    values = Exported(
        train.gather(torch.arange(len(train))),  # normalised
        train.labels,
        test.gather(torch.arange(len(test))),
        test.labels,
        [held.clone() for held in partition.train],
        {name: tensor.detach() for name, tensor in model.state_dict().items()},
        {name: getattr(config, name) for name in NEEDED} | {"name": dataset.name, "num_classes": dataset.num_classes},
    )
    values.save(folder)
    return values


def dataset(data_dir: Path) -> Dataset:
    """Return the exported data set; named by :func:`config_of`."""
    loaded = exported.load(data_dir)
    channels = loaded.images.shape[1]
    train, test = (
        ResidentSamples(images, labels, [0.0] * channels, [1.0] * channels)
        for images, labels in ((loaded.images, loaded.labels), (loaded.test_images, loaded.test_labels))
    )
    return Dataset(loaded.settings["name"], train, test, loaded.settings["num_classes"], tuple(loaded.images.shape[1:]))


def config_of(job: Job) -> RunConfig:
    """Return fedcore's configuration of an exported workload."""
    settings = exported.load(job.folder).settings
    values = {name: settings[name] for name in NEEDED}
    return RunConfig.create(
        {
            **values,
            "dataset": f"module:{__name__}.dataset",
            "data_dir": job.folder,
            "partition": str(job.folder / PARTITION),
            "rounds": job.rounds,
            "workers": job.cores,
            "stack": job.stack if job.stack == "auto" else int(job.stack),
            "device": "cpu",
            "out": job.folder / "run",
        }
    )
