"""Draw a partition in the terminal: a column per client, a row per class, block height by count."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from rich.text import Text
from torch import Tensor

from fedcore.data.partition import Partition

BLOCKS = "▁▂▃▄▅▆▇█"
MAX_BANDS = 4
MAX_ROWS = 40
_LABEL = 12
_NONE = "·"


def draw_picture(partition: Partition, labels: Tensor, class_names: Sequence[str], width: int) -> list[Text]:
    """Return the lines of a picture that is at most ``width`` columns wide.

    Clients that do not fit into the width continue in further bands. If four bands do not suffice, an evenly spaced
    selection of clients is drawn. With more than 40 classes, adjacent classes share a row. A block's height is
    proportional to the square root of the count, so that single samples are visible.
    """
    counts = partition.class_counts(labels, len(class_names))  # (K, C)
    joined = math.ceil(len(class_names) / MAX_ROWS)
    groups = [range(first, min(first + joined, len(class_names))) for first in range(0, len(class_names), joined)]
    cells = torch.stack([counts[:, group.start : group.stop].sum(dim=1) for group in groups], dim=1)
    names = [_name(class_names, group) for group in groups]
    margin = max(len("client"), *(len(name) for name in names)) + 1

    room = max(8, width - margin)
    cell = max(1, min(4, room // max(1, len(counts))))
    per_band = room // cell
    clients = spaced(len(counts), per_band * MAX_BANDS)
    largest = max(1, int(cells.max()))

    lines = []
    for first in range(0, len(clients), per_band):
        shown = clients[first : first + per_band]
        lines += [Text(), _numbers(shown, margin, cell)]
        for row, name in enumerate(names):
            line = Text(name.rjust(margin - 1) + " ")
            for count in cells[shown, row].tolist():
                line.append(_block(count, largest).ljust(cell), style="cyan" if count else "dim")
            lines.append(line)
    lines += [Text(), Text(f"{BLOCKS[0]} 1 to {BLOCKS[-1]} {largest} training samples, {_NONE} none", style="dim")]
    if len(clients) < len(counts):
        lines.append(Text(f"{len(clients)} of {len(counts)} clients are shown, evenly spaced", style="dim"))
    return lines


def _block(count: int, largest: int) -> str:
    return BLOCKS[math.ceil(math.sqrt(count / largest) * len(BLOCKS)) - 1] if count else _NONE


def _numbers(clients: Sequence[int], margin: int, cell: int) -> Text:
    """Return the line of client numbers, without those that would overlap."""
    line = "client".rjust(margin - 1) + " "
    for place, client in enumerate(clients):
        start = margin + place * cell
        fits = place * cell + len(str(client)) <= cell * len(clients)
        if fits and len(line) <= start and (len(line) < start or line.endswith(" ")):
            line = line.ljust(start) + str(client) + ("" if cell > len(str(client)) else " ")
    return Text(line.rstrip(), style="dim")


def _name(names: Sequence[str], group: range) -> str:
    text = names[group.start] if len(group) == 1 else f"{group.start}-{group.stop - 1}"
    text = "".join(c if c.isprintable() else "�" for c in text)
    return text if len(text) <= _LABEL else text[: _LABEL - 1] + "…"


def spaced(count: int, most: int) -> list[int]:
    """Return all of ``count`` positions, or ``most`` (at least 2) evenly spaced ones including both ends."""
    return list(range(count)) if count <= most else [round(i * (count - 1) / (most - 1)) for i in range(most)]
