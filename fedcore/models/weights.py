"""Start from the weights in a safetensors file: pretrained elsewhere, or exported from a run.

A configuration names such a file with the start of its SHA-256, ``FILE#0123456789abcdef``, so that a run goes on with
the weights that it was begun with, or not at all.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedcore.base.errors import ConfigError
from fedcore.models.split import SplitModel

_DIGEST = re.compile(r"#([0-9a-f]{16})$")
_BASE = "encoder.base."


def with_digest(weights: str) -> str:
    """Return a file's name with the start of its content's SHA-256, checked if it is there already.

    :raises ConfigError: the file cannot be read, or is another one than it was.
    """
    found = _DIGEST.search(weights)
    path = weights[: found.start()] if found else weights
    try:
        path = str(Path(path).expanduser().absolute())
        with Path(path).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"--weights {path}: cannot be read: {error}") from error
    if found and found[1] != digest:
        raise ConfigError(f"--weights {path}: the file is not the one that the run was begun with; put that one back")
    return f"{path}#{digest}"


def load_weights(model: SplitModel, weights: str) -> None:
    """Copy a file's tensors into a model, in place: the whole base of the encoder, and of the rest what fits.

    Names are those of the network itself (``conv1.weight``), as torchvision and timm write them, or those of a fedcore
    model (``encoder.base.conv1.weight``). A projection head or classifier that is not in the file, or of another shape
    there, keeps its fresh weights.

    :param weights: as :func:`with_digest` returns it.
    :raises ConfigError: the file is no safetensors, or lacks a tensor of the base.
    """
    path = _DIGEST.sub("", weights)
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"--weights {path}: is no whole safetensors file ({error}); pickled files are not read"
        ) from error
    named = {name if name.startswith(("encoder.", "classifier.")) else _BASE + name: t for name, t in found.items()}
    state = model.state_dict()
    for name in state:
        if name.startswith(_BASE) and not _optional(name) and not _fits(name, state, named):
            given = f"is {tuple(named[name].shape)} there" if name in named else "is not in it"
            raise ConfigError(
                f"--weights {path}: {name.removeprefix(_BASE)!r}, of shape {tuple(state[name].shape)} in the model, "
                f"{given}. Weights and --model have to be those of the same network"
            )
    with torch.no_grad():
        for name, tensor in state.items():
            if _fits(name, state, named):
                tensor.copy_(named[name])


def _fits(name: str, state: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> bool:
    return name in found and found[name].shape == state[name].shape


def _optional(name: str) -> bool:
    """Whether files of earlier versions of PyTorch lack a tensor: BatchNorm's number of batches."""
    return name.endswith("num_batches_tracked")
