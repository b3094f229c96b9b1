"""Weights to start from, in a safetensors file: their names, their fit, and what of them a run does not take."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedcore import ConfigError, SplitModel
from fedcore.client import Setup
from fedcore.models import copied
from fedcore.tools import registry

_DIGEST = re.compile(r"#([0-9a-f]{16})$")
_BASE, _HEAD = "encoder.base.", "classifier."


def with_digest(weights: str) -> str:
    """Return the name of a file of weights with the start of its SHA-256: ``FILE#0123456789abcdef``.

    A configuration holds this name, so that a run resumes with the weights that it started with, or not at all. If the
    name holds a digest already, the file is checked against it.

    :raises ConfigError: the file cannot be read, or its content has changed.
    """
    match = _DIGEST.search(weights)
    path = weights[: match.start()] if match else weights
    path = str(Path(path).expanduser().absolute())
    try:
        with Path(path).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise ConfigError(f"--weights {path}: cannot be read: {error}") from error
    if match and match[1] != digest:
        raise ConfigError(f"--weights {path}: the file is not the one that the run was begun with; put that one back")
    return f"{path}#{digest}"


def load_weights(model: SplitModel, weights: str) -> None:
    """Copy the tensors of a file into a model, in place: pretrained elsewhere, or exported from a run.

    The file holds the names of the network itself (``conv1.weight``), as torchvision and timm write them, or the names
    of a fedcore model (``encoder.base.conv1.weight``). The whole base of the encoder has to be in it. A projection head
    or classifier that is not in the file, or has another shape there, keeps its fresh weights.

    :param weights: as :func:`with_digest` returns it.
    :raises ConfigError: the file is not in the safetensors format, lacks a tensor of the base, or has a tensor of
        another kind of numbers: whole or complex ones for floating point, or floating point for whole ones.
    """
    path, named, state = _DIGEST.sub("", weights), named_weights(model, weights), model.state_dict()
    for name in state:
        # Files of early versions of PyTorch lack BatchNorm's number of batches.
        optional = name.endswith("num_batches_tracked")
        if name.startswith(_BASE) and not optional and not _fits(name, state, named):
            problem = f"is {tuple(named[name].shape)} there" if name in named else "is not in it"
            raise ConfigError(
                f"--weights {path}: {name.removeprefix(_BASE)!r}, of shape {tuple(state[name].shape)} in the model, "
                f"{problem}. Weights and --model have to be of the same network"
            )
    with torch.no_grad():
        for name, tensor in state.items():
            if not _fits(name, state, named):
                continue
            stored = named[name]
            if _kind(stored) != _kind(tensor):  # copy_ would cut fractions or imaginary parts off
                raise ConfigError(
                    f"--weights {path}: {name.removeprefix(_BASE)!r} is {_kind(stored)} there ({stored.dtype}), "
                    f"but {_kind(tensor)} in the model ({tensor.dtype})"
                )
            tensor.copy_(stored)


def named_weights(model: SplitModel, weights: str) -> dict[str, Tensor]:
    """Return the tensors of a file of weights by their names in a model; see :func:`load_weights`.

    :raises ConfigError: the file is not in the safetensors format.
    """
    path = _DIGEST.sub("", weights)
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"--weights {path}: is not a whole safetensors file ({error}); pickled files are not read"
        ) from error
    own = {name: of_model for of_model, name in model.file_names().items()}
    state = model.state_dict()
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        of_base = _BASE + name in state or not name.startswith(("encoder.", _HEAD))
        named[own.get(name, _BASE + name if of_base else name)] = tensor
    return named


def _kind(tensor: Tensor) -> str:
    """Return the kind of numbers that a tensor holds."""
    if tensor.is_complex():
        return "complex"
    if tensor.is_floating_point():
        return "floating point"
    return "boolean" if tensor.dtype == torch.bool else "integer"


def _fits(name: str, state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> bool:
    return name in tensors and tensors[name].shape == state[name].shape


def weights_cautions(setup: Setup, weights: str) -> list[str]:
    """Return the cautions about tensors of the file of `--weights` without a place, and about heads not from it."""
    model, file = setup.model.state_dict(), named_weights(setup.model, weights)
    return [*_without_place(file, model), *_fresh_heads(setup, file, model)]


def unused_head(setup: Setup) -> list[str]:
    """Return the caution about a program's network with weights whose last layer a projection head replaces."""
    factory = registry.resolve("model", setup.config.model)
    has_weights = isinstance(factory, functools.partial) and factory.func is copied  # an object, not a class
    if not has_weights or setup.model.projection_width is None:
        return []
    return [
        "the network's last layer is not used: the classifier behind the projection head (of --projection or of a "
        "plugin) starts with fresh weights"
    ]


def _without_place(file: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> list[str]:
    """Return the caution about tensors of the network's base, such as BatchNorm's statistics, that the model lacks."""
    renamed = {name: tensor for name, tensor in model.items() if name not in file}
    names = [
        name.removeprefix(_BASE)
        for name, tensor in file.items()
        if name.startswith(_BASE) and name not in model and not _is_among(tensor, renamed)
    ]
    if not names:
        return []
    others = f" and {len(names) - 3} more" if len(names) > 3 else ""
    listed = ", ".join(map(repr, names[:3]))
    return [f"--weights: the model has no place for {len(names)} of the file's tensors, {listed}{others}"]


def _fresh_heads(setup: Setup, file: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> list[str]:
    """Return the caution about a projection head and a classifier that are not the ones in the file."""
    left_out, fresh = _heads_apart(file, model), _heads_apart(model, file)
    changes = [f"leaves out the file's {' and '.join(left_out)}"] if left_out else []
    changes += [f"starts with a fresh {' and '.join(fresh)}"] if fresh else []
    if not changes:
        return []
    takes = "projection head" in left_out and not setup.config.projection
    return [f"--weights: the run {' and '.join(changes)}" + "; --projection takes the file's projection head" * takes]


def _heads_apart(weights: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> list[str]:
    """Return the heads among some weights of which the others hold no matrix.

    Biases do not count: they can fit where the matrix does not.
    """
    names = []
    for start, head in (("encoder.projection.", "projection head"), ("classifier.", "classifier")):
        own = [tensor for name, tensor in weights.items() if name.startswith(start) and tensor.ndim > 1]
        if own and not any(_is_among(tensor, others) for tensor in own):
            names.append(head)
    return names


def _is_among(tensor: Tensor, others: Mapping[str, Tensor]) -> bool:
    """Whether a model holds a tensor, under any name: a plugin may have put a loaded layer into one of its own."""
    return any(tensor.shape == other.shape and torch.equal(tensor.to(other), other) for other in others.values())
