"""Helpers on mappings from names to tensors: copies, sizes, checks, groups joined into one mapping."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedcore.base.types import Tensors

SEPARATOR = "/"
"""Stands between the name of a group and the name of a tensor in it; see :func:`flatten`."""

LARGEST = 1e18
"""The largest magnitude that a client may send. Differences, squares and means of such values are finite in float32."""


def largest_values(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the largest magnitude in each floating-point or complex tensor, by name.

    It is nan or inf for a tensor with values that are not finite. For complex numbers it is the largest real or
    imaginary part. Tensors on the CPU take one pass without copies. All tensors on another device take one wait.
    """
    largest: dict[str, float] = {}
    away: Tensors = {}
    for name, tensor in tensors.items():
        if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
            continue
        real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        if real.is_cpu:
            least, most = torch.aminmax(real)  # as fast as a dot product, and keeps nan
            largest[name] = max(-least.item(), most.item())
        else:
            away[name] = torch.linalg.vector_norm(real, math.inf)
    return largest | numbers(away) if away else largest


def numbers(scalars: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the values of tensors of shape (), by name. All tensors on another device take one wait."""
    away = {name: scalar.double() for name, scalar in scalars.items() if not scalar.is_cpu}
    if not away:
        return {name: scalar.item() for name, scalar in scalars.items()}
    on_device = dict(zip(away, torch.stack([*away.values()]).tolist(), strict=True))
    return {name: on_device[name] if name in on_device else scalar.item() for name, scalar in scalars.items()}


def out_of_range(tensors: Mapping[str, Tensor], most: float = LARGEST) -> tuple[str, str] | None:
    """Return the name of the first tensor with values that are not finite or too large, and a predicate for a message.

    :param most: the largest magnitude that is accepted; infinity accepts all finite values.
    """
    return too_large(largest_values(tensors), most)


def too_large(largest: Mapping[str, float], most: float = LARGEST) -> tuple[str, str] | None:
    """Return what :func:`out_of_range` returns, from the tensors' :func:`largest_values`."""
    for name, value in largest.items():
        if not math.isfinite(value):
            return name, "has values that are not finite"
        if value > most:
            return name, f"has values up to {value:.1e}, more than {most:.0e} counts as diverged"
    return None


def check_tensors(sent: Mapping[str, Tensor], expected: Mapping[str, tuple[Sequence[int], torch.dtype | None]]) -> None:
    """Refuse a client's tensors unless they are exactly the expected ones. A wrong shape could be broadcast unnoticed.

    :param expected: name -> shape and dtype. The dtype None stands for any real floating-point dtype.
    :raises ValueError: names the tensor, its form and the expected form. Raised in ``accumulate``, or in the ``check``
        of ``server.ask``, it rejects that client.
    :raises TypeError: ``expected`` holds something else than pairs of a shape and a dtype.

    >>> check_tensors({"known": torch.tensor(True)}, {"known": ((3,), torch.bool)})
    Traceback (most recent call last):
    ValueError: 'known' is () torch.bool, expected (3,) torch.bool
    """
    for name in sorted({*sent, *expected}):
        if name not in sent or name not in expected:
            raise ValueError(f"{name!r} is {'missing' if name in expected else 'not expected'}")
        tensor, pair = sent[name], expected[name]
        if not (len(pair) == 2 and isinstance(pair[0], Sequence) and isinstance(pair[1], torch.dtype | None)):
            raise TypeError(
                f"expected[{name!r}] is {pair}; give a shape and a dtype, such as ((10,), torch.int64) or ((10,), None)"
            )
        shape, dtype = pair
        fits = tensor.is_floating_point() if dtype is None else tensor.dtype == dtype
        if tensor.shape != torch.Size(shape) or not fits:
            raise ValueError(
                f"{name!r} is {tuple(tensor.shape)} {tensor.dtype}, expected {tuple(shape)} {dtype or 'floating'}"
            )


def check_changes(sent: Mapping[str, Tensor], model: Mapping[str, Tensor], trainable: Iterable[str]) -> None:
    """Refuse tensors that do not match trainable parameters by name, shape and dtype.

    A parameter may be missing: clients do not send frozen ones.

    :raises ValueError: as :func:`check_tensors`.
    """
    check_tensors(sent, {name: (model[name].shape, model[name].dtype) for name in trainable if name in sent})


def copy_into(target: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Copy each tensor of ``source`` into the tensor of ``target`` with the same name."""
    if source:
        with torch.no_grad():
            torch._foreach_copy_([target[name] for name in source], [*source.values()])


def on_cpu(tensors: Mapping[str, Tensor]) -> Tensors:
    """Return tensors on the CPU. Tensors that are already there are not copied."""
    return {name: tensor if tensor.is_cpu else tensor.cpu() for name, tensor in tensors.items()}


def clone(tensors: Mapping[str, Tensor]) -> Tensors:
    """Return copies that own their memory."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def bytes_of(tensors: Mapping[str, Tensor]) -> int:
    """Return the number of bytes of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def digest_of(tensors: Mapping[str, Tensor], text: str = "") -> str:
    """Return the SHA-256, in hex, of a text and of every tensor's name, dtype, shape and values, in any order."""
    described = [[name, str(tensors[name].dtype), list(tensors[name].shape)] for name in sorted(tensors)]
    digest = hashlib.sha256(json.dumps([described, text]).encode())
    for name in sorted(tensors):
        content = tensors[name].detach().cpu().contiguous().unsqueeze(-1)  # a last stride of 1, also of a single value
        digest.update(content.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def flatten(groups: Mapping[str, Mapping[str, Any]]) -> tuple[Tensors, dict[str, dict[str, Any]]]:
    """Split groups of named values, such as plugins' states, into tensors named ``group/name`` and the JSON rest."""
    tensors = {
        f"{group}{SEPARATOR}{name}": value
        for group, values in groups.items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }
    rest = {
        group: {name: value for name, value in values.items() if not isinstance(value, Tensor)}
        for group, values in groups.items()
    }
    return tensors, {group: values for group, values in rest.items() if values}


def unflatten(tensors: Mapping[str, Tensor], rest: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """Join the groups that :func:`flatten` split."""
    groups: dict[str, dict[str, Any]] = {group: dict(values) for group, values in (rest or {}).items()}
    for joined, tensor in tensors.items():
        group, _, name = joined.partition(SEPARATOR)
        groups.setdefault(group, {})[name] = tensor
    return groups
