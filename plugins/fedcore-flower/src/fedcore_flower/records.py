"""Blobs in the messages of Flower. The server and the client's process at the SuperNode use this without torch.

Small blobs go together in one object. Each large blob is an array of its own, which Flower cuts into pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

SMALL, LARGE = "fedcore", "fedcore-large"
INLINE = 1 << 18
"""The most bytes of a small blob. Each further object of a message costs a request in each of four hops."""


def to_content(blobs: Mapping[str, bytes]) -> RecordDict:
    """Return blobs as the content of a message."""
    large = {
        name: Array(dtype="uint8", shape=(len(blob),), stype=SMALL, data=blob)
        for name, blob in blobs.items()
        if len(blob) > INLINE
    }
    content = RecordDict({SMALL: ConfigRecord({name: blob for name, blob in blobs.items() if name not in large})})
    if large:
        content[LARGE] = ArrayRecord(large)
    return content


def from_content(content: Any) -> dict[str, bytes]:
    """Return the blobs in the content of a message. Empty if it was not made by :func:`to_content`."""
    if SMALL not in content:
        return {}
    blobs: dict[str, bytes] = {}
    small, large = content[SMALL], content.get(LARGE, {})
    if isinstance(small, ConfigRecord):
        blobs.update({name: blob for name, blob in small.items() if isinstance(blob, bytes)})
    if isinstance(large, ArrayRecord):
        blobs.update({name: array.data for name, array in large.items() if isinstance(array.data, bytes)})
    return blobs
