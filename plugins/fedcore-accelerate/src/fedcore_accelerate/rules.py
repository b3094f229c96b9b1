"""Rules of :func:`torch.func.vmap` that are slow or wrong, in other words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from fedcore import FedcoreError
from fedcore_accelerate.stacked_step import NotStackable
from fedcore_functional import embedding_under_vmap

REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]

OF_MEMORY = {
    *(torch.as_strided, torch.flatten, torch.ravel, torch.reshape, torch.view_as_complex),
    *(Tensor.as_strided, Tensor.contiguous, Tensor.flatten, Tensor.ravel, Tensor.reshape, Tensor.reshape_as),
    *(Tensor.view, Tensor.view_as, Tensor.is_contiguous, Tensor.stride),
}
"""What these return depends on how a tensor lies in memory: a part of it, or a copy."""

WRONG = {
    **{getattr(Tensor, name).__get__: name for name in ("grad", "grad_fn", "is_leaf")},  # those of no client
    **{home.select_scatter: "select_scatter" for home in (torch, Tensor)},  # its gradients are too large
    **{home.index_fill: "index_fill" for home in (torch, Tensor)},  # fills with the last client's value
}
"""Functions of which ``vmap`` makes something else, with their names."""


class OutOfOrder(FedcoreError):
    """A model, or a hook, needs the outputs of linear layers in order."""


class Rules(TorchFunctionMode):
    """Has the operations in its block follow these rules.

    Gradients of :func:`torch.nn.functional.linear` come transposed, and the copy of each takes as long as the product.
    Those of :func:`torch.nn.functional.embedding` leave out the first client's padding row alone. No tensor says that
    it requires a gradient, so that a hook on its gradient is left out. A parameter of the model itself is that of one
    client, or of none.

    :param weights: of one client, as ``vmap`` shows them.
    :param own: the model's parameters, whose place these weights take in its modules.
    :param in_order: whether outputs of linear layers lie in memory as they do alone, which takes a copy each.
    :raises OutOfOrder: they do not, and the result of a function may depend on it.
    :raises NotStackable: a function is used that ``vmap`` makes something else of.
    """

    def __init__(self, weights: Iterable[Tensor], own: Iterable[Tensor], *, in_order: bool) -> None:
        super().__init__()
        self._weights, self._own, self._in_order = set(map(id, weights)), set(map(id, own)), in_order
        self._has_products = False
        """Whether there are outputs of linear layers. Those of other operations may lie as they do."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func == REQUIRES_GRAD:
            return _requires_grad(*args)
        if func in OF_MEMORY and self._has_products and not self._in_order:
            raise OutOfOrder
        if func in WRONG:
            raise NotStackable(f"the model or a hook uses {WRONG[func]} of a tensor")
        if any(id(value) in self._own for value in _flat((*args, *named.values()))):
            raise NotStackable("the model or a hook holds a parameter elsewhere than in its modules, as in a list")
        if func is F.embedding:
            return embedding_under_vmap(*args, **named)
        if func is not F.linear or len(args) < 3 or args[0].dim() != 2 or id(args[1]) not in self._weights:
            return func(*args, **named)
        self._has_products = True
        rows, weight, bias = args
        product = weight @ rows.mT if bias is None else torch.addmm(bias.unsqueeze(1), weight, rows.mT)
        return product.mT.contiguous() if self._in_order else product.mT


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
