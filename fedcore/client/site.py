"""The site that a worker is set up with. It is packed so that worker processes map the same memory for the data."""

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
from fedcore.data import Dataset, IndexLists, Partition, PublicSamples, Samples
from fedcore.data.assign import public_rows


@dataclass(frozen=True)
class ClientSite:
    """Everything that an engine needs to set up clients in any process."""

    config: RunConfig
    dataset: Dataset
    partition: Partition
    state_dir: Path
    """The folder of the clients' states."""


PARTS = ("train", "test")
PUBLIC = "public"
SAMPLES = "samples"
"""The kind under which the registry finds classes of samples."""


def pack_site(site: ClientSite) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split a site into tensors and JSON. :func:`pack_objects` packs the objects that are neither."""
    lists = dict(zip(PARTS, (site.partition.train, site.partition.test), strict=True))
    partition = {part: {"positions": each.positions, "offsets": each.offsets} for part, each in lists.items()}
    dataset, samples = site.dataset, _samples(site.dataset)
    meta = {
        "config": site.config.model_dump(mode="json"),
        "state_dir": str(site.state_dir),
        "info": site.partition.info,
        "dataset": {
            "name": dataset.name,
            "num_classes": dataset.num_classes,
            "input_shape": list(dataset.input_shape),
            "augmentation": dataset.augmentation,
            "classes": {part: _import_name(type(each)) for part, each in samples.items()},
            **{part: each.meta() for part, each in samples.items()},
        },
    }
    data = {part: each.tensors() for part, each in samples.items()}
    tensors, _ = flatten({"partition": flatten(partition)[0], "data": flatten(data)[0]})
    return tensors, meta


def pack_objects(site: ClientSite) -> bytes:
    """Return the objects of a site that are neither tensors nor JSON, for :func:`unpack_objects` in another process.

    They are the objects that a program passed to its run, and the classes of samples that no import finds.
    """
    samples = {part: type(each) for part, each in _samples(site.dataset).items()}
    own = {(SAMPLES, part): cls for part, cls in samples.items() if _import_name(cls) is None}
    return objects.pickled(own)


def unpack_objects(sent: bytes) -> None:
    """Make the objects of the parent process known in this process; see :func:`fedcore.base.objects.lend`."""
    objects.lend(sent)


def unpack_site(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> ClientSite:
    """Join a site that :func:`pack_site` split, without copying.

    Call :func:`fedcore.engines.unpack_objects` first.
    """
    config, groups = RunConfig.model_validate(meta["config"]), unflatten(tensors)
    dataset = _dataset(config, unflatten(groups.get("data", {})), meta["dataset"])
    lists = unflatten(groups["partition"])
    train, test = (IndexLists(lists[part]["positions"], lists[part]["offsets"]) for part in PARTS)
    return ClientSite(config, dataset, Partition(train, test, meta["info"]), Path(meta["state_dir"]))


def _samples(dataset: Dataset) -> dict[str, Samples]:
    samples = dict(zip(PARTS, (dataset.train, dataset.test), strict=True))
    if dataset.public is not None and dataset.public.samples is not dataset.train:
        samples[PUBLIC] = dataset.public.samples
    return samples


def _dataset(config: RunConfig, tensors: Mapping[str, Mapping[str, Tensor]], described: Mapping[str, Any]) -> Dataset:
    def samples(part: str) -> Samples:
        cls: type[Samples] = registry.resolve(SAMPLES, described["classes"][part] or part)
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


def _import_name(cls: type) -> str | None:
    """Return the name with which another process can import a class; None if it cannot."""
    importable = cls.__module__ != "__main__" and getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls
    return f"module:{cls.__module__}.{cls.__name__}" if importable else None
