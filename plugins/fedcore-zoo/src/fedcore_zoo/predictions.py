"""Predictions and figures of a finished run's model on samples of a program: raw arrays become the model's inputs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils import data as torch_data

from fedcore import ConfigError, DataError, RunResult, SplitModel
from fedcore.client import evaluate as counts_of
from fedcore.data import Inputs, Samples, TensorSamples, first_ten, normalise
from fedcore.models import copied, evaluating, forward_chunk
from fedcore.tools import RunDirectory
from fedcore_zoo.cells import Array, as_array, check_rows, in_order, word_of

WHOLE = re.compile(r"-?\d+")


def best_model(result: RunResult) -> SplitModel:
    """Return the global model of the best round; see :meth:`fedcore.RunResult.best_model`."""
    best = result.summary["metrics"].get("best_by_validation")
    if result.config.keep != "best":
        raise ConfigError("this run did not keep its best model; train with --keep best")
    if best is None:
        raise ConfigError("no round is the best: the clients could not be evaluated, see result.metrics['failures']")
    model = copied(result.model)
    RunDirectory(result.directory).load_model(model, best=best["round"])
    return model


def predict(result: RunResult, x: Any, model: nn.Module | None) -> npt.NDArray[Any]:
    """Return the predictions for every sample; see :meth:`fedcore.RunResult.predict`."""
    logits = _logits(result, x, model)
    undefined = ~logits.amax(dim=1, keepdim=True).isfinite().flatten(1).all(dim=1)
    if undefined.any():  # max takes nan for the largest
        raise DataError(
            f"the model's output for sample {int(undefined.int().argmax())} of x is nan or infinite, as for "
            f"{int(undefined.sum())} of {len(undefined)} samples: look for nan in x; predict_proba returns nan"
        )
    predictions: npt.NDArray[Any] = result.task.predict(logits).numpy()
    return predictions


def predict_proba(result: RunResult, x: Any, model: nn.Module | None) -> npt.NDArray[np.float32]:
    """Return the probabilities of every sample; see :meth:`fedcore.RunResult.predict_proba`."""
    probabilities: npt.NDArray[np.float32] = result.task.probabilities(_logits(result, x, model)).numpy()
    return probabilities


def evaluate(result: RunResult, x: Any, y: Any, model: nn.Module | None) -> dict[str, Any]:
    """Return the figures on labelled samples; see :meth:`fedcore.RunResult.evaluate`."""
    with torch.device("cpu"):  # a program may have another default device, where labels and positions would be made
        network, samples, task = _chosen(result, model), _samples(result, x, y), result.task
        if not len(samples):
            raise DataError("x has no samples, so there is nothing to evaluate")
        labels, classes = samples.labels, result.model.num_classes
        if task.classes and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            raise DataError(f"y holds classes outside of 0 to {classes - 1}")
        with evaluating(network):
            counts = counts_of(network, samples, classes, _device(network), task, metrics=result.further)
        return counts.rates(result.further)


def _logits(result: RunResult, x: Any, model: nn.Module | None) -> Tensor:
    network = _chosen(result, model)
    device, shape = _device(network), (result.model.num_classes, *result.task.grid)
    with torch.device("cpu"), torch.no_grad(), evaluating(network):
        if not _is_samples(x):
            x = result.inputs.prepare(x)
            x = TensorSamples(x, torch.zeros(len(x), dtype=torch.int64))
        samples: Samples = x
        chunks = torch.arange(len(samples)).split(forward_chunk(device, *shape)) if len(samples) else ()
        logits = [network(samples.gather(chunk).to(device))[1].cpu() for chunk in chunks]
        return torch.cat([torch.empty(0, *shape), *logits])


def _samples(result: RunResult, x: Any, y: Any) -> Samples:
    """Return samples as they are, and raw ones as inputs of the model with their labels."""
    if _is_samples(x):
        samples: Samples = x
        return samples
    if y is None:
        raise DataError("x is raw samples, so their classes have to come with them: result.evaluate(x, y)")
    check_rows(x, y, "y")
    inputs = result.inputs.prepare(x)
    return TensorSamples(inputs, _labels(result, as_array(y, "y"), len(inputs)))


def _labels(result: RunResult, y: Array, count: int) -> Tensor:
    """Return an array of labels as the task has them: of classes their numbers, or their names."""
    names = result.class_names
    if not (result.task.classes and names and y.shape == (count,)):
        return result.task.read(y, count, "y")
    numbers = {name: number for number, name in enumerate(names)}
    if y.dtype.kind in "iu":
        if numbers != {str(number): number for number in range(len(names))} and all(map(WHOLE.fullmatch, names)):
            warnings.warn(
                f"y holds whole numbers, which are positions from 0 in the run's classes {first_ten(names)}; give the "
                "classes themselves as words: y.astype(str)",
                stacklevel=5,
            )
        return result.task.read(y, count, "y")
    words = [word_of(label) for label in y]
    if strange := sorted({repr(word) for word in words} - {*map(repr, names)}):
        raise DataError(f"y holds {first_ten(strange)}, which are none of the run's classes {first_ten(names)}")
    return torch.tensor([numbers[str(word)] for word in words], dtype=torch.int64)


def _is_samples(x: Any) -> bool:
    return hasattr(x, "gather") and not isinstance(x, Tensor)  # a tensor has another method of this name


def _chosen(result: RunResult, model: nn.Module | None) -> nn.Module:
    if model is not None:
        return _Pair(model)
    result.require_global()
    return result.model


class _Pair(nn.Module):
    """A network with the output (features, logits); one that gives logits alone has them in both places."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Any) -> Any:
        output = self.network(x)
        return (output, output) if isinstance(output, Tensor) else output


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def prepare(form: Inputs, x: Any) -> Tensor:
    """Return a model's input for raw samples of this form; see :meth:`fedcore.data.Inputs.prepare`."""
    if not form.dtype:
        raise DataError(
            f"x is a {type(x).__name__}, but the data set has a class of samples ({form.kind}): give an object of "
            "it, for texts SequenceSamples.of(tokens, labels)"
        )
    raw = _tensor(in_order(x, form.columns, "x"))
    return _images(form, raw) if form.kind == "images" else _rows(form, raw)


