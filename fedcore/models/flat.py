"""Updates whose parameters are one flat tensor: they are copied, checked, sent and added up in one operation each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedcore.base.tensors import clone, first_nonfinite
from fedcore.base.types import Tensors
from fedcore.models.layout import Layout

JOINED = "parameters"
"""Name of the flat tensor: no tensor of a module can have it, since that is a method."""


@dataclass(frozen=True)
class FlatLayout(Layout):
    """A layout in which the shared parameters are one flat tensor, beside tensors of other kinds.

    :param joined: shapes of the parameters in it by name, in the model's order.
    """

    joined: Mapping[str, torch.Size] = field(default_factory=dict)

    @classmethod
    def flat(cls, layout: Layout) -> Layout:
        """Return a layout with the shared parameters of the most common dtype joined; unchanged without any."""
        found = {name: layout.shapes[name] for name in layout.shared if name not in layout.buffers}
        numbers = Counter[torch.dtype]()
        for shape, own in found.values():
            if own.is_floating_point:
                numbers[own] += shape.numel()
        if not numbers:
            return layout
        dtype = max(numbers, key=numbers.__getitem__)
        joined = {name: shape for name, (shape, own) in found.items() if own == dtype}
        size = torch.Size([numbers[dtype]])
        others = {name: layout.shapes[name] for name in layout.shared if name not in joined}
        shapes = {JOINED: (size, dtype), **others}
        return cls(shapes, layout.buffers, layout.trainable, frozenset(), joined=joined)

    def join(self, state: Mapping[str, Tensor]) -> Tensors:
        """Return copies of a model's shared tensors in this layout."""
        flat = torch.cat([state[name].flatten() for name in self.joined])
        return {JOINED: flat, **clone({name: state[name] for name in self.shapes if name != JOINED})}

    def split(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """Return tensors in this layout by their names in the model, with copies of what was joined."""
        pieces = tensors[JOINED].split([shape.numel() for shape in self.joined.values()])
        named = {n: piece.view(shape).clone() for (n, shape), piece in zip(self.joined.items(), pieces, strict=True)}
        return {**named, **{name: tensor for name, tensor in tensors.items() if name != JOINED}}

    def first_nonfinite(self, tensors: Mapping[str, Tensor]) -> str | None:
        """Return the first name in the model whose tensor holds nan or inf, or None."""
        broken = first_nonfinite(tensors)
        return first_nonfinite(self.split(tensors)) if broken == JOINED else broken
