"""Rules of :func:`torch.func.vmap` that are slow or wrong, in other words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from fedcore import FedcoreError
from fedcore_functional import VmapRules

OF_MEMORY = {
    *(torch.as_strided, torch.flatten, torch.ravel, torch.reshape, torch.view_as_complex),
    *(Tensor.as_strided, Tensor.contiguous, Tensor.flatten, Tensor.ravel, Tensor.reshape, Tensor.reshape_as),
    *(Tensor.view, Tensor.view_as, Tensor.is_contiguous, Tensor.stride),
}
"""What these return depends on how a tensor lies in memory: a part of it, or a copy."""


class OutOfOrder(FedcoreError):
    """A model, or a hook, needs the outputs of linear layers in order."""


class Rules(VmapRules):
    """Has the operations in its block follow these rules, and those of :class:`fedcore_functional.VmapRules`.

    Gradients of :func:`torch.nn.functional.linear` come transposed, and the copy of each takes as long as the product.

    :param weights: of one client, as ``vmap`` shows them.
    :param own: the model's parameters, whose place these weights take in its modules.
    :param in_order: whether outputs of linear layers lie in memory as they do alone, which takes a copy each.
    :raises OutOfOrder: they do not, and the result of a function may depend on it.
    :raises RuntimeError: a function is used that ``vmap`` makes something else of.
    """

    def __init__(self, weights: Iterable[Tensor], own: Iterable[Tensor], *, in_order: bool) -> None:
        super().__init__(own)
        self._weights, self._in_order = set(map(id, weights)), in_order
        self._has_products = False
        """Whether there are outputs of linear layers. Those of other operations may lie as they do."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in OF_MEMORY and self._has_products and not self._in_order:
            raise OutOfOrder
        if func is not F.linear or len(args) < 3 or args[0].dim() != 2 or id(args[1]) not in self._weights:
            return super().__torch_function__(func, types, args, kwargs)
        self._has_products = True
        rows, weight, bias = args
        product = weight @ rows.mT if bias is None else torch.addmm(bias.unsqueeze(1), weight, rows.mT)
        return product.mT.contiguous() if self._in_order else product.mT
