"""What the server sends to all clients of a round: the global model and the plugins' broadcasts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedcore.base.types import Tensors
from fedcore.models.placement import Placement
from fedcore.storage.state import flatten, unflatten


def pack_shared(
    model: Tensors, broadcasts: Mapping[str, Tensors], lr: float, fixed: str = ""
) -> tuple[Tensors, dict[str, Any]]:
    """Return a shared payload as named tensors and JSON.

    :param model: the shared parameters and buffers; ``broadcasts`` tensors by plugin; ``lr`` the round's learning rate.
    :param fixed: digest of the parameters that do not travel; empty without any.
    """
    tensors, _ = flatten({"model": model, "broadcast": flatten(broadcasts)[0]})
    return tensors, {"lr": lr, **({"fixed": fixed} if fixed else {})}


class SharedPayload:
    """A shared payload unpacked into the device's own memory.

    :param tensors: as :func:`pack_shared` returned them; ``meta`` likewise.
    """

    def __init__(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], placement: Placement) -> None:
        groups = unflatten({name: tensor.to(placement.device, copy=True) for name, tensor in tensors.items()})
        self.model: Tensors = placement.weights(groups.get("model", {}))
        self.received: dict[str, Tensors] = unflatten(groups.get("broadcast", {}))
        self.lr = float(meta["lr"])
        self.fixed = str(meta.get("fixed", ""))
