"""A model under :func:`torch.func.vmap` with weights of each client's, or sample's, own: as alone, or an error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from typing_extensions import override

REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]

WRONG = {
    **{getattr(Tensor, name).__get__: name for name in ("grad", "grad_fn", "is_leaf")},  # those of no client
    **{home.select_scatter: "select_scatter" for home in (torch, Tensor)},  # its gradients are too large
    **{home.index_fill: "index_fill" for home in (torch, Tensor)},  # fills with the last client's value
    getattr(F, "linear_cross_entropy", None): "linear_cross_entropy",  # of torch 2.13: in chunks it has no gradient
}
"""Functions of which ``vmap`` of torch 2.13 makes something else, with their names."""


class VmapRules(TorchFunctionMode):
    """Has the operations in its block, which is under ``vmap``, do what they do alone.

    Gradients of :func:`torch.nn.functional.embedding` leave out the first client's padding row alone. No tensor says
    that it requires a gradient, so that a hook on its gradient is left out. A parameter of the model itself is that of
    one client, or of none.

    :param own: the model's parameters, whose place other weights take in its modules.
    :raises RuntimeError: an operation cannot.
    """

    def __init__(self, own: Iterable[Tensor]) -> None:
        super().__init__()
        self._own = set(map(id, own))

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func == REQUIRES_GRAD:
            return _requires_grad(*args)
        if func in WRONG:
            raise RuntimeError(f"the model or a hook uses {WRONG[func]} of a tensor")
        if any(id(value) in self._own for value in _flat((*args, *named.values()))):
            raise RuntimeError("the model or a hook holds a parameter elsewhere than in its modules, as in a list")
        return (_embedding if func is F.embedding else func)(*args, **named)


def as_parameters(tensors: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """Let tensors that take the place of a model's parameters be instances of ``nn.Parameter``: it may ask.

    >>> as_parameters({"weight": (weight := torch.zeros(2))}, ["weight"])
    >>> isinstance(weight, torch.nn.Parameter)
    True
    """
    for name in tensors.keys() & names:
        tensors[name]._is_param = True


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _requires_grad(tensor: Tensor) -> bool:
    while not tensor.requires_grad and is_batchedtensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor.requires_grad


def _embedding(indices: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **more: Any) -> Tensor:
    rows = F.embedding(indices, weight, None, *args, **more)
    if padding_idx is None:
        return rows
    return torch.where((indices == padding_idx % len(weight)).unsqueeze(-1), rows.detach(), rows)
