"""Tensors and JSON as bytes or files, through safetensors: the only form in which state leaves a process.

Nothing is ever unpickled. A file's header holds a SHA-256 of its contents. Reading the file notices that it was cut
or altered.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from fedcore.base.files import parse_json, write_bytes
from fedcore.base.tensors import digest_of

_META = "fedcore"
_CHECKSUM = "sha256:"  # then 64 digits in front of the JSON value: with a second entry, headers have no fixed order


def dumps(tensors: Mapping[str, Tensor], meta: Any = None) -> bytes:
    """Encode named tensors and a JSON value."""
    return safetensors.torch.save(_plain(tensors), {_META: json.dumps(meta)})


def loads(blob: bytes) -> tuple[dict[str, Tensor], Any]:
    """Decode the bytes of :func:`dumps`. The tensors are copies.

    :raises ValueError: the bytes have another format.
    """
    try:
        tensors, header = _parse(blob)
        return tensors, parse_json(header[_META])
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"these bytes are not complete safetensors with a JSON value: {error!r}") from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor], meta: Any = None, *, sync: bool = True) -> None:
    """Write named tensors and a JSON value to ``path`` atomically.

    :param sync: wait until the disk has the file. Files that must survive a power failure need this.
    :raises StorageError: there is no room, or no permission.
    """
    plain, value = _plain(tensors), json.dumps(meta)
    header = {_META: f"{_CHECKSUM}{digest_of(plain, value)} {value}"}
    write_bytes(path, safetensors.torch.save(plain, header), sync=sync)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    """Read a file of :func:`write_tensors`. The tensors are private to this process.

    :raises ValueError: the file is damaged or of another kind.
    """
    try:
        tensors, header = _parse(path.read_bytes())
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that torch does not have
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error
    checksum, _, value = header.get(_META, "").partition(" ")
    if checksum != f"{_CHECKSUM}{digest_of(tensors, value)}":
        raise ValueError(f"{path} is damaged: its contents do not match its checksum")
    return tensors, parse_json(value)


def _parse(blob: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the texts of the header, in the header's order. safetensors has no fixed order."""
    tensors = safetensors.torch.load(blob)  # checks the header before the next lines read it
    header: dict[str, Any] = parse_json(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
    texts = header.pop("__metadata__", None) or {}
    return {name: tensors[name] for name in header}, texts


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous CPU tensors that share no memory with one another: safetensors requires this."""
    plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    users = Counter(tensor.untyped_storage().data_ptr() for tensor in plain.values())
    return {name: t.clone() if users[t.untyped_storage().data_ptr()] > 1 else t for name, t in plain.items()}
