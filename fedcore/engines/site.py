"""A site as tensors and JSON, so that worker processes map the same memory instead of loading their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fedcore.config import RunConfig
from fedcore.data import Dataset, Partition, Parts, ResidentSamples, load_dataset
from fedcore.engines.base import Site


def pack_site(site: Site) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split a site into tensors and JSON; data that are not resident images are loaded by name again."""
    tensors: dict[str, Tensor] = {}
    for part, parts in (("train", site.partition.train), ("test", site.partition.test)):
        tensors[f"partition/{part}/positions"] = parts.positions
        tensors[f"partition/{part}/offsets"] = parts.offsets
    meta = {
        "config": site.config.model_dump(mode="json"),
        "state_dir": str(site.state_dir),
        "info": site.partition.info,
        "dataset": None,
    }
    dataset = site.dataset
    if isinstance(dataset.train, ResidentSamples) and isinstance(dataset.test, ResidentSamples):
        meta["dataset"] = {
            "name": dataset.name,
            "num_classes": dataset.num_classes,
            "input_shape": list(dataset.input_shape),
            "augmentation": dataset.augmentation,
            "train": dataset.train.meta(),
            "test": dataset.test.meta(),
        }
        for part, samples in (("train", dataset.train), ("test", dataset.test)):
            tensors.update({f"data/{part}/{name}": tensor for name, tensor in samples.tensors().items()})
    return tensors, meta


def unpack_site(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Site:
    """Join what :func:`pack_site` split, without copying."""
    config = RunConfig.model_validate(meta["config"])
    train, test = (
        Parts(tensors[f"partition/{part}/positions"], tensors[f"partition/{part}/offsets"])
        for part in ("train", "test")
    )
    dataset = _dataset(config, tensors, meta)
    return Site(config, dataset, Partition(train, test, meta["info"]), Path(meta["state_dir"]))


def _dataset(config: RunConfig, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Dataset:
    described = meta["dataset"]
    if described is None:
        return load_dataset(config.dataset, config.data_dir)

    def samples(part: str) -> ResidentSamples:
        prefix = f"data/{part}/"
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        return ResidentSamples.from_tensors(own, described[part])

    return Dataset(
        name=described["name"],
        train=samples("train"),
        test=samples("test"),
        num_classes=described["num_classes"],
        input_shape=tuple(described["input_shape"]),
        augmentation=described["augmentation"],
    )
