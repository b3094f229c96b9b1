"""Graph sets by name: TU Dortmund's, from files in the data directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from fedcore.data import Dataset, default_data_dir
from fedcore_graph.tudataset import file_labels, read_tudataset
from fedcore_zoo import fixed_split

TEST_SIZE = 0.1
"""The collection has no official split; a tenth is what ten-fold cross-validation, its custom, tests on."""


def mutag(data_dir: Path | None = None) -> Dataset:
    """Return MUTAG: 188 molecules, 7 kinds of atoms, 2 classes (mutagenic or not), 169 to train and 19 to test.

    :raises DataError: files are missing or damaged.
    """
    return _dataset("mutag", "MUTAG", data_dir, names={-1: "not mutagenic", 1: "mutagenic"})


def proteins(data_dir: Path | None = None) -> Dataset:
    """Return PROTEINS: 1,113 proteins, 2 classes (enzyme or not); a node is a part of the secondary structure.

    :raises DataError: files are missing or damaged.
    """
    return _dataset("proteins", "PROTEINS", data_dir)


def imdb_binary(data_dir: Path | None = None) -> Dataset:
    """Return IMDB-BINARY: 1,000 networks of actors, 2 classes (action or romance); nodes have their degree alone.

    :raises DataError: files are missing or damaged.
    """
    return _dataset("imdb-binary", "IMDB-BINARY", data_dir)


def _dataset(name: str, folder: str, data_dir: Path | None, names: Mapping[int, str] | None = None) -> Dataset:
    """Return a set in a stratified split of 9 to 1, fixed: it does not depend on the run's seed.

    :param names: the names of the labels of its file; by default they are the labels themselves.
    """
    root = data_dir or default_data_dir()
    graphs, labels = read_tudataset(root, folder), file_labels(root, folder)
    train, test = (graphs.select(torch.from_numpy(part)) for part in fixed_split(graphs.labels.numpy(), TEST_SIZE))
    return Dataset(
        name=name,
        train=train,
        test=test,
        num_classes=len(labels),
        input_shape=(graphs.x.shape[1],),
        class_names=tuple((names or {}).get(label, str(label)) for label in labels),
        model="gin",
    )
