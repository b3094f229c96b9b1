"""A caution about what a network keeps in objects, whose content no client starts anew with."""

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
    """Return the caution about an object of the network that a training step of one client changes for the next."""
    if not _contents(PlainAttributes(setup.model)):
        return []  # most networks: they need not be copied
    trial = training_copy(setup.model)
    plain, sample = PlainAttributes(trial), setup.sample
    before = _contents(plain)
    with torch.no_grad(), random_stream(0), suppress(Exception):  # the first round tells what it raises
        trial(torch.cat([sample, sample]) if isinstance(sample, Tensor) else sample)
    plain.restore()
    after = _contents(plain)
    if changed := next((name for name in before if before[name] != after.get(name)), None):
        return [
            f"training changes {changed} of the model, an object with which clients do not start anew: if the model's "
            "outputs depend on it, results depend on the number of workers. Keep values in buffers (register_buffer) "
            "or in attributes of the module itself, and draw from torch's global generator"
        ]
    return []


def _contents(plain: PlainAttributes) -> dict[str, bytes]:
    """Return the attributes of a network that hold objects, as ``Class.name``, with their content."""
    contents = {}
    for part, own in zip(plain.parts, plain.now(), strict=True):
        for name, value in own.items():
            if not isinstance(value, (*_PLAIN, FunctionType, MethodType, BuiltinFunctionType)):
                with suppress(Exception):  # what cannot be pickled is not looked at
                    contents[f"{type(part).__name__}.{name}"] = pickle.dumps(value)
    return contents
