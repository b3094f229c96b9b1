"""Labels that a task refuses are answered with the task that would fit, and ``auto`` takes the one that suits."""

from __future__ import annotations

import numpy as np
import pytest

from fedcore import DataError
from fedcore.data import as_dataset
from tests.sentences import raises

rng = np.random.default_rng(1)
LABELS = {
    "classification": np.arange(40) % 4,
    "regression": rng.normal(size=40),
    "multilabel": rng.integers(0, 2, (40, 4)),
    "survival": np.column_stack([rng.exponential(size=40), rng.random(40) < 0.5]),
    "segmentation": rng.integers(0, 3, (40, 6, 6)),
}
MASKS = LABELS["segmentation"]
STRUCTURED = np.array([(True, 1.5), (False, 2.0)] * 20, dtype=[("event", bool), ("time", float)])
IMAGES = rng.normal(size=(40, 1, 6, 6)).astype(np.float32)
FORMS = [*LABELS.items(), ("survival", STRUCTURED), ("regression", rng.normal(size=(40, 3)))]
FORMS += [("segmentation", MASKS.astype(np.float32)), ("segmentation", MASKS > 0)]
FORMS += [("segmentation", MASKS[:, None]), ("segmentation", MASKS[..., None])]  # as torch and Keras have them
REFUSED = [
    (task, fits, y)
    for task in (*LABELS, "survival-discrete", "regression-huber")
    for fits, y in FORMS
    if not task.startswith(fits) and not (task.startswith("regression") and y.dtype.kind in "fiu" and y.ndim < 3)
]


@pytest.mark.parametrize(("fits", "y"), FORMS)
def test_auto_takes_the_task_that_suits(fits, y):
    assert as_dataset((IMAGES, y, IMAGES, y)).task.name == fits


@pytest.mark.parametrize("y", [MASKS[:, None], MASKS[..., None]])
def test_masks_with_an_axis_of_channels_are_masks(y):
    assert as_dataset((IMAGES, y, IMAGES, y)).train.labels.tolist() == MASKS.tolist()


@pytest.mark.parametrize(("task", "fits", "y"), REFUSED)
def test_the_task_that_would_fit_is_named(task, fits, y):
    with raises(DataError, "y_train") as refused:
        as_dataset((IMAGES, y, IMAGES, y), "own", task)
    assert str(refused.value).endswith(f" --task {fits}")


@pytest.mark.parametrize("y", [np.array(["a", "b"] * 20), np.arange(40) % 2 == 0, np.full(40, 2.0)])
def test_labels_of_no_task_are_answered_with_no_task(y):
    with raises(DataError, "y_train") as caught:
        as_dataset((IMAGES, y, IMAGES, y), "own", "survival")
    assert "--task" not in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_missing_number_is_named_where_it_is():
    y = LABELS["regression"].copy()
    y[7] = np.nan
    with raises(DataError, "y_train", "sample 7"):
        as_dataset((IMAGES, y, IMAGES, y))


def test_a_class_that_only_test_masks_have_is_refused():
    test = LABELS["segmentation"].copy()
    test[0, 0, 0] = 5
    with raises(DataError, "y_test", 6, "y_train", 3):
        as_dataset((IMAGES, LABELS["segmentation"], IMAGES, test))
