"""Draw a partition in the terminal: as a table of counts, or as a picture of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from fedcore.data.partition import Partition

MAX_COLUMNS = 26
MAX_CLIENTS, FIRST_CLIENTS, LAST_CLIENTS = 40, 20, 5

MAX_ROWS = 40
MAX_BANDS = 4
BLOCKS = "▁▂▃▄▅▆▇█"
NONE = "·"
NAME_WIDTH = 12


def draw_table(partition: Partition, labels: Tensor, num_classes: int) -> Table:
    """Return the clients-by-classes table of training counts, its cells shaded by count.

    With more than 40 clients it shows the first 20 and the last 5; with more than 26 classes, adjacent classes share a
    column. The rows below the line summarise all clients.
    """
    counts = partition.class_counts(labels, num_classes)
    groups, cells = _grouped(counts, MAX_COLUMNS)
    largest = max(1, int(cells.max()))
    held = torch.stack([(counts > 0).sum(dim=1), counts.sum(dim=1), partition.test.sizes], dim=1)

    table = Table(
        # Text, not str: names from a file must not be parsed as rich's markup.
        title=Text(
            f"{partition.info.get('dataset', '')} by {partition.info.get('partitioner', '')}, "
            f"{partition.num_clients} clients: training samples per class"
        ),
        caption=f"sha256 {partition.sha256}",
    )
    table.add_column("client")
    for name in (*map(_span, groups), "classes", "train", "held out"):
        table.add_column(name, justify="right")

    few = partition.num_clients <= MAX_CLIENTS
    for client in range(partition.num_clients):
        if few or client < FIRST_CLIENTS or client >= partition.num_clients - LAST_CLIENTS:
            shaded = [Text(str(n) if n else "", style=_shade(n / largest)) for n in cells[client].tolist()]
            table.add_row(str(client), *shaded, *map(str, held[client].tolist()))
        elif client == FIRST_CLIENTS:
            table.add_row(*["…"] * len(table.columns))
    table.add_section()
    everything = torch.cat([cells, held], dim=1)
    total = everything.sum(dim=0)
    total[len(groups)] = (counts.sum(dim=0) > 0).sum()
    for name, row in (
        ("smallest", everything.min(dim=0).values),
        ("median", everything.median(dim=0).values),
        ("largest", everything.max(dim=0).values),
        ("total", total),
    ):
        table.add_row(name, *map(str, row.tolist()))
    return table


def draw_picture(partition: Partition, labels: Tensor, class_names: Sequence[str], width: int) -> list[Text]:
    """Return the lines of a picture, at most ``width`` columns wide: a column per client, a row per class.

    Clients that do not fit into the width continue in further bands. If four bands do not suffice, an evenly spaced
    selection of clients is drawn. With more than 40 classes, adjacent classes share a row. A block's height is
    proportional to the square root of the count, so that single samples are visible.
    """
    counts = partition.class_counts(labels, len(class_names))  # (K, C)
    groups, cells = _grouped(counts, MAX_ROWS)
    names = [class_names[group.start] if len(group) == 1 else _span(group) for group in groups]
    names = [name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 1] + "…" for name in names]
    margin = max(len("client"), *map(len, names)) + 1

    room = max(8, width - margin)
    cell = max(1, min(4, room // max(1, len(counts))))
    per_band = room // cell
    clients = _spaced(len(counts), per_band * MAX_BANDS)
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
    lines += [Text(), Text(f"{BLOCKS[0]} 1 to {BLOCKS[-1]} {largest} training samples, {NONE} empty", style="dim")]
    if len(clients) < len(counts):
        lines.append(Text(f"{len(clients)} of {len(counts)} clients are shown, evenly spaced", style="dim"))
    return lines


def _grouped(counts: Tensor, most: int) -> tuple[list[range], Tensor]:
    """Join adjacent classes until at most ``most`` groups are left; return them and their counts (K, groups)."""
    classes = counts.shape[1]
    width = math.ceil(classes / most)
    groups = [range(first, min(first + width, classes)) for first in range(0, classes, width)]
    return groups, torch.stack([counts[:, group.start : group.stop].sum(dim=1) for group in groups], dim=1)


def _span(group: range) -> str:
    return f"{group.start}-{group.stop - 1}" if len(group) > 1 else str(group.start)


def _shade(share: float) -> str:
    """Return a rich style for a count of ``share`` (0..1) of the largest; the square root lifts small counts."""
    if not share:
        return ""
    level = int(235 - 175 * math.sqrt(share))
    return f"{'black' if level > 140 else 'white'} on rgb({level // 2},{level},{min(255, level + 40)})"


def _block(count: int, largest: int) -> str:
    return BLOCKS[math.ceil(math.sqrt(count / largest) * len(BLOCKS)) - 1] if count else NONE


def _numbers(clients: Sequence[int], margin: int, cell: int) -> Text:
    """Return the line of client numbers, without those that would overlap."""
    line = "client".rjust(margin - 1) + " "
    for place, client in enumerate(clients):
        start = margin + place * cell
        fits = place * cell + len(str(client)) <= cell * len(clients)
        if fits and len(line) <= start and (len(line) < start or line.endswith(" ")):
            line = line.ljust(start) + str(client) + ("" if cell > len(str(client)) else " ")
    return Text(line.rstrip(), style="dim")


def _spaced(count: int, most: int) -> list[int]:
    """Return all of ``count`` positions, or ``most`` (at least 2) evenly spaced ones including both ends."""
    return list(range(count)) if count <= most else [round(i * (count - 1) / (most - 1)) for i in range(most)]
