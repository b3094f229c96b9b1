"""Data sets by name, checked, and the names of classes that two of them share."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedcore.base.errors import DataError
from fedcore.base.identity import short_name
from fedcore.base.registry import OBJECT, call, needed, resolve
from fedcore.base.seeding import derive_seed, random_stream
from fedcore.data.dataset import Dataset
from fedcore.data.samples import Array, TensorSamples, check_labels, first_ten
from fedcore.data.task import Task, other_task, task_of


def load_dataset(spec: str, data_dir: Path | None = None, task: str = "auto") -> Dataset:
    """Return the data set ``spec``: a name, or the name behind a package's prefix.

    A loader is an entry point of the group ``fedcore.datasets``. It takes the directory of the data sets' files, None
    for the default, and returns a :class:`~fedcore.data.Dataset` or what :func:`as_dataset` makes one of. What it draws
    from a global random generator is the same at every call.

    :param task: as for :func:`as_dataset`.
    :raises UnknownNameError: no installed package provides the name.
    :raises DataError: files are missing or damaged, or the loader returned something that is not usable.
    """
    loader: Callable[[Path | None], Any] = resolve("dataset", spec)
    with random_stream(derive_seed(0, "dataset")):  # runs of all seeds have the same samples
        data = call("dataset", spec, loader, data_dir)
        try:
            return as_dataset(data, short_name(spec), task)
        except DataError as error:
            if spec.startswith(OBJECT):  # the message says which of the arguments it is
                raise
            raise DataError(f"dataset {spec!r} is not usable: {error}") from error


def default_data_dir() -> Path:
    """Return the directory named by FEDCORE_DATA, else ``~/.cache/fedcore/data``."""
    return Path(os.environ.get("FEDCORE_DATA") or "~/.cache/fedcore/data").expanduser()


def find_data(path: str, data_dir: Path | None) -> Path:
    """Return a file or folder of data: where ``path`` says, or of this name in ``data_dir`` or the default folder.

    A run whose data has moved thus goes on with another ``--data-dir`` or ``FEDCORE_DATA``.
    """
    place, folder = Path(os.path.expanduser(path)), data_dir or default_data_dir()
    return next((each for each in (place, folder / place, folder / place.name) if each.exists()), place)


def as_dataset(data: Any, name: str = "arrays", task: str = "auto") -> Dataset:
    """Return arrays, tensors or torch's data sets as a data set.

    - Arrays or tensors ``(x_train, y_train, x_test, y_test)``, or a mapping with these keys. Images are read by
      ``fedcore_zoo.image_split`` and normalised by the training images' statistics; x (n, H, W) of uint8 or floating
      point is always taken for images. x of other shapes, such as rows (n, d) of a table, is not normalised:
      floating-point numbers become float32, whole numbers int64. The columns of DataFrames are matched by name.
    - A pair ``(train, test)`` of torch's map-style data sets of (x, y). Every sample is read once, with the set's own
      transforms, which must not be random, and is not normalised further. Images (C, H, W) or (H, W) of uint8 are
      divided by 255. Classes are matched by name if both sets have ``classes``.

    :param name: name of the data set.
    :param task: what the labels are: a name of the group ``fedcore.tasks``. ``auto`` is the task of a
        :class:`Dataset`, else the installed one that suits the labels, else classification.
    :raises ConfigError: the package fedcore-zoo, which makes one of arrays, is not installed.
    :raises DataError: ``data`` has another form, or its shapes, types or labels do not fit.
    """
    if isinstance(data, Dataset):
        labels = [samples.labels.cpu().numpy() for samples in (data.train, data.test)]
        kind = type(data.task) if task == "auto" and not data.task.classes else task_of(task, labels[0])
        names = data.class_names or ()  # of two words the numbers 0 and 1 say all
        classes = names != tuple(map(str, range(len(names)))) and (len(names) != 2 or "".join(names).isdecimal())
        if classes and kind is not type(data.task):
            raise DataError(
                f"labels are classes ({first_ten(names)}); --task {kind.name} takes values, as of hf:FILE?target=COLUMN"
            )
        return _checked(data if kind is type(data.task) else with_labels(data, kind, *labels))
    made: Dataset = needed("feature", "arrays", "a data set of arrays")(data, name, task)
    return _checked(made)


def with_labels(dataset: Dataset, task: type[Task], y_train: Array, y_test: Array) -> Dataset:
    """Return the samples of a data set with labels of a task without classes.

    :raises DataError: they are not labels of this task.
    """
    if task.classes:
        raise DataError(f"{dataset.name!r} has labels of the task {dataset.task.name!r}; leave --task out")
    parts = []
    for samples, y, part in ((dataset.train, y_train, "train"), (dataset.test, y_test, "test")):
        parts.append(copy.copy(samples))
        try:
            labels = task.read(y, len(samples), f"dataset: y_{part}")
        except DataError as error:
            raise DataError(f"{error}{other_task(y, task)}") from None
        object.__setattr__(parts[-1], "labels", labels)  # works on a frozen dataclass, too
    train, test = (part.labels for part in parts)
    if train.shape[1:] != test.shape[1:]:
        raise DataError(f"dataset: y_train is {tuple(train.shape)}, y_test {tuple(test.shape)}; they must be alike")
    if task.width(test) > (width := task.width(train)):
        raise DataError(f"dataset: y_test takes {task.width(test)} outputs of a model, but y_train {width}")
    own: dict[str, Any] = {"task": task(train), "num_classes": width, "model": task.model or dataset.model}
    return replace(dataset, train=parts[0], test=parts[1], class_names=None, **own)


def numbered_as(labels: Tensor, names: Sequence[str], known: Sequence[str], where: str) -> Tensor:
    """Return labels (n,) int64, numbers of the classes ``names``, as the numbers of these classes in ``known``.

    :param where: whose labels they are, for the message.
    :raises DataError: a label has no name, its class is not known, or one of two different lists names a class twice.
        The message holds both lists.
    """
    ours, theirs = f"its classes are {first_ten(names)}", f"the known ones are {first_ten(known)}"
    outside = labels[(labels < 0) | (labels >= len(names))]
    if len(outside):
        raise DataError(f"{where}: {len(outside)} labels, such as {int(outside[0])}, have no class: {ours}")
    if list(names) == list(known):
        return labels
    numbers = {name: number for number, name in enumerate(known)}
    if len(numbers) < len(known) or len(set(names)) < len(names):
        raise DataError(f"{where}: two classes have one name, so names cannot match them: {ours}; {theirs}")
    order = torch.tensor([numbers.get(name, -1) for name in names])
    renumbered = order[labels]
    unknown = labels[renumbered < 0]
    if len(unknown):
        raise DataError(f"{where}: class {names[int(unknown[0])]!r} is not known: {ours}; {theirs}")
    return renumbered


def _checked(dataset: Dataset) -> Dataset:
    """Return a data set whose parts fit each other.

    :raises DataError: names the part, and what it should be.
    """
    classes, domains = dataset.num_classes, dataset.domains
    for samples in (dataset.train, dataset.test):
        check_labels(samples.labels, len(samples), of_any_task=not dataset.task.classes)
    for name, values, count in (
        ("class_names", dataset.class_names, classes),
        ("sources", dataset.sources, len(dataset.train)),
        ("groups", dataset.groups, len(dataset.train)),
        ("domains.train", domains.train if domains else None, len(dataset.train)),
        ("domains.test", domains.test if domains else None, len(dataset.test)),
    ):
        if values is not None and len(values) != count:
            raise DataError(f"dataset: {name} has {len(values)} entries, expected {count}")
        if values is not None and name != "class_names" and not isinstance(values, Tensor):
            raise DataError(f"dataset: {name} is a {type(values).__name__}, expected an int64 tensor ({count},)")
    if dataset.task.classes:
        _check_numbers("classes", f"num_classes is {classes}", dataset.train.labels, dataset.test.labels, classes)
    if domains:
        names = len(domains.names)
        _check_numbers("domains", f"domains.names has {names}", domains.train, domains.test, names)
    if isinstance(dataset.train, TensorSamples) and isinstance(dataset.test, TensorSamples):
        return replace(dataset, test=dataset.test.with_columns(dataset.train.columns, "dataset: the test table"))
    return dataset


def _check_numbers(groups: str, known: str, train: Tensor, test: Tensor, count: int) -> None:
    """Refuse numbers of classes or domains that are not 0 to ``count - 1``.

    :param known: where the count comes from, for the message.
    """
    for part, numbers in (("training", train), ("test", test)):
        outside = numbers[(numbers < 0) | (numbers >= count)]
        if len(outside):
            raise DataError(
                f"dataset: {len(outside)} of {len(numbers)} {part} samples have {groups} outside of 0..{count - 1}, "
                f"such as {int(outside[0])}; {known}. Leave out samples without one, and number the {groups} from 0"
            )
