"""Normalisation by the clients' training samples alone, before a run begins: the option ``--normalize``."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fedcore import ConfigError, DataError, RunConfig, RunResult
from fedcore.data import Dataset, Partition, PublicSamples, ResidentSamples, Samples, TensorSamples
from fedcore_zoo.fitted import FittedRecipe
from fedcore_zoo.tables import Recipe, TableSamples, divisors
from fedcore_zoo.vision import load_torchvision

Numbers: TypeAlias = tuple[float, ...]

FAR = 100.0
"""Numbers beyond this are noted: a network learns little from columns such as ages in days."""

APART = 1000.0
"""Deviations of columns that differ by this factor are noted: the network sees little of the smaller ones."""

SCALE = 10.0
"""Test samples whose deviation differs from the training samples' by this factor are noted."""

SEEN = 32
"""How many values of a sample, evenly spaced, are compared to find it among the training samples."""

MANY = 1000
"""Of more clients the means and deviations are not stored with the model."""


def prepare(config: Any, choice: str, dataset: Dataset, partition: Partition) -> Dataset:
    """Return a data set as a run's models take it.

    Statistics are of the training samples of the clients that train, without their held-out parts. Unseen clients give
    none: what is measured on them would depend on their own samples.

    :param config: the :class:`fedcore.RunConfig`.
    :param choice: ``as-loaded``, ``global``, ``client``, ``none`` or ``pretrained``.
    :raises ConfigError: the samples have no such normalisation.
    :raises DataError: samples cannot be trained on, or the test samples are others.
    """
    train = dataset.train
    _check_samples(dataset)
    notes = (*_scaled_apart(train, dataset.test), *_seen_in_training(dataset, partition))
    dataset = replace(dataset, notes=(*dataset.notes, *notes, *_chosen_on_test(config, dataset, partition)))
    if "own" in partition.info:  # at a client of a federation: the samples are normalised as the server's are
        return _by_client(dataset, partition) if choice == "client" else dataset
    if partition.is_declared and choice not in ("none", "pretrained"):
        return _of_a_federation(dataset, choice, partition)
    if choice == "as-loaded" and not isinstance(train, TableSamples):
        return replace(dataset, notes=(*dataset.notes, *_as_it_is(train)))
    if not (isinstance(train, ResidentSamples) or (isinstance(train, TensorSamples) and train.inputs.ndim == 2)):
        raise ConfigError(
            f"--normalize {choice} is for images and rows of numbers; samples of {dataset.name!r} are neither"
        )
    own = partition.train
    rows = torch.arange(len(train)) if partition.is_declared else own.of_first(config.training_clients).unique()
    if isinstance(train, TableSamples):
        prepared = _table(dataset, choice, rows)
    elif isinstance(train, ResidentSamples):
        prepared = _images(config, dataset, choice, train, rows)
    else:
        prepared = _rows(dataset, choice, train, rows)
    if choice == "none":
        prepared = replace(prepared, notes=(*prepared.notes, *_as_it_is(prepared.train)))
    return _by_client(prepared, partition) if choice == "client" else prepared


def _check_samples(dataset: Dataset) -> None:
    """Refuse samples of a loader on which a run would break off later, in the core's own code."""
    train, test = dataset.train, dataset.test
    for part, samples in (("training", train), ("test", test)):
        where = f"dataset {dataset.name!r}: {part}"
        for name in ("kind", "fixed_shape", "gather", "to"):
            if not hasattr(samples, name):
                raise DataError(
                    f"{where} samples, of class {type(samples).__name__}, have no {name!r}; they need all that "
                    "fedcore.data.Samples has, or are fedcore.data.TensorSamples: docs/your-data.md"
                )
        check_finite(samples, where)
    if not isinstance(train, TableSamples) and isinstance(train, TensorSamples) and isinstance(test, TensorSamples):
        ours, theirs = train.inputs, test.inputs
        if ours.dtype != theirs.dtype or (ours.ndim == 2 and ours.shape[1:] != theirs.shape[1:]):
            raise DataError(
                f"dataset {dataset.name!r}: training samples are {ours.dtype} of shape {tuple(ours.shape[1:])}, test "
                f"samples {theirs.dtype} of shape {tuple(theirs.shape[1:])}; they must be alike"
            )


