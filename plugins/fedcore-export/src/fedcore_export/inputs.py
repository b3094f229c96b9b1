"""Raw samples for a trained model: images, arrays and tensors as the data set had them become a model's input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as torch_data

from fedcore import DataError
from fedcore.data import Inputs, as_array, in_order, normalise


def prepare(form: Inputs, x: Any) -> Tensor:
    """Return a model's input for raw samples of this form; see :meth:`fedcore.data.Inputs.prepare`."""
    if not form.dtype:
        raise DataError(
            f"x is a {type(x).__name__}, but the data set has a class of samples ({form.kind}): give an object of "
            "it, for texts SequenceSamples.of(tokens, labels)"
        )
    found = _tensor(in_order(x, form.columns, "x"))
    return _images(form, found) if form.kind == "images" else _rows(form, found)


def _images(form: Inputs, x: Tensor) -> Tensor:
    channels, height, width = form.shape
    found = tuple(x.shape[1:])
    if found == (height, width, channels) and found != form.shape:
        x = x.permute(0, 3, 1, 2)
    elif found == (height, width) and channels == 1:
        x = x.unsqueeze(1)
    elif found != form.shape:
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
