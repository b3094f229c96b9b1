"""Tasks: what labels are, and how models are trained and judged on them. The core's own task is classification."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcore.base.errors import PluginContractError
from fedcore.base.metrics import NO_METRICS, Counts, Metrics
from fedcore.base.registry import available, needed, resolve
from fedcore.data.samples import Array


class Task:
    """What models learn to predict, and how they are judged. This one is classification, of the core.

    Another task is a subclass behind an entry point of the group ``fedcore.tasks``: ``classes = False``, and methods of
    its own for all that is here. An object belongs to a data set. It is made of training labels, of which it may keep
    statistics. It has no other state, as every process of a run has a copy.

    :param labels: training labels as :meth:`read` returns them, (n, ...).
    """

    name: ClassVar[str] = "classification"
    """The task's name, for messages."""
    classes: ClassVar[bool] = True
    """Whether labels are classes, (n,) int64, and logits have a column for each. Many methods need classes."""
    model: ClassVar[str | None] = None
    """The model of ``--model auto``; None for the data set's."""
    example: ClassVar[str | None] = None
    """A small data set, for ``plugins check --task``; None where digits have labels of the task."""
    grid: tuple[int, ...] = ()
    """The axes of logits and features after (B, C) and (B, d): those of an image if each pixel is predicted."""
    metrics: Metrics = NO_METRICS
    """The figures of an evaluation next to the loss, by name. The first is the one by which models are compared."""

    form: Mapping[str, Any] = MappingProxyType({})
    """What the task keeps of the labels, plain values: clients that hold their own data make the same task of it."""

    def __init__(self, labels: Tensor) -> None: ...

    @classmethod
    def of(cls, form: Mapping[str, Any]) -> Self:
        """Return the task that has this form."""
        return cls(torch.empty(0))

    @classmethod
    def suits(cls, y: Array) -> bool:
        """Return whether labels can only be meant for this task. Whole numbers (n,) are classes."""
        return y.ndim == 1 and y.dtype.kind in "iu"

    @classmethod
    def read(cls, y: Array, count: int, where: str) -> Tensor:
        """Return an array of labels as a tensor (count, ...).

        :raises DataError: they are not labels of this task. The message begins with ``where``, and tells what to do.
        """
        labels: Tensor = needed("feature", "class_labels", "an array of classes")(y, count, where)
        return labels

    @classmethod
    def width(cls, labels: Tensor) -> int:
        """Return C, the width of the logits, for training labels (n, ...) as :meth:`read` returns them."""
        return int(labels.max()) + 1

    def fitted(self, labels: Tensor) -> Self:
        """Return the task with its statistics, if it has any, from the labels of the clients' training parts alone."""
        return self

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of a batch, of shape (). It has a gradient, and does not wait for the device."""
        return F.cross_entropy(logits, labels)

    def predict(self, logits: Tensor) -> Tensor:
        """Return the predictions (B, ...) for logits, in the units of the labels that :meth:`read` is given."""
        return logits.argmax(dim=1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probabilities of the predictions.

        :raises ConfigError: the task has none.
        """
        return logits.softmax(dim=1)

    def strata(self, labels: Tensor) -> Tensor:
        """Return groups of similar labels, (n,) int64: what partitioners and draws take for classes."""
        return labels

    def count(self, logits: Tensor, labels: Tensor, *, confusion: bool = False) -> Counts:
        """Return the counts of samples, without the metrics.

        For no samples, ``logits`` are (0, C), and ``labels`` are (0,) int64.

        :param confusion: count the confusion matrix of classes, too.
        """
        return Counts.of(logits, labels, confusion=confusion)


CLASSIFICATION = Task(torch.empty(0))


def task_of(name: str, y: Array) -> type[Task]:
    """Return the class of a task.

    :param name: of ``--task``. ``auto`` is the only installed task that suits the labels, else classification.
    :param y: the training labels, (n, ...).
    """
    if name == "auto":
        suiting = [Task] if Task.suits(y) else [task for task in map(_task, available("task")) if task.suits(y)]
        return suiting[0] if len(suiting) == 1 else Task
    return _task(name)


def _task(name: str) -> type[Task]:
    task = resolve("task", name)
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise PluginContractError.of(name, "is not a subclass of fedcore.data.Task", kind="task")
    return task


def other_task(y: Array, task: type[Task] = Task) -> str:
    """Return the end of a message on labels that ``task`` refuses, which another one may take."""
    fitting = task_of("auto", y)
    if fitting is not task and fitting.suits(y):
        return f". Such labels are of --task {fitting.name}"
    others = ". Numbers to predict, several labels, times and masks are of other tasks, of the package fedcore-tasks"
    return "" if "regression" in available("task") else others