def _values(samples: Samples) -> Tensor | None:
    """Return the images or rows that samples hold in memory as one tensor; None for other samples."""
    values = getattr(samples, "images", getattr(samples, "inputs", None))
    return values if isinstance(values, Tensor) else None


def _scaled_apart(train: Samples, test: Samples) -> list[str]:
    """Return the note on test samples of another scale than the training samples, of which one was divided by 255."""
    both = map(_values, (train, test))
    values = [part[:: len(part) // 1000 + 1] for part in both if part is not None and len(part) > 1]
    if len(values) < 2 or not all(part.is_floating_point() or part.dtype == torch.uint8 for part in values):
        return []
    ours, theirs = (float(part.double().std()) for part in values)
    if not ours or not (theirs / ours > SCALE or theirs / ours < 1 / SCALE):
        return []
    return [f"test samples have a deviation of {theirs:.3g}, training samples of {ours:.3g}: scale both alike"]


def _seen_in_training(dataset: Dataset, partition: Partition) -> list[str]:
    """Return the note on test samples of which most are training samples, too; at a client of a federation its own.

    Equal rows of a table of few values say nothing: there is no note if most training samples are there twice.
    """
    own: Any = partition.info.get("own")
    rows = [
        values.detach().cpu()[:, None].flatten(1)
        for values in map(_values, (dataset.train, dataset.test))
        if values is not None
    ]
    if len(rows) < 2 or (partition.is_declared and own is None):
        return []
    if rows[0].shape[1] != rows[1].shape[1]:
        return []
    columns = torch.arange(0, rows[0].shape[1], 1 + rows[0].shape[1] // SEEN)
    rows = [part[:, columns] for part in rows]
    if own is not None:
        rows = [rows[0][partition.train[own]], rows[0][partition.test[own]]]
    else:  # what clients hold out may be the test set
        rows[0] = rows[0][partition.train.of_first(partition.num_clients).unique()]
    train, test = ([*map(hash, map(bytes, part.view(torch.uint8).numpy()))] for part in rows)
    known = set(train)
    also = sum(each in known for each in test)
    if 2 * also <= len(test) or 2 * len(known) <= len(train):
        return []
    what = "test" if own is None else "held-out"
    return [
        f"{also} of {len(test)} {what} samples are training samples, too, so figures on them say little about new ones"
    ]


def _chosen_on_test(config: Any, dataset: Dataset, partition: Partition) -> list[str]:
    """Return the note that a run chooses a round on the test set, as the clients' test samples are the server's."""
    train, test = _values(dataset.train), _values(dataset.test)
    held_out = torch.as_tensor(partition.test.positions, dtype=torch.int64)
    if train is None or test is None or not len(test) == len(held_out) > 0:
        return []
    if "own" in partition.info or partition.is_declared or config.validation_share:
        return []
    chooses = [flag for flag, on in (("--patience", config.patience), ("--keep best", config.keep == "best")) if on]
    both = (part[:, None].flatten(1).sum(dim=1, dtype=torch.float64) for part in (train[held_out], test) if chooses)
    if not chooses or not torch.equal(*(sums.sort().values for sums in both)):
        return []
    return [
        f"the clients' test samples are the test set, so {' and '.join(chooses)} would choose a round on it, and all "
        "figures of that round are too high; with --validation-share 0.5 take global_local or personal"
    ]


def check_finite(samples: Samples, where: str) -> None:
    """Refuse numbers of a loader that are not finite: each update would be, too, as after a learning rate too large."""
    if isinstance(samples, TableSamples) or (isinstance(samples, ResidentSamples) and samples.from_bytes):
        return
    values = _values(samples)
    if values is None or not values.is_floating_point() or values.sum().isfinite():
        return
    finite = values.isfinite().reshape(len(values), -1).all(dim=1)
    if finite.all():  # their sum is not
        return
    raise DataError(
        f"{where} sample {int(finite.int().argmin())} holds numbers that are not finite (NaN or infinite), as do "
        f"{int((~finite).sum())} of {len(finite)} samples; replace or drop them"
    )


def _of_a_federation(dataset: Dataset, choice: str, partition: Partition) -> Dataset:
    """Return the server's data set, normalised by its own statistics or by the clients' sums.

    :raises ConfigError: the partition holds no such sums.
    """
    if choice not in ("global", "client"):
        return dataset
    statistics: Any = partition.info.get("statistics")
    train = dataset.train
    if not isinstance(statistics, Mapping):
        raise ConfigError(f"--normalize {choice}: the clients hold their own data, and their sums were not added up")
    if isinstance(train, TableSamples):
        return _table_by(dataset, Recipe.from_json(statistics["recipe"]))
    if isinstance(train, ResidentSamples):
        return _images_by(dataset, tuple(statistics["mean"]), tuple(statistics["std"]))
    assert isinstance(train, TensorSamples)
    return _rows_by(dataset, train, tuple(statistics["mean"]), tuple(statistics["std"]))


def as_client(result: RunResult, client: int) -> RunResult:
    """Return a result of ``--normalize client`` that prepares raw samples as this client's, for its ``predict``.

    :raises ConfigError: the run did not normalise by client, or did not store the numbers of this client.
    """
    known: Mapping[str, Any] = result.inputs.recipe.get("clients", {})
    if str(client) not in known:
        raise ConfigError(
            f"the model has no mean and deviation of client {client}: they are stored by --normalize client, for up to "
            f"{MANY:,} clients"
        )
    mean, std = map(tuple, known[str(client)])
    recipe = dict(result.inputs.recipe)
    if "mean" in recipe:
        numbers = len(recipe["mean"])
        recipe |= {"mean": mean[:numbers], "std": std[:numbers]}
    return replace(result, inputs=replace(result.inputs, mean=mean, std=std, recipe=recipe))


def _table(dataset: Dataset, choice: str, rows: Tensor) -> Dataset:
    """Return a table by the recipe of some of its training rows; notes name categories without one of them."""
    train = dataset.train
    assert isinstance(train, TableSamples)
    if choice == "pretrained":
        raise _no_pretrained(dataset)
    recipe = train.made if len(rows) == len(train) else train.recipe_of(rows)
    refuse_fitted(train, choice)
    if choice == "none" and isinstance(recipe, Recipe):
        recipe = replace(recipe, mean=(0.0,) * len(recipe.mean), std=(1.0,) * len(recipe.std))
    return _table_by(dataset, recipe)


def refuse_fitted(train: TableSamples, choice: str) -> None:
    """Refuse another normalisation of rows that a transformer of the user makes.

    :raises ConfigError: a transformer makes these rows.
    """
    if train.made.is_fixed and choice != "as-loaded":
        raise ConfigError(f"--normalize {choice}: the rows of {train.where} are as its ?pipeline= makes them")


def _table_by(dataset: Dataset, recipe: Recipe | FittedRecipe) -> Dataset:
    """Return a table by a recipe, with public rows of another table; notes name categories that it does not have."""
    train, test = dataset.train, dataset.test
    assert isinstance(train, TableSamples)
    assert isinstance(test, TableSamples)

    def again(samples: Samples) -> Samples:
        return samples.by(recipe) if isinstance(samples, TableSamples) else samples

    if recipe != train.made or dataset.public is not None:
        dataset = replace(_with(dataset, again(train), again(test), again), input_shape=(len(recipe.outputs),))
    notes = recipe.notes([train.cells, test.cells], dataset.name)
    return replace(dataset, notes=(*dataset.notes, *notes))


def _images(config: RunConfig, dataset: Dataset, choice: str, train: ResidentSamples, rows: Tensor) -> Dataset:
    channels = len(train.mean)
    if choice == "pretrained":
        pixels = pixels_of(train)
        if not train.from_bytes and not (float(pixels.min()) > -0.01 and float(pixels.max()) < 1.01):
            raise ConfigError(
                f"--normalize pretrained: the weights' images are 0..1, those of {dataset.name!r} {pixels.min():g} to "
                f"{pixels.max():g}; divide them, or give pixels of 0..255 as uint8"
            )
        mean, std = pretrained_numbers(config)
        if len(mean) != channels:
            if channels != 1:
                raise ConfigError(
                    f"--normalize pretrained: the weights' images have {len(mean)} channels, those of "
                    f"{dataset.name!r} {channels}"
                )
            mean, std = ((sum(numbers) / len(numbers),) for numbers in (mean, std))
    elif choice == "none":
        mean, std = (0.0,) * channels, (1.0,) * channels
    else:
        mean, std = _statistics(pixels_of(train)[rows], 255.0 if train.from_bytes else 1.0)
    return _images_by(dataset, mean, std)


def _images_by(dataset: Dataset, mean: Numbers, std: Numbers) -> Dataset:
    def again(samples: Samples) -> Samples:
        if not isinstance(samples, ResidentSamples):
            return samples
        return ResidentSamples.from_pixels(pixels_of(samples), samples.labels, mean, std)

    return _with(dataset, again(dataset.train), again(dataset.test), again)


def pixels_of(samples: ResidentSamples) -> Tensor:
    """Return images as they were before normalisation, (n, C, H, W) uint8 or float32."""
    images = samples.images
    if images.dtype == torch.uint8:
        return images
    mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (samples.mean, samples.std))
    raw = images * std + mean
    return raw.mul_(255).round_().clamp_(0, 255).to(torch.uint8) if samples.from_bytes else raw


def _rows(dataset: Dataset, choice: str, train: TensorSamples, rows: Tensor) -> Dataset:
    if choice == "pretrained":
        raise _no_pretrained(dataset)
    if not train.inputs.is_floating_point():
        raise ConfigError(
            f"--normalize {choice}: the rows of {dataset.name!r} are whole numbers ({train.inputs.dtype}), which may "
            "be tokens; give floating-point numbers"
        )
    raw = raw_rows(train)
    mean, std = _statistics(raw[rows]) if choice != "none" else ((0.0,) * raw.shape[1], (1.0,) * raw.shape[1])
    return _rows_by(dataset, train, mean, std)


def _rows_by(dataset: Dataset, train: TensorSamples, mean: Numbers, std: Numbers) -> Dataset:
    def again(samples: Samples) -> Samples:
        if not isinstance(samples, TensorSamples):
            return samples
        scaled = (raw_rows(samples) - torch.tensor(mean, dtype=torch.float64)) / torch.tensor(std, dtype=torch.float64)
        inputs = scaled.to(train.inputs.dtype)
        return TensorSamples(inputs, samples.labels, mean=mean, std=std, columns=samples.columns)

    return _with(dataset, again(dataset.train), again(dataset.test), again)


def raw_rows(samples: TensorSamples) -> Tensor:
    """Return rows as they were before normalisation, (n, columns) float64."""
    raw = samples.inputs.double()
    if samples.mean:
        mean, std = (torch.tensor(numbers, dtype=torch.float64) for numbers in (samples.mean, samples.std))
        raw = raw * std + mean
    return raw


def _by_client(dataset: Dataset, partition: Partition) -> Dataset:
    """Return a data set that is normalised already, with the samples of each client once more by its own."""
    if partition.info.get("shares_samples"):
        raise ConfigError("--normalize client: clients of this partition share samples, which then have two values")
    train = dataset.train
    assert isinstance(train, (ResidentSamples, TensorSamples))
    values = train.gather(torch.arange(len(train))).clone()
    known: dict[str, list[list[float]]] = {}
    table = isinstance(train, TableSamples) and isinstance(train.made, Recipe)
    numbers = len(train.made.mean) if table else values.shape[1]  # type: ignore[union-attr]
    for client, own in enumerate(partition.train):
        if not len(own):
            continue
        mean, std = _statistics(values[own][:, :numbers])
        held = torch.cat([own, partition.test[client]])
        shape = (-1, *[1] * (values.ndim - 2))
        shift, scale = (torch.tensor(each, dtype=torch.float64).view(shape) for each in (mean, std))
        part = values[held]
        part[:, :numbers] = ((part[:, :numbers].double() - shift) / scale).to(values.dtype)
        values[held] = part
        if partition.num_clients <= MANY:
            pairs = list(zip(mean, std, train.mean, train.std, strict=False))
            known[str(client)] = [
                [*(a * c + b for a, _, b, c in pairs), *train.mean[numbers:]],
                [*(a * b for _, a, _, b in pairs), *train.std[numbers:]],
            ]
    if isinstance(train, ResidentSamples):
        by_client: Any = ResidentSamples(values, train.labels, train.mean, train.std, from_bytes=train.from_bytes)
    else:
        by_client = TensorSamples(values, train.labels, mean=train.mean, std=train.std, columns=train.columns)
    by_client.recipe = {**getattr(train, "recipe", {}), "clients": known}
    public = dataset.public
    if public is not None and public.samples is train:
        public = PublicSamples(by_client, public.rows)
    note = "--normalize client: the server's test set belongs to no client, and is normalised by the samples of all"
    return replace(dataset, train=by_client, public=public, notes=(*dataset.notes, note))


def _statistics(values: Tensor, unit: float = 1.0) -> tuple[Numbers, Numbers]:
    """Return mean and deviation of each channel or column, axis 1 of (n, C, ...); the deviation 1 of a constant one."""
    channels = [channel.double().numpy() for channel in values.unbind(1)]
    mean = np.array([channel.mean() for channel in channels]) / unit  # NumPy adds in one order, whatever the threads
    std = np.array([channel.std() for channel in channels]) / unit
    return tuple(mean.tolist()), tuple(divisors(mean, std).tolist())


def _with(dataset: Dataset, train: Samples, test: Samples, again: Any = None) -> Dataset:
    """Return a data set with other samples; public ones that are its training samples go along."""
    public = dataset.public
    if public is not None and public.samples is dataset.train:
        public = PublicSamples(train, public.rows)
    elif public is not None and again is not None:
        public = PublicSamples(again(public.samples), public.rows)
    return replace(dataset, train=train, test=test, public=public)


def _no_pretrained(dataset: Dataset) -> ConfigError:
    return ConfigError(f"--normalize pretrained is for images; {dataset.name!r} has rows of numbers")


def _as_it_is(samples: Samples) -> list[str]:
    """Return the note on rows that nobody normalised, whose numbers are large or of different orders of magnitude."""
    if isinstance(samples, TensorSamples):
        values, raw = samples.inputs, not any(samples.mean)
    elif isinstance(samples, ResidentSamples):
        values, raw = samples.images, not (samples.from_bytes or any(samples.mean))
    else:
        return []
    if not (raw and values.is_floating_point() and values.numel()):
        return []
    far = float(values.abs().max())
    problems = [f"values up to {far:,.0f}"] if far > FAR else []
    if values.ndim == 2 and len(values) > 1:
        deviations = values.double().std(dim=0)
        varied = deviations[deviations > 0]
        if len(varied) and float(varied.max() / varied.min()) >= APART:
            problems.append(f"columns whose deviations are from {float(varied.min()):.3g} to {float(varied.max()):.3g}")
    if not problems:
        return []
    return [f"x_train is trained on as it is, with {' and '.join(problems)}; --normalize global normalises it"]


def pretrained_numbers(config: RunConfig) -> tuple[Numbers, Numbers]:
    """Return mean and deviation by channel with which the weights of a run's network were trained, in brightness 0..1.

    ``preprocessor_config.json`` next to ``--weights`` or in the folder of an ``hf:`` model comes first, then what
    torchvision and timm say of their weights.

    :raises ConfigError: nothing says them.
    """
    prefix, _, name = config.model.partition(":")
    weights = getattr(config, "weights", None)
    folders = [Path(weights).expanduser().parent] if weights else []
    folders += [Path(name.partition("?")[0]).expanduser()] if prefix == "hf" else []
    for folder in folders:
        file = folder / "preprocessor_config.json"
        if file.is_file():
            return _numbers_in(file)
    if prefix == "torchvision":
        models = load_torchvision().models
        preset = models.get_model_weights(name).DEFAULT.transforms()
        return tuple(map(float, preset.mean)), tuple(map(float, preset.std))
    if prefix == "timm":
        load_torchvision()
        pretrained = importlib.import_module("timm").get_pretrained_cfg(name)
        if pretrained is not None:
            return tuple(map(float, pretrained.mean)), tuple(map(float, pretrained.std))
    raise ConfigError(
        f"--normalize pretrained: nothing says how the images of model {config.model!r} were normalised; it takes "
        "torchvision:NAME, timm:NAME, or preprocessor_config.json next to the weights"
    )


def _numbers_in(file: Path) -> tuple[Numbers, Numbers]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        mean, std = (tuple(map(float, content[key])) for key in ("image_mean", "image_std"))
        if not (len(mean) == len(std) and mean and all(each > 0 for each in std)):
            raise ValueError(f"image_mean is {mean}, image_std {std}")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"--normalize pretrained: {file} does not hold image_mean and image_std ({error})") from error
    return mean, std
