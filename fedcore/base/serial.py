"""Tensors and JSON as bytes or files, through safetensors: the only form in which state leaves a process.

Nothing is ever unpickled. A file's header holds a SHA-256 of its contents. Reading the file notices that it was cut
or altered.

A bundle has several of them in one file, each of which is read by itself: a disk makes one file faster than many small
ones. It begins with a line: the CRC-32 of its index, then the index in JSON. This has a row for each content: its key,
its length and its CRC-32. The contents follow in this order.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from fedcore.base.files import parse_json, replacing, storing, write_bytes
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


Buffer: TypeAlias = bytes | memoryview


class Extract(NamedTuple):
    """One content of a bundle."""

    path: Path
    begin: int
    size: int
    checksum: int

    def read(self) -> bytes:
        """Return the content.

        :raises ValueError: it is damaged.
        :raises OSError: the file cannot be read.
        """
        with self.path.open("rb") as file:
            file.seek(self.begin)
            content = file.read(self.size)
        if crc32(content) != self.checksum:
            raise ValueError(f"{self.path} is damaged: its contents do not match its checksums")
        return content


def write_bundle(folder: Path, prefix: str, contents: Mapping[int, tuple[bytes, Buffer]]) -> Path:
    """Write contents, in two pieces each, atomically into a file of a folder, which is made. It is not synced.

    :returns: the file's path. Its name is the prefix and the index's checksum: other contents have another name.
    :raises StorageError: there is no room, or no permission.
    """
    rows = [(key, len(head) + len(body), crc32(body, crc32(head))) for key, (head, body) in contents.items()]
    index = json.dumps(rows).encode()
    path = folder / f"{prefix}{crc32(index):08x}.bundle"
    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with replacing(path, sync=False) as temporary, temporary.open("wb") as file:
        file.writelines([b"%d " % crc32(index), index, b"\n", *chain(*contents.values())])
    return path


def read_index(path: Path) -> dict[int, Extract]:
    """Return the contents of a file by key, without reading them; empty if the index is damaged."""
    with suppress(OSError, ValueError, TypeError), path.open("rb") as file:
        line = file.readline()
        checksum, _, index = line[:-1].partition(b" ")
        if checksum == b"%d" % crc32(index):
            rows = parse_json(index)
            begins = accumulate((size for _, size, _ in rows), initial=len(line))
            return {key: Extract(path, begin, size, checksum) for (key, size, checksum), begin in zip(rows, begins)}
    return {}


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
