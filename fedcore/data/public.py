"""Public samples: those that belong to no client, for methods that distil or calibrate with them (``--public``)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fedcore.base.config import public_share
from fedcore.base.errors import ConfigError
from fedcore.base.seeding import numpy_generator
from fedcore.data.assign import draw_by_class
from fedcore.data.datasets import load_dataset
from fedcore.data.samples import Dataset, PublicSamples


def with_public(dataset: Dataset, public: str | None, seed: int, data_dir: Path | None) -> Dataset:
    """Return the data set with its public samples.

    :param public: a share of the training set, or the name of another data set, whose training samples are taken.
    :raises ConfigError: the other data set's samples do not fit the model of this one.
    """
    if public is None:
        return dataset
    if public_share(public) is not None:
        return replace(dataset, public=PublicSamples(dataset.train, public_rows(dataset.train.labels, public, seed)))
    other = load_dataset(public, data_dir)
    for what, found, expected in (
        ("kind", other.kind, dataset.kind),
        ("shape", tuple(other.input_shape), tuple(dataset.input_shape)),
    ):
        if found != expected:
            raise ConfigError(
                f"--public {public}: its samples are of {what} {found}, those of {dataset.name!r} of {expected}; take "
                "a data set of the same kind, or a share of this one, such as --public 0.1"
            )
    return replace(dataset, public=PublicSamples(other.train, torch.arange(len(other.train))))


def public_rows(labels: Tensor, public: str | None, seed: int) -> Tensor:
    """Return the positions of the training samples that are public, ascending (n,) int64, drawn class by class."""
    share = public_share(public)
    if share is None:
        return torch.empty(0, dtype=torch.int64)
    drawn = draw_by_class(labels.cpu().numpy(), share, numpy_generator(seed, "public"))
    return torch.from_numpy(drawn).nonzero().flatten()
