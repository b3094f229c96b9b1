"""State-dict algebra: the layout of the shared model, its check, and the fold of many models into one."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedcore.errors import NonFiniteUpdate, RejectUpdate

Tensors = dict[str, Tensor]


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
        """Names that travel: everything that is not personal."""
        return [name for name in self.shapes if name not in self.personal]

    def check(self, tensors: Mapping[str, Tensor], names: Iterable[str], what: str) -> None:
        """Refuse tensors that are not exactly these names in this layout, or not finite.

        :raises RejectUpdate: says which tensor, what was expected and what was found.
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


def first_nonfinite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the first name whose tensor holds nan or inf, or None."""
    for name, tensor in tensors.items():
        if (tensor.is_floating_point() or tensor.is_complex()) and not _is_finite(tensor):
            return name
    return None


def _is_finite(tensor: Tensor) -> bool:
    if tensor.dtype in (torch.float32, torch.float64):
        # A product with itself is one pass without temporaries; where it overflows, or is not finite, look closer.
        flat = tensor.flatten()
        if bool(torch.isfinite(torch.dot(flat, flat))):
            return True
    return bool(torch.isfinite(tensor).all())


def check_tensors(sent: Mapping[str, Tensor], expected: Mapping[str, tuple[Sequence[int], torch.dtype | None]]) -> None:
    """Refuse what a client sent for a plugin if it is not exactly these tensors; a wrong shape could be broadcast.

    :param expected: name -> shape and dtype; None for any real floating one.
    :raises ValueError: which tensor, what it is and what was expected. Raised in ``accumulate``, or in the ``check`` of
        ``server.ask``, it leaves the client out by name.

    >>> check_tensors({"known": torch.tensor(True)}, {"known": ((3,), torch.bool)})
    Traceback (most recent call last):
    ValueError: 'known' is () torch.bool, expected (3,) torch.bool
    """
    for name in sorted({*sent, *expected}):
        if name not in sent or name not in expected:
            raise ValueError(f"{name!r} is {'missing' if name in expected else 'not expected'}")
        tensor, (shape, dtype) = sent[name], expected[name]
        fits = tensor.is_floating_point() if dtype is None else tensor.dtype == dtype
        if tensor.shape != torch.Size(shape) or not fits:
            raise ValueError(
                f"{name!r} is {tuple(tensor.shape)} {tensor.dtype}, expected {tuple(shape)} {dtype or 'floating'}"
            )


def check_changes(sent: Mapping[str, Tensor], model: Mapping[str, Tensor], trainable: Iterable[str]) -> None:
    """Refuse what is not one tensor for some of a model's trainable ones each; what a round freezes is not sent.

    :raises ValueError: as :func:`check_tensors`.
    """
    check_tensors(sent, {name: (model[name].shape, model[name].dtype) for name in trainable if name in sent})


def clone(tensors: Mapping[str, Tensor]) -> Tensors:
    """Return copies that own their memory."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def bytes_of(tensors: Mapping[str, Tensor]) -> int:
    """Return the number of bytes of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


class Fold:
    """The weighted mean of models, added one by one in a fixed order.

    One float64 sum of weight * tensor per name, divided once and rounded to the tensor's dtype: equal models
    return exactly themselves. Floating buffers are weighted by samples whatever the parameters' weights;
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
