"""The layout of the shared model: names, shapes and dtypes, and the check of received tensors against it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedcore.base.errors import NonFiniteUpdate, RejectUpdate
from fedcore.base.tensors import first_nonfinite


@dataclass(frozen=True)
class Layout:
    """Names, shapes and kinds of a model's tensors.

    :param shapes: name -> (shape, dtype), in the model's order, of every parameter and persistent buffer.
    :param buffers: the names that are buffers.
    :param trainable: the parameters that require gradients.
    :param personal: the names that stay on each client.
    """

    shapes: Mapping[str, tuple[torch.Size, torch.dtype]]
    buffers: frozenset[str]
    trainable: frozenset[str]
    personal: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module, personal: Collection[str] = ()) -> Layout:
        """Describe a model."""
        state = model.state_dict()
        parameters = dict(model.named_parameters())
        return cls(
            shapes={name: (tensor.shape, tensor.dtype) for name, tensor in state.items()},
            buffers=frozenset(name for name in state if name not in parameters),
            trainable=frozenset(name for name, parameter in parameters.items() if parameter.requires_grad),
            personal=frozenset(personal),
        )

    @property
    def shared(self) -> list[str]:
        """The names that are exchanged: all that are not personal."""
        return [name for name in self.shapes if name not in self.personal]

    def check(self, tensors: Mapping[str, Tensor], names: Iterable[str], what: str) -> None:
        """Refuse tensors that are not exactly these names in this layout, or not finite.

        :raises RejectUpdate: names the tensor, the expectation and the finding.
        """
        expected = set(names)
        missing, extra = sorted(expected - set(tensors)), sorted(set(tensors) - expected)
        if missing or extra:
            raise RejectUpdate(
                f"{what}: " + (f"{missing[0]!r} is missing" if missing else f"{extra[0]!r} is not expected")
            )
        for name, tensor in tensors.items():
            shape, dtype = self.shapes[name]
            if tensor.shape != shape or tensor.dtype != dtype:
                raise RejectUpdate(
                    f"{what}: {name!r} is {tuple(tensor.shape)} {tensor.dtype}, expected {tuple(shape)} {dtype}"
                )
        broken = first_nonfinite(tensors)
        if broken is not None:
            raise NonFiniteUpdate(f"{what}: {broken!r} has values that are not finite")
