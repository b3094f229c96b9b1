"""The model of the core: ``mlp``. The papers' networks are the package ``fedcore-zoo``.

It is a file of its own, as in a package with a model: a factory behind an entry point of the group
``fedcore.models``.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from torch import nn

from fedcore.models.split import SplitModel


def mlp(num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
    """Flatten, Linear 128, ReLU, Linear 64, ReLU; features (B, 64). Inputs of any shape.

    Sized for scikit-learn's digits: 64 numbers in, 10 classes, 17,226 parameters.
    """
    base = nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),  # (B, *input_shape) -> (B, product)
            fc1=nn.Linear(math.prod(input_shape), 128),
            relu1=nn.ReLU(),
            fc2=nn.Linear(128, 64),
            relu2=nn.ReLU(),
        )
    )
    return SplitModel(base, 64, num_classes)
