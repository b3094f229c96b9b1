"""What a worker is set up with, packed so that worker processes map the same memory instead of loading data again."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedcore.base import objects, registry
from fedcore.base.config import RunConfig
from fedcore.base.tensors import flatten, unflatten
from fedcore.data import Dataset, IndexLists, Partition, PublicSamples, Samples, load_dataset
from fedcore.data.public import public_rows, with_public


@dataclass(frozen=True)
class WorkerSpec:
    """What an engine needs to set up clients in any process.

    :param state_dir: folder of the clients' states.
    """

    config: RunConfig
    dataset: Dataset
    partition: Partition
    state_dir: Path


PARTS = ("train", "test")
PUBLIC = "public"


def pack_worker_spec(spec: WorkerSpec, *, local: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split a specification into tensors and JSON.

    Samples of a class that workers cannot import are not packed: :func:`unpack_worker_spec` loads the data set again.

    :param local: for workers on this machine: a partition that stays in a file is not packed, they read that file.
    """
    file = spec.partition.file if local else None
    lists = dict(zip(PARTS, (spec.partition.train, spec.partition.test), strict=True)) if file is None else {}
    partition = {part: {"positions": each.positions, "offsets": each.offsets} for part, each in lists.items()}
    data: dict[str, Mapping[str, Tensor]] = {}
    meta = {
        "config": spec.config.model_dump(mode="json"),
        "state_dir": str(spec.state_dir),
        "info": spec.partition.info,
        "partition_file": None if file is None else str(file),
        "dataset": None,
        "definitions": objects.current().plain(),
    }
    dataset = spec.dataset
    samples = dict(zip(PARTS, (dataset.train, dataset.test), strict=True))
    if dataset.public is not None and dataset.public.samples is not dataset.train:
        samples[PUBLIC] = dataset.public.samples
    classes = {part: name_of_class(type(each)) for part, each in samples.items()}
    if None not in classes.values():
        meta["dataset"] = {
            "name": dataset.name,
            "num_classes": dataset.num_classes,
            "input_shape": list(dataset.input_shape),
            "augmentation": dataset.augmentation,
            "classes": classes,
            **{part: each.meta() for part, each in samples.items()},
        }
        data = {part: each.tensors() for part, each in samples.items()}
    tensors, _ = flatten({"partition": flatten(partition)[0], "data": flatten(data)[0]})
    return tensors, meta


def unpack_worker_spec(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> WorkerSpec:
    """Join what :func:`pack_worker_spec` split, without copying; objects of the caller's program are defined first."""
    objects.define(meta["definitions"])
    config, groups = RunConfig.model_validate(meta["config"]), unflatten(tensors)
    dataset = _dataset(config, unflatten(groups.get("data", {})), meta["dataset"])
    if meta["partition_file"] is not None:
        partition = Partition.stored(Path(meta["partition_file"]), meta["info"])
    else:
        lists = unflatten(groups["partition"])
        train, test = (IndexLists(lists[part]["positions"], lists[part]["offsets"]) for part in PARTS)
        partition = Partition(train, test, meta["info"])
    return WorkerSpec(config, dataset, partition, Path(meta["state_dir"]))


def _dataset(
    config: RunConfig, tensors: Mapping[str, Mapping[str, Tensor]], described: Mapping[str, Any] | None
) -> Dataset:
    if described is None:
        return with_public(load_dataset(config.dataset, config.data_dir), config.public, config.seed, config.data_dir)

    def samples(part: str) -> Samples:
        cls: type[Samples] = registry.resolve("samples", described["classes"][part])
        return cls.from_tensors(tensors.get(part, {}), described[part])

    train, public = samples("train"), None
    if PUBLIC in described["classes"]:
        others = samples(PUBLIC)
        public = PublicSamples(others, torch.arange(len(others)))
    elif config.public is not None:  # a share of the training set
        public = PublicSamples(train, public_rows(train.labels, config.public, config.seed))
    return Dataset(
        name=described["name"],
        public=public,
        train=train,
        test=samples("test"),
        num_classes=described["num_classes"],
        input_shape=tuple(described["input_shape"]),
        augmentation=described["augmentation"],
    )


def name_of_class(cls: type) -> str | None:
    """Return the name by which another process imports a class; None where it cannot."""
    importable = cls.__module__ != "__main__" and getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls
    return f"module:{cls.__module__}.{cls.__name__}" if importable else None
