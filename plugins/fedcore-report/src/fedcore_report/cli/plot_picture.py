"""A partition as a picture of blocks in the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.text import Text
from torch import Tensor

from fedcore.data import Partition
from fedcore_console import grouped, span
from fedcore_report.charts import spaced

MAX_ROWS = 40
MAX_BANDS = 4
BLOCKS = "▁▂▃▄▅▆▇█"
NONE = "·"
NAME_WIDTH = 12


def draw_picture(partition: Partition, labels: Tensor, class_names: Sequence[str], width: int) -> list[Text]:
    """Return the lines of a picture, at most ``width`` columns wide: a column per client, a row per class.

    Clients that do not fit into the width continue in further bands. If four bands do not suffice, an evenly spaced
    selection of clients is drawn. With more than 40 classes, adjacent classes share a row. A block's height is
    proportional to the square root of the count, so that single samples are visible.
    """
    counts = partition.class_counts(labels, len(class_names))  # (K, C)
    groups, cells = grouped(counts, MAX_ROWS)
    names = [class_names[group.start] if len(group) == 1 else span(group) for group in groups]
    names = [name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 1] + "…" for name in names]
    margin = max(len("client"), *map(len, names)) + 1

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
    legend = f"{_block(1, largest)} 1 to {BLOCKS[-1]} {largest} training samples, {NONE} empty"
    lines += [Text(), Text(legend, style="dim")]
    if len(clients) < len(counts):
        lines.append(Text(f"{len(clients)} of {len(counts)} clients are shown, evenly spaced", style="dim"))
    return lines


def _block(count: int, largest: int) -> str:
    return BLOCKS[math.ceil(math.sqrt(count / largest) * len(BLOCKS)) - 1] if count else NONE


def _numbers(clients: Sequence[int], margin: int, cell: int) -> Text:
    """Return the line of client numbers, without numbers that would overlap."""
    line = "client".rjust(margin - 1) + " "
    for place, client in enumerate(clients):
        start = margin + place * cell
        fits = place * cell + len(str(client)) <= cell * len(clients)
        if fits and len(line) <= start and (len(line) < start or line.endswith(" ")):
            line = line.ljust(start) + str(client) + ("" if cell > len(str(client)) else " ")
    return Text(line.rstrip(), style="dim")
