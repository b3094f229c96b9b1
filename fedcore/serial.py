"""Tensors and JSON as bytes or files, through safetensors: the only form in which state leaves a process.

Nothing is ever unpickled. Files are written beside their target and renamed, so that a reader sees the old
file or the new one, never a part of one.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_META = "fedcore"


def dumps(tensors: Mapping[str, Tensor], meta: Any = None) -> bytes:
    """Encode named tensors and a JSON value."""
    return safetensors.torch.save(_plain(tensors), {_META: json.dumps(meta)})


def loads(blob: bytes) -> tuple[dict[str, Tensor], Any]:
    """Decode what :func:`dumps` wrote; the tensors are copies."""
    size = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + size])
    return safetensors.torch.load(blob), json.loads(header["__metadata__"][_META])


def write_tensors(path: Path, tensors: Mapping[str, Tensor], meta: Any = None, *, sync: bool = True) -> None:
    """Write named tensors and a JSON value to ``path`` atomically; ``sync`` also survives a power failure."""
    with _replacing(path) as temporary:
        safetensors.torch.save_file(_plain(tensors), temporary, {_META: json.dumps(meta)})
        if sync:
            sync_file(temporary)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    """Read what :func:`write_tensors` wrote; the tensors are memory-mapped, private to this process.

    :raises ValueError: the file is damaged or of another kind.
    """
    try:
        with safe_open(path, framework="pt") as file:
            meta = (file.metadata() or {}).get(_META)
        return safetensors.torch.load_file(path), None if meta is None else json.loads(meta)
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with _replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
        sync_file(temporary)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(value, indent=2, sort_keys=False) + "\n")


def sync_file(path: Path) -> None:
    """Wait until a file's content is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def _replacing(path: Path) -> Any:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous CPU tensors that share no memory with one another, as safetensors wants them."""
    plain: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        value = tensor.detach().to("cpu").contiguous()
        if value.numel() and value.untyped_storage().data_ptr() in seen:
            value = value.clone()
        seen.add(value.untyped_storage().data_ptr())
        plain[name] = value
    return plain
