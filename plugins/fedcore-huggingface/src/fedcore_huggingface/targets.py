"""Data sets of targets: numbers, several labels of 0 and 1, or a time and whether the event happened."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedcore.data import Dataset, Task, with_labels
from fedcore_huggingface.inputs import input_fields
from fedcore_huggingface.spec import Options
from fedcore_huggingface.splits import in_two
from fedcore_huggingface.table import Array, Table
from fedcore_tasks import MultiLabel, Regression, Survival
from fedcore_zoo import FittedRecipe

SMALLEST_STRATUM = 5
"""Samples of each group of similar targets, of which the test part gets one; with fewer it is drawn at random."""


def read_targets(train: Table, tests: dict[str, Table], options: Options, fitted: FittedRecipe | None) -> Dataset:
    """Return a data set of the task that the targets are of."""
    if options.label is not None:
        raise train.error("write ?label for a column of classes, or ?target for numbers, not both")
    columns = [train.plain(column) for column in options.target or ()]
    test, strata_of = next(iter(tests.values()), None), partial(_strata, name=train.name)
    tables, targets = in_two(train, test, partial(_targets, columns=columns), strata_of, options)
    zeros = [torch.zeros(len(part), dtype=torch.int64) for part in tables]  # the targets take their place
    fields = input_fields(tables, zeros, columns, options, fitted)
    task, values = _task_of(targets[0]), [np.unique(column).tolist() for column in np.atleast_2d(targets[0].T)]
    events = [place for place, own in enumerate(values) if len(own) == 2]
    if events and task is Regression and len(columns) == 2:
        note = (
            f"{train.name}: target {columns[events[0]]!r} holds {values[events[0]]}, predicted as a number. "
            "For survival write ?target=TIME,EVENT, the event 1 where it happened and 0 elsewhere"
        )
        fields["notes"] = (*fields.get("notes", ()), note)
    return with_labels(Dataset(name=train.name, num_classes=1, **fields), task, *targets)


def _targets(table: Table, columns: Sequence[str]) -> Array:
    """Return the cells of columns as numbers, (n,) or (n, columns) float64."""
    values = np.empty((len(table), len(columns)))
    for place, column in enumerate(columns):
        values[:, place] = table.numbers(column, f". Write ?label={column} if they are classes")
        if wrong := len(table) - int(np.isfinite(values[:, place]).sum()):
            raise table.error(
                f"{wrong} of the {len(table)} cells of column {column!r}, a target, are empty or not finite. "
                "Leave out their rows"
            )
    return values[:, 0] if len(columns) == 1 else values


def _task_of(targets: Array) -> type[Task]:
    """Return the task of targets (n,) or (n, C)."""
    if targets.ndim == 1:
        return Regression
    binary = [bool(np.isin(column, (0, 1)).all()) for column in targets.T]
    if all(binary):
        return MultiLabel
    return Survival if len(binary) == 2 and binary[1] and (targets[:, 0] >= 0).all() else Regression


def _strata(targets: Array, name: str) -> tuple[Tensor, Sequence[str]]:
    """Return groups of similar targets, (n,) int64, and their names."""
    task = _task_of(targets)
    labels = task.read(targets, len(targets), name)
    strata = task(labels).strata(labels)
    if int(strata.unique(return_counts=True)[1].min()) < SMALLEST_STRATUM:
        strata = torch.zeros_like(strata)
    return strata, [str(number) for number in range(int(strata.max()) + 1)]
