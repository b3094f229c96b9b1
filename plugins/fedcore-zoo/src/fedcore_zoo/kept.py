"""Cautions on what a network keeps outside of its state: in objects, which no client starts anew with; in tensors."""

from __future__ import annotations

import pickle
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, MethodType

import torch
from torch import Tensor, nn

from fedcore.client import Setup, random_stream
from fedcore.models import PlainAttributes, training_copy

_PLAIN = (type(None), bool, int, float, str, bytes, tuple, Tensor, nn.Module, type)
"""Types of attributes that every client has anew, or that nothing changes in place."""


def kept_objects(setup: Setup) -> list[str]:
    """Return cautions about an object or a tensor of the network that is not in its state and that training changes."""
    present = PlainAttributes(setup.model)
    if not _contents(present) and not _tensors(present):
        return []  # most networks: they need not be copied
    trial = training_copy(setup.model)
    plain, sample = PlainAttributes(trial), setup.sample
    before, first = _contents(plain), _tensors(plain)
    with torch.no_grad(), random_stream(0), suppress(Exception):  # the first round tells what it raises
        trial(torch.cat([sample, sample]) if isinstance(sample, Tensor) else sample)
    last = _tensors(plain)
    plain.restore()
    after, cautions = _contents(plain), []
    if changed := next((name for name in before if before[name] != after.get(name)), None):
        cautions.append(
            f"training changes {changed} of the model, an object with which clients do not start anew: if the model's "
            "outputs depend on it, results depend on the number of workers. Keep values in buffers (register_buffer) "
            "or in attributes of the module itself, and draw from torch's global generator"
        )
    moved = [name for name in first if name in last and last[name].shape == first[name].shape]
    if changed := next((name for name in moved if not torch.equal(last[name], first[name])), None):
        cautions.append(
            f"training changes {changed} of the model, a tensor that is not in its state: each client and each "
            "evaluation begins with its first value. Statistics, such as a running mean, are buffers (register_buffer) "
            "that forward writes into (copy_)"
        )
    return cautions


def _tensors(plain: PlainAttributes) -> dict[str, Tensor]:
    """Return copies of a network's floating-point tensors outside of its state, as ``Class.name``."""
    own = [
        (part, name, value) for part, own in zip(plain.parts, plain.now(), strict=True) for name, value in own.items()
    ]
    own += [(module, name, getattr(module, name)) for module, name, *_ in plain.unsaved]
    return {
        f"{type(part).__name__}.{name}": value.detach().clone()
        for part, name, value in own
        if isinstance(value, Tensor) and value.is_floating_point()
    }


def _contents(plain: PlainAttributes) -> dict[str, bytes]:
    """Return the attributes of a network that hold objects, as ``Class.name``, with their content."""
    contents = {}
    for part, own in zip(plain.parts, plain.now(), strict=True):
        for name, value in own.items():
            if not isinstance(value, (*_PLAIN, FunctionType, MethodType, BuiltinFunctionType)):
                with suppress(Exception):  # what cannot be pickled is not looked at
                    contents[f"{type(part).__name__}.{name}"] = pickle.dumps(value)
    return contents
