"""Tensors and JSON as one array of bytes, which Ray's object store holds. Tensors are read in place, not copied.

The format is that of ``fedcore.base.serial``. Ray does not pickle an array of bytes: it stores the bytes and maps them
into every process of a node.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcore.base.files import parse_json
from fedcore.engines import dumps

Bytes: TypeAlias = npt.NDArray[np.uint8]

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors' names."""


def pack(tensors: Mapping[str, Tensor], meta: Any) -> Bytes:
    """Return named tensors and a JSON value as bytes, (n,)."""
    return np.frombuffer(dumps(tensors, meta), dtype=np.uint8)


def view(packed: Bytes) -> tuple[dict[str, Tensor], Any]:
    """Return what :func:`pack` was given; the tensors lie in ``packed``.

    If the array is read-only, they must not be written to: the memory is protected, and the process would end.
    """
    start = 8 + int.from_bytes(packed[:8].tobytes(), "little")
    header: dict[str, Any] = parse_json(packed[8:start].tobytes())
    meta = parse_json(header.pop("__metadata__")["fedcore"])
    return {name: _tensor(packed[start:], **entry) for name, entry in header.items()}, meta


def _tensor(data: Bytes, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
    begin, end = data_offsets
    if begin == end:
        return torch.empty(shape, dtype=DTYPES[dtype])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(data[begin:end], dtype=DTYPES[dtype]).reshape(shape)
