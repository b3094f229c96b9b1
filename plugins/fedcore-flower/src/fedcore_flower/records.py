"""Blobs as Flower carries them: small ones in one object, large ones cut into pieces that are sent once each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

SMALL, LARGE = "fedcore", "fedcore-large"
INLINE = 1 << 18
"""Bytes up to which a blob goes in one object with others: each object costs a request in each of four hops."""


def as_array(blob: bytes) -> Array:
    """Return a large blob."""
    return Array(dtype="uint8", shape=(len(blob),), stype=SMALL, data=blob)


def to_content(blobs: Mapping[str, bytes], arrays: Mapping[str, Array] | None = None) -> RecordDict:
    """Return blobs as a message's content.

    :param arrays: those that were made before, to be sent to several.
    """
    large = {name: as_array(blob) for name, blob in blobs.items() if len(blob) > INLINE}
    large.update(arrays or {})
    content = RecordDict({SMALL: ConfigRecord({name: blob for name, blob in blobs.items() if name not in large})})
    if large:
        content[LARGE] = ArrayRecord(large)
    return content


def from_content(content: Any) -> dict[str, bytes]:
    """Return what :func:`to_content` was given; empty where the content is another's."""
    if SMALL not in content:
        return {}
    blobs: dict[str, bytes] = {}
    small, large = content[SMALL], content.get(LARGE, {})
    if isinstance(small, ConfigRecord):
        blobs.update({name: blob for name, blob in small.items() if isinstance(blob, bytes)})
    if isinstance(large, ArrayRecord):
        blobs.update({name: array.data for name, array in large.items() if isinstance(array.data, bytes)})
    return blobs
