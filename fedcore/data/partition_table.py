"""Draw a partition as a table for the terminal: clients by classes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedcore.data.partition import Partition

if TYPE_CHECKING:
    from rich.table import Table

_MAX_COLUMNS = 26
_MAX_ROWS, _FIRST_ROWS, _LAST_ROWS = 40, 20, 5


def draw_table(partition: Partition, labels: Tensor, num_classes: int) -> Table:
    """Return the clients-by-classes table of training counts, its cells shaded by count.

    With more than 40 clients it shows the first 20 and the last 5; with more than 26 classes, adjacent classes share a
    column. The rows below the line summarise all clients.
    """
    from rich.table import Table
    from rich.text import Text

    counts = partition.class_counts(labels, num_classes)
    width = math.ceil(num_classes / _MAX_COLUMNS)
    groups = [range(first, min(first + width, num_classes)) for first in range(0, num_classes, width)]
    cells = torch.stack([counts[:, group.start : group.stop].sum(dim=1) for group in groups], dim=1)
    largest = max(1, int(cells.max()))
    sizes, held_out = counts.sum(dim=1), partition.test.sizes

    table = Table(
        # Text, not str: names from a file must not be parsed as rich's markup.
        title=Text(
            f"{partition.info.get('dataset', '')} by {partition.info.get('partitioner', '')}, "
            f"{partition.num_clients} clients: training samples per class"
        ),
        caption=f"sha256 {partition.sha256}",
    )
    table.add_column("client")
    for group in groups:
        name = f"{group.start}-{group.stop - 1}" if len(group) > 1 else str(group.start)
        table.add_column(name, justify="right")
    table.add_column("classes", justify="right")
    table.add_column("train", justify="right")
    table.add_column("held out", justify="right")

    def add(client: int) -> None:
        shaded = [Text(str(n) if n else "", style=_shade(n / largest)) for n in cells[client].tolist()]
        numbers = (int((counts[client] > 0).sum()), int(sizes[client]), int(held_out[client]))
        table.add_row(str(client), *shaded, *map(str, numbers))

    clients = range(partition.num_clients)
    if len(clients) <= _MAX_ROWS:
        shown, rest = clients, clients[:0]
    else:
        shown, rest = clients[:_FIRST_ROWS], clients[-_LAST_ROWS:]
    for client in shown:
        add(client)
    if rest:
        table.add_row(*["…"] * len(table.columns))
    for client in rest:
        add(client)
    table.add_section()
    everything = torch.cat([cells, torch.stack([(counts > 0).sum(dim=1), sizes, held_out], dim=1)], dim=1)
    for name, row in (
        ("smallest", everything.min(dim=0).values),
        ("median", everything.median(dim=0).values),
        ("largest", everything.max(dim=0).values),
    ):
        table.add_row(name, *map(str, row.tolist()))
    total = everything.sum(dim=0).tolist()
    total[len(groups)] = int((counts.sum(dim=0) > 0).sum())
    table.add_row("total", *map(str, total))
    return table


def _shade(share: float) -> str:
    """Return a rich style for a count of ``share`` (0..1) of the largest; square root lifts small counts."""
    if not share:
        return ""
    level = int(235 - 175 * math.sqrt(share))
    return f"{'black' if level > 140 else 'white'} on rgb({level // 2},{level},{min(255, level + 40)})"
