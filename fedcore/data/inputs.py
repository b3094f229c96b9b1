"""Raw samples for a trained model: images, arrays and tensors as the data set had them become a model's input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor

from fedcore.base.registry import needed
from fedcore.data.dataset import Dataset
from fedcore.data.images import ResidentSamples
from fedcore.data.samples import TensorSamples


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
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """How a package makes inputs of raw samples, in plain values. ``recipe["by"]`` is its feature ``(inputs, x)``."""

    @classmethod
    def of(cls, dataset: Dataset) -> Self:
        """Return the form of a data set's samples."""
        samples, shape, names = dataset.train, tuple(dataset.input_shape), tuple(dataset.class_names or ())
        recipe, dtype = getattr(samples, "recipe", {}), "uint8" if getattr(samples, "from_bytes", False) else "float32"
        if isinstance(samples, ResidentSamples):
            return cls("images", shape, dtype, samples.mean, samples.std, (), names, recipe)
        if isinstance(samples, TensorSamples):
            shape, dtype = tuple(samples.inputs.shape[1:]), str(samples.inputs.dtype).removeprefix("torch.")
            return cls("tensor", shape, dtype, samples.mean, samples.std, samples.columns, names, recipe)
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
        :raises ConfigError: the package that prepares them, such as fedcore-zoo, is not installed.
        :raises DataError: they have another shape or type than those of the run, or are sparse, masked or complex.
        """
        prepared: Tensor = needed("feature", self.recipe.get("by", "prepare"), "inputs.prepare")(self, x)
        return prepared
