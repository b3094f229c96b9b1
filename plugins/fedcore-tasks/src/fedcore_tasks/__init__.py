"""Tasks other than one class for each sample: regression, several labels, survival, a class for each pixel."""

from fedcore_tasks.multilabel import MultiLabel
from fedcore_tasks.regression import Regression, RegressionHuber, RegressionL1
from fedcore_tasks.segmentation import Segmentation
from fedcore_tasks.survival import Survival, SurvivalDiscrete
from fedcore_tasks.targets import Targets, TaskFigure

__all__ = [
    "MultiLabel",
    "Regression",
    "RegressionHuber",
    "RegressionL1",
    "Segmentation",
    "Survival",
    "SurvivalDiscrete",
    "Targets",
    "TaskFigure",
]
