"""Tensors and JSON as one array of bytes: what Ray's object store holds, read where it lies.

The bytes are those of ``fedcore.base.serial``. Ray stores an array of bytes as it is, so that no object of ours is
pickled, and maps it into every process of a node.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcore.engines import dumps
from fedcore.tools import files

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

    Those of a read-only array must not be written to: the memory is protected, and the process would end.

    :raises ValueError: the bytes are something else.
    """
    try:
        start = 8 + int.from_bytes(packed[:8].tobytes(), "little")
        header: dict[str, Any] = files.parse_json(packed[8:start].tobytes())
        texts = header.pop("__metadata__")
        tensors = {name: _tensor(packed[start:], **entry) for name, entry in header.items()}
        return tensors, files.parse_json(texts["fedcore"])
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"these bytes are no whole safetensors with a JSON value: {error!r}") from error


def _tensor(data: Bytes, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
    begin, end = data_offsets
    kind = DTYPES[dtype]
    if not 0 <= begin <= end <= len(data) or end - begin != math.prod(shape) * kind.itemsize:
        raise ValueError(f"bytes {begin} to {end} of {len(data)} are no {dtype} of shape {shape}")
    if begin == end:
        return torch.empty(shape, dtype=kind)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(data[begin:end], dtype=kind).reshape(shape)
