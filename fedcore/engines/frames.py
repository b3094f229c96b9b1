"""Frames between the processes of the local engine: named tensors and a JSON value as bytes.

A frame is its lengths, a JSON text and the tensors' bytes, each from a multiple of 64 on, as torch aligns tensors.
Both ends run the same version on the same machine and a frame outlives neither, so it needs no checksum and no common
format: a small one takes tenths of a millisecond less than safetensors.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedcore.base.files import parse_json

ALIGNMENT = 64
LENGTHS = struct.Struct("<QQ")
"""Bytes of the JSON text with the zeros behind it, and of the tensors."""

Parts = list[bytes | memoryview]


def pack_frame(tensors: Mapping[str, Tensor], value: Any) -> Parts:
    """Return a frame's bytes in parts, without copies of contiguous tensors; :func:`size_of` says how many."""
    described, data, position = [], Parts(), 0
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        described.append((name, str(plain.dtype).removeprefix("torch."), plain.shape, position))
        if plain.numel():
            content = memoryview(plain.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            data += (content, _padding(len(content)))
            position += len(content) + len(data[-1])
    text = json.dumps([value, described]).encode()
    text += _padding(LENGTHS.size + len(text))
    return [LENGTHS.pack(len(text), position) + text, *data]


def unpack_frame(text: bytes, data: Tensor) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors and the value of a frame.

    :param data: the tensors' bytes, uint8; the returned tensors lie in them.
    """
    value, described = parse_json(text.rstrip(b"\0"))
    tensors = {}
    as_dtype: dict[torch.dtype, Tensor] = {}
    for name, dtype_name, shape, position in described:
        dtype = getattr(torch, dtype_name)
        if dtype not in as_dtype:
            as_dtype[dtype] = data.view(dtype)
        tensors[name] = as_dtype[dtype].narrow(0, position // dtype.itemsize, math.prod(shape)).view(shape)
    return tensors, value


def unpack_whole(frame: memoryview) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors and the value of a frame in memory, which lives as long as the tensors."""
    text_length, data_length = LENGTHS.unpack_from(frame)
    begin = LENGTHS.size + text_length
    data = (
        torch.frombuffer(frame, dtype=torch.uint8, offset=begin) if data_length else torch.empty(0, dtype=torch.uint8)
    )
    return unpack_frame(bytes(frame[LENGTHS.size : begin]), data)


def size_of(parts: Parts) -> int:
    """Return the number of bytes of a frame."""
    return sum(map(len, parts))


def _padding(length: int) -> bytes:
    return bytes(-length % ALIGNMENT)
