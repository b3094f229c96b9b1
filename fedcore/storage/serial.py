"""Tensors and JSON as bytes or files, through safetensors: the only form in which state leaves a process.

Nothing is ever unpickled. What is to last carries a checksum of its contents in its header.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedcore.base.process import cores
from fedcore.storage.files import read_bytes, replacing
from fedcore.storage.json_values import parse_json

_META = "fedcore"
_CHECKSUM = "sha256:"  # then 64 digits in front of the JSON value: with a second entry, headers have no fixed order
HEAD = 256
"""Bytes at the start of a file within which its checksum stands."""

_MAPPED = 4 << 20  # larger files are mapped. Smaller ones are read: safetensors 0.8 loses 56 bytes per tensor it maps
_BLOCK = 4 << 20  # bytes hashed as one piece, side by side with others


def dumps(tensors: Mapping[str, Tensor], meta: Any = None) -> bytes:
    """Encode named tensors and a JSON value."""
    return safetensors.torch.save(_plain(tensors), {_META: json.dumps(meta)})


def loads(blob: bytes) -> tuple[dict[str, Tensor], Any]:
    """Decode what :func:`dumps` wrote; the tensors are copies.

    :raises ValueError: the bytes are something else.
    """
    try:
        tensors, header = _parse(blob)
        return tensors, parse_json(header[_META])
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"these bytes are no whole safetensors with a JSON value: {error!r}") from error


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    meta: Any = None,
    *,
    sync: bool = True,
    inside: Path | None = None,
) -> None:
    """Write named tensors and a JSON value to ``path`` atomically.

    :param sync: wait until the disk has it, for what must survive a power failure.
    :param inside: see :func:`fedcore.storage.files.replacing`.
    :raises StorageError: there is no room, or no permission.
    """
    plain, value = _plain(tensors), json.dumps(meta)
    value = f"{_CHECKSUM}{content_hash(plain, value)} {value}"
    with replacing(path, sync=sync, inside=inside) as temporary:
        temporary.touch()
        mode = stat.S_IMODE(temporary.stat().st_mode)
        try:
            safetensors.torch.save_file(plain, temporary, {_META: value})
            temporary.chmod(mode)  # that of any new file: safetensors writes for the owner alone
        except SafetensorError as error:  # it names the system's error in its message only
            number = re.search(r"os error (\d+)", str(error))
            raise OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error)) from error


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    """Read what :func:`write_tensors` wrote; the tensors are private to this process, memory-mapped if they are large.

    :raises ValueError: the file is damaged or of another kind.
    """
    try:
        tensors, header = _load(path)
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that torch does not have
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
    found, _, value = header.get(_META, "").partition(" ")
    if found != f"{_CHECKSUM}{content_hash(tensors, value)}":
        raise ValueError(f"{path} is damaged: its contents do not match its checksum")
    try:
        return tensors, parse_json(value)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: the JSON value in its header is none ({error})") from error


def checksum_in(head: bytes) -> int:
    """Return the first 63 bits of the checksum in a file's first ``HEAD`` bytes; 0 where it has none."""
    _, found, rest = head.partition(_CHECKSUM.encode())
    digits = rest[:16]
    return int(digits, 16) >> 1 if found and re.fullmatch(rb"[0-9a-f]{16}", digits) else 0


def _load(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a file's tensors and the texts in its header."""
    if path.stat().st_size > _MAPPED:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
        return safetensors.torch.load_file(path), header
    return _parse(read_bytes(path))


def _parse(blob: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return what :func:`_load` does, in the same order: ``safetensors.torch.load`` has another one each time."""
    tensors = safetensors.torch.load(blob)  # checks the header before the next lines read it
    header: dict[str, Any] = parse_json(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
    texts = header.pop("__metadata__", None) or {}
    return {name: tensors[name] for name in header}, texts


def content_hash(tensors: Mapping[str, Tensor], meta: str) -> str:
    """Return the SHA-256, in hex, of a file's contents: every tensor's name, dtype, shape and bytes, and its JSON part.

    Large tensors are hashed in blocks, side by side where there are processors for it, and the blocks' hashes hashed.

    :param tensors: contiguous, on the CPU.
    """
    blocks: list[memoryview] = []
    described = []
    for name in sorted(tensors):
        tensor = tensors[name]
        described.append([name, str(tensor.dtype), list(tensor.shape)])
        if tensor.numel():
            content = memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            blocks += [content[start : start + _BLOCK] for start in range(0, len(content), _BLOCK)]
    whole = hashlib.sha256(json.dumps([described, meta]).encode())
    threads = cores()
    if threads > 1 and sum(map(len, blocks)) > 2 * _BLOCK:
        with ThreadPoolExecutor(threads) as pool:
            digests = list(pool.map(_digest, blocks))
    else:
        digests = [_digest(block) for block in blocks]
    whole.update(b"".join(digests))
    return whole.hexdigest()


def _digest(block: memoryview) -> bytes:
    return hashlib.sha256(block).digest()


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