def _images(form: Inputs, x: Tensor) -> Tensor:
    channels, height, width = form.shape
    shape = tuple(x.shape[1:])
    if shape == (height, width, channels) and shape != form.shape:
        x = x.permute(0, 3, 1, 2)
    elif shape == (height, width) and channels == 1:
        x = x.unsqueeze(1)
    elif shape != form.shape:
        single = x.ndim == 2 or tuple(x.shape) in (form.shape, (height, width, channels))
        one = "; for a single image write x[None]" if single else ""
        raise DataError(
            f"x has the shape {tuple(x.shape)}; expected (n, {channels}, {height}, {width}) or "
            f"(n, {height}, {width}{f', {channels}' * (channels > 1)}), like the run's images{one}"
        )
    if form.dtype == "uint8" and x.dtype != torch.uint8:
        if not x.is_floating_point() or (x.numel() and not 0 <= float(x.min()) <= float(x.max()) <= 1):
            raise DataError(
                f"x holds {_name(x.dtype)} values outside of [0, 1]; the run's images are bytes: give uint8 from 0 "
                "to 255, or floating-point numbers from 0 to 1, not normalised"
            )
    elif form.dtype != "uint8" and not x.is_floating_point():
        raise DataError(f"x holds {_name(x.dtype)}; the run's images are floating-point numbers")
    x = x if x.dtype == torch.uint8 else x.to(torch.float32)
    return normalise(x, form.mean, form.std)


def _rows(form: Inputs, x: Tensor) -> Tensor:
    if tuple(x.shape[1:]) != form.shape:
        raise DataError(f"x has the shape {tuple(x.shape)}; expected (n, {', '.join(map(str, form.shape))})")
    dtype: torch.dtype = getattr(torch, form.dtype)
    if x.is_floating_point() and not dtype.is_floating_point:
        raise DataError(f"x holds {_name(x.dtype)}; the run's samples are {form.dtype}")
    if form.mean:  # in float64, as the loaders of tables normalise
        mean, std = (torch.tensor(numbers, dtype=torch.float64) for numbers in (form.mean, form.std))
        x = (x.to(torch.float64) - mean) / std
    return x.to(dtype)


def _tensor(x: Any) -> Tensor:
    """Return an array, a tensor, a table or a list of samples as one tensor on the CPU."""
    try:
        array = np.stack([as_array(sample, "x") for sample in x]) if isinstance(x, Sequence) else as_array(x, "x")
        if not array.ndim:
            raise TypeError(f"it is a {type(x).__name__}")
        return torch.from_numpy(np.require(array, requirements=["C", "W"]))  # torch warns of what is read-only
    except (TypeError, ValueError) as error:
        pairs = isinstance(x, torch_data.Dataset | torch_data.DataLoader)
        hint = "; of a data set of pairs write torch.stack([x for x, _ in data])" if pairs else ""
        raise DataError(f"x does not become one array of numbers: {error}{hint}") from error


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
