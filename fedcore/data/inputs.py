"""Raw samples for a trained model: images, arrays and tensors as the data set had them become a model's input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as torch_data

from fedcore.base.errors import DataError
from fedcore.data.dataset import Dataset
from fedcore.data.images import ResidentSamples, normalise
from fedcore.data.samples import TensorSamples, as_array, in_order


@dataclass(frozen=True)
class Inputs:
    """The form of a data set's samples before the normalisation, the normalisation, and the names of classes.

    It is stored with the model.
    """

    kind: str
    """``images``, ``tensor``, or the kind of other samples."""
    shape: tuple[int, ...]
    """Shape of one sample; (C, H, W) of an image."""
    dtype: str
    """The samples' dtype as torch names it: ``uint8``, ``float32``, ``int64``. Empty for other kinds."""
    mean: tuple[float, ...] = ()
    """One number per channel of images, in units of [0, 1] brightness for uint8, or per column of a table.

    Empty where samples are not normalised.
    """
    std: tuple[float, ...] = ()
    columns: tuple[str, ...] = ()
    """The names of a table's columns in order; empty if they are not known."""
    class_names: tuple[str, ...] = ()
    """The names of the classes in order; empty if they are not known."""

    @classmethod
    def of(cls, dataset: Dataset) -> Self:
        """Return the form of a data set's samples."""
        samples, shape, names = dataset.train, tuple(dataset.input_shape), tuple(dataset.class_names or ())
        if isinstance(samples, ResidentSamples):
            dtype = "uint8" if samples.from_bytes else "float32"
            return cls("images", shape, dtype, samples.mean, samples.std, class_names=names)
        if isinstance(samples, TensorSamples):
            shape, dtype = tuple(samples.inputs.shape[1:]), str(samples.inputs.dtype).removeprefix("torch.")
            return cls("tensor", shape, dtype, samples.mean, samples.std, samples.columns, names)
        return cls(samples.kind, shape, "", class_names=names)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return the form whose fields :func:`dataclasses.asdict` gave, after JSON has made its tuples lists."""
        fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in value.items()}
        return cls(**fields)

    def prepare(self, x: Any) -> Tensor:
        """Return a model's input for raw samples.

        :param x: images (n, H, W), (n, H, W, C) or (n, C, H, W), or rows (n, ...) of a table, as an array, a tensor or
            a list of samples. The columns of a DataFrame may come in any order, if the data set knows their names; true
            and false in it are 1 and 0, empty cells nan.
        :raises DataError: they have another shape or type than those of the run, or are sparse, masked or complex.
        """
        if not self.dtype:
            raise DataError(
                f"x is a {type(x).__name__}, but the data set has a class of samples ({self.kind}): give an object of "
                "it, for texts SequenceSamples.of(tokens, labels)"
            )
        found = _tensor(in_order(x, self.columns, "x"))
        return self._images(found) if self.kind == "images" else self._rows(found)

    def _images(self, x: Tensor) -> Tensor:
        channels, height, width = self.shape
        form = tuple(x.shape[1:])
        if form == (height, width, channels) and form != self.shape:
            x = x.permute(0, 3, 1, 2)
        elif form == (height, width) and channels == 1:
            x = x.unsqueeze(1)
        elif form != self.shape:
            single = x.ndim == 2 or tuple(x.shape) in (self.shape, (height, width, channels))
            one = "; for a single image write x[None]" if single else ""
            raise DataError(
                f"x has the shape {tuple(x.shape)}; expected (n, {channels}, {height}, {width}) or "
                f"(n, {height}, {width}{f', {channels}' * (channels > 1)}), like the run's images{one}"
            )
        if self.dtype == "uint8" and x.dtype != torch.uint8:
            if not x.is_floating_point() or (x.numel() and not 0 <= float(x.min()) <= float(x.max()) <= 1):
                raise DataError(
                    f"x holds {_name(x.dtype)} values outside of [0, 1]; the run's images are bytes: give uint8 from 0 "
                    "to 255, or floating-point numbers from 0 to 1, not normalised"
                )
        elif self.dtype != "uint8" and not x.is_floating_point():
            raise DataError(f"x holds {_name(x.dtype)}; the run's images are floating-point numbers")
        x = x if x.dtype == torch.uint8 else x.to(torch.float32)
        return normalise(x, self.mean, self.std)

    def _rows(self, x: Tensor) -> Tensor:
        if tuple(x.shape[1:]) != self.shape:
            raise DataError(f"x has the shape {tuple(x.shape)}; expected (n, {', '.join(map(str, self.shape))})")
        dtype: torch.dtype = getattr(torch, self.dtype)
        if x.is_floating_point() and not dtype.is_floating_point:
            raise DataError(f"x holds {_name(x.dtype)}; the run's samples are {self.dtype}")
        if self.mean:  # in float64, as the loaders of tables normalise
            mean, std = (torch.tensor(numbers, dtype=torch.float64) for numbers in (self.mean, self.std))
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
