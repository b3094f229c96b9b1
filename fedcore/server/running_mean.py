"""The weighted mean of models, added one by one in a fixed order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fedcore.base.errors import RejectUpdate
from fedcore.base.types import Tensors
from fedcore.models.layout import Layout


class RunningMean:
    """The weighted mean of models, added one by one in a fixed order.

    One float64 sum of weight * tensor per name, divided once and rounded to the tensor's dtype: equal models
    return exactly themselves. Floating buffers are weighted by samples;
    integer buffers take the maximum.
    """

    def __init__(self, layout: Layout, names: Iterable[str]) -> None:
        self._layout = layout
        self._names = list(names)
        self._sums: Tensors = {}
        self._weight = 0.0
        self._samples = 0

    def add(self, model: Mapping[str, Tensor], *, weight: float, samples: int) -> None:
        """Add one model.

        :raises RejectUpdate: the weight is negative or not finite.
        """
        if not (math.isfinite(weight) and weight >= 0):
            raise RejectUpdate(f"the weight {weight} is not a finite number >= 0")
        self._weight += weight
        self._samples += samples
        for name in self._names:
            tensor = model[name]
            if not tensor.is_floating_point():
                self._sums[name] = torch.maximum(self._sums[name], tensor) if name in self._sums else tensor.clone()
                continue
            if name not in self._sums:
                self._sums[name] = torch.zeros(tensor.shape, dtype=torch.float64)
            factor = samples if name in self._layout.buffers else weight
            self._sums[name].add_(tensor.to(torch.float64), alpha=factor)

    def mean(self) -> Tensors:
        """Return the mean of what was added.

        :raises ZeroDivisionError: all weights are 0.
        """
        result = {}
        for name, total in self._sums.items():
            if not total.is_floating_point():
                result[name] = total
                continue
            divisor = self._samples if name in self._layout.buffers else self._weight
            if divisor == 0:
                raise ZeroDivisionError("the weights of all accepted updates are 0")
            result[name] = (total / divisor).to(self._layout.shapes[name][1])
        return result
