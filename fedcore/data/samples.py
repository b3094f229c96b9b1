"""Samples: labels, and model inputs gathered by position. Rows of a table."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Protocol, Self, TypeAlias, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor

from fedcore.base.errors import DataError

Array: TypeAlias = npt.NDArray[Any]

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"


Method = TypeVar("Method", bound=Callable[..., Any])


def by_any_thread(gather: Method) -> Method:
    """Mark the method ``gather`` of samples in memory: several threads may call it at once.

    One thread calls any other, such as a subclass's own: it may read an open file.
    """
    vars(gather)["by_any_thread"] = True
    return gather


class Samples(Protocol):
    """Labelled samples: images, rows of a table, texts, graphs.

    A batch is a tensor (B, ...), or any object with ``to(device)`` that models of its kind take. The core gathers a
    batch by position, moves it to the device and passes it to the model. It does not look into it.

    Worker processes get the object by ``pickle``, but they share one copy of its tensors. The tensors are never written
    to.
    """

    kind: ClassVar[str]
    """Kind of the batches: ``"tensor"``, or another word, such as ``"graphs"``, that models name in ``takes``."""
    fixed_shape: ClassVar[bool]
    """Whether all batches of one size have the same shapes, so that a step on one can be replayed on another."""

    @property
    def labels(self) -> Tensor:
        """Classes, (n,) int64; labels of other tasks are (n, ...)."""

    def __len__(self) -> int: ...

    def gather(self, indices: Tensor) -> Any:
        """Return the model's input for the samples at ``indices`` (B,) int64, in this order: the same at each call.

        A round keeps the outputs of frozen models by sample. Random changes of inputs are a data set's augmentation.
        """

    def to(self, device: torch.device, memory_format: torch.memory_format) -> Self:
        """Return the samples on a device; ``memory_format`` applies to images, other samples ignore it."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that, with :meth:`meta`, determine the samples. A resumed run compares their digest."""

    def meta(self) -> dict[str, JSON]:
        """Return everything else as JSON values."""


class TensorSamples:
    """Tensors of one shape, gathered by index without preprocessing: rows of a table, signals, features.

    :param inputs: (n, ...), of any dtype; a batch is (B, ...).
    :param labels: (n,) int64.
    :param mean: what was subtracted from each column of a table, if ``inputs`` are its normalised rows; ``std`` is by
        what each column was then divided. A run's result normalises raw rows in the same way.
    :param columns: the names of a table's columns in order. Other tables of the run are matched by these names.
    :raises DataError: labels, mean and std, or columns do not fit the inputs.
    """

    kind: ClassVar[str] = "tensor"
    fixed_shape: ClassVar[bool] = True

    def __init__(
        self,
        inputs: Tensor,
        labels: Tensor,
        *,
        mean: Tensor | Iterable[float] = (),
        std: Tensor | Iterable[float] = (),
        columns: Iterable[str] = (),
    ) -> None:
        check_labels(labels, len(inputs) if inputs.ndim else 0, of_any_task=True)
        self.inputs, self.labels = inputs, labels
        self.mean, self.std = tuple(map(float, mean)), tuple(map(float, std))
        self.columns = tuple(map(str, columns))
        if (self.mean or self.std) and not (len(self.mean),) == (len(self.std),) == inputs.shape[1:]:
            raise DataError(
                f"mean has {len(self.mean)} numbers and std {len(self.std)}; each needs one for every column of inputs "
                f"(n, columns), which are {tuple(inputs.shape)}"
            )
        if self.columns and (len(self.columns),) != inputs.shape[1:]:
            raise DataError(f"columns has {len(self.columns)} names, but inputs (n, columns) are {tuple(inputs.shape)}")

    def with_columns(self, columns: Sequence[str], name: str) -> Self:
        """Return the rows with their columns, mean and std in the order ``columns`` of another table.

        They are matched by name. If one of the tables has no names, the rows are returned as they are.

        :raises DataError: a column is missing, or is none of ``columns``. The message calls this table ``name``.
        """
        if not (columns and self.columns) or tuple(columns) == self.columns:
            return self
        place = {column: number for number, column in enumerate(self.columns)}
        missing, wanted = [column for column in columns if column not in place], set(columns)
        surplus = [column for column in self.columns if column not in wanted]
        if missing or surplus:
            raise DataError(
                f"{name} has other columns than the run. Missing: {first_ten(missing) or 'none'}; not in the run: "
                f"{first_ten(surplus) or 'none'}. Rename columns, or choose them, as in hf:FILE.csv?columns=NAME,NAME. "
                f"The run's {len(columns)}: {first_ten(columns)}"
            )
        order = [place[column] for column in columns]
        turned = copy.copy(self)
        turned.inputs, turned.columns = self.inputs[:, order], tuple(columns)
        turned.mean, turned.std = (tuple(of[k] for k in order) if of else () for of in (self.mean, self.std))
        return turned

    def __len__(self) -> int:
        return len(self.labels)

    @by_any_thread
    def gather(self, indices: Tensor) -> Tensor:
        """Return the inputs at ``indices`` (B,) int64 as (B, ...)."""
        return self.inputs.index_select(0, indices.to(self.inputs.device))

    def to(self, device: torch.device, memory_format: torch.memory_format) -> Self:
        """Return the samples on a device."""
        moved = copy.copy(self)
        moved.inputs, moved.labels = self.inputs.to(device), self.labels.to(device)
        return moved

    def tensors(self) -> dict[str, Tensor]:
        """Return inputs and labels by name."""
        return {"inputs": self.inputs, "labels": self.labels}

    def meta(self) -> dict[str, JSON]:
        """Return an empty dictionary: the tensors are complete."""
        return {}


def first_ten(names: Sequence[object]) -> str:
    """Return names for a message; of many the first ten and the number of the others."""
    return ", ".join(map(str, names[:10])) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def check_offsets(name: str, offsets: Tensor, total: int) -> None:
    """Refuse offsets that do not split ``total`` rows into runs.

    :raises DataError: states the defect.
    """
    if offsets.ndim != 1 or offsets.dtype != torch.int64 or not len(offsets):
        raise DataError(f"{name} must be int64 of shape (n + 1,), not {offsets.dtype} of {tuple(offsets.shape)}")
    if int(offsets[0]) != 0 or int(offsets[-1]) != total or bool((offsets.diff() < 0).any()):
        raise DataError(f"{name} must rise from 0 to {total}, the number of rows")


def check_labels(labels: Tensor, count: int, *, of_any_task: bool = False) -> None:
    """Refuse labels that are not int64 of shape (count,).

    :param of_any_task: accept numbers of other types, and of the shape (count, ...), too.
    :raises DataError: states their dtype and shape.
    """
    if not isinstance(labels, Tensor):
        raise DataError(f"labels must be a tensor, int64 of shape ({count},), not a {type(labels).__name__}")
    other = of_any_task and (labels.ndim > 1 or labels.is_floating_point())
    if labels.shape[:1] != (count,) or not (other or (labels.ndim == 1 and labels.dtype == torch.int64)):
        raise DataError(f"labels must be int64 of shape ({count},), not {labels.dtype} of {tuple(labels.shape)}")
