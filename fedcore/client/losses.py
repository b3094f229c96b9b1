"""A client's losses, summed by name on the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


class LossTotals:
    """Sums of losses by name on the device, read once, after the last epoch.

    :param sums: tensors to add into, set to 0 here; captured steps need them at fixed addresses.
    """

    def __init__(self, sums: dict[str, Tensor] | None = None) -> None:
        self._sums = {} if sums is None else sums
        self._counts: dict[str, int] = {}
        for total in self._sums.values():
            total.zero_()

    def add(self, name: str, value: Tensor) -> None:
        """Add one batch's value."""
        if name not in self._sums:
            self._sums[name] = torch.zeros_like(value, memory_format=torch.contiguous_format)
        self._sums[name].add_(value.detach())
        self.count([name])

    def count(self, names: Iterable[str]) -> None:
        """Count one more batch, whose values a captured step has added."""
        for name in names:
            self._counts[name] = self._counts.get(name, 0) + 1

    def names(self) -> set[str]:
        """Return the names that have a sum."""
        return set(self._sums)

    def counts(self) -> dict[str, int]:
        """Return by name how many batches took part."""
        return dict(self._counts)

    def restore(self, counts: Mapping[str, int]) -> None:
        """Go back to earlier counts."""
        self._counts = dict(counts)

    def means(self) -> dict[str, float]:
        """Return the mean over the batches in which each loss took part; syncs with the host, once."""
        if all(self._sums[name].is_cpu for name in self._counts):
            return {name: float(self._sums[name]) / count for name, count in self._counts.items()}
        sums = [self._sums[name].double() for name in self._counts]
        # Constants are on the CPU: move all sums to the device of the others.
        device = max((total.device for total in sums), key=lambda device: device.type != "cpu")
        totals: list[float] = torch.stack([total.to(device) for total in sums]).tolist()
        return {name: total / count for total, (name, count) in zip(totals, self._counts.items(), strict=True)}
