"""Several contents in one file, each of which is read by itself: a disk makes one file faster than many small ones.

The file begins with a line: the CRC-32 of its index, then the index in JSON. This has a row for each content: its key,
its length and its CRC-32. The contents follow in this order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from fedcore.base.files import parse_json, replacing, storing


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


def write_bundle(folder: Path, prefix: str, contents: Mapping[int, bytes]) -> Path:
    """Write contents atomically into a file of a folder, which is made. It is not synced.

    :returns: the file's path. Its name is the prefix and the index's checksum: other contents have another name.
    :raises StorageError: there is no room, or no permission.
    """
    index = json.dumps([(key, len(content), crc32(content)) for key, content in contents.items()]).encode()
    path = folder / f"{prefix}{crc32(index):08x}.bundle"
    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with replacing(path, sync=False) as temporary, temporary.open("wb") as file:
        file.writelines([b"%d " % crc32(index), index, b"\n", *contents.values()])
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
