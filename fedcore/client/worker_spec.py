"""A site as tensors and JSON, so that worker processes map the same memory instead of loading their own."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fedcore.base import registry
from fedcore.base.config import RunConfig
from fedcore.data import Dataset, IndexLists, Partition, Samples, load_dataset


@dataclass(frozen=True)
class WorkerSpec:
    """What an engine needs to set clients up, wherever they run.

    :param state_dir: folder of the clients' states.
    """

    config: RunConfig
    dataset: Dataset
    partition: Partition
    state_dir: Path


PARTS = ("train", "test")


def pack_worker_spec(spec: WorkerSpec) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split a site into tensors and JSON; samples of a class that workers cannot import are loaded by name again."""
    tensors: dict[str, Tensor] = {}
    for part, parts in zip(PARTS, (spec.partition.train, spec.partition.test), strict=True):
        tensors[f"partition/{part}/positions"] = parts.positions
        tensors[f"partition/{part}/offsets"] = parts.offsets
    meta = {
        "config": spec.config.model_dump(mode="json"),
        "state_dir": str(spec.state_dir),
        "info": spec.partition.info,
        "dataset": None,
    }
    dataset = spec.dataset
    samples = dict(zip(PARTS, (dataset.train, dataset.test), strict=True))
    classes = {part: _name_of(type(each)) for part, each in samples.items()}
    if None not in classes.values():
        meta["dataset"] = {
            "name": dataset.name,
            "num_classes": dataset.num_classes,
            "input_shape": list(dataset.input_shape),
            "augmentation": dataset.augmentation,
            "classes": classes,
            **{part: each.meta() for part, each in samples.items()},
        }
        for part, each in samples.items():
            tensors.update({f"data/{part}/{name}": tensor for name, tensor in each.tensors().items()})
    return tensors, meta


def unpack_worker_spec(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> WorkerSpec:
    """Join what :func:`pack_site` split, without copying."""
    config = RunConfig.model_validate(meta["config"])
    train, test = (
        IndexLists(tensors[f"partition/{part}/positions"], tensors[f"partition/{part}/offsets"]) for part in PARTS
    )
    dataset = _dataset(config, tensors, meta)
    return WorkerSpec(config, dataset, Partition(train, test, meta["info"]), Path(meta["state_dir"]))


def _dataset(config: RunConfig, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Dataset:
    described = meta["dataset"]
    if described is None:
        return load_dataset(config.dataset, config.data_dir)

    def samples(part: str) -> Samples:
        prefix = f"data/{part}/"
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        cls: type[Samples] = registry.resolve("samples", described["classes"][part])
        return cls.from_tensors(own, described[part])

    return Dataset(
        name=described["name"],
        train=samples("train"),
        test=samples("test"),
        num_classes=described["num_classes"],
        input_shape=tuple(described["input_shape"]),
        augmentation=described["augmentation"],
    )


def _name_of(cls: type) -> str | None:
    """Return the name by which another process imports a class; None where it cannot."""
    importable = cls.__module__ != "__main__" and getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls
    return f"module:{cls.__module__}.{cls.__name__}" if importable else None
