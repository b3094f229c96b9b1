"""A partition as a table of counts in the terminal."""

from __future__ import annotations

import math

import numpy as np
import torch
from rich import box
from rich.table import Table
from rich.text import Text
from torch import Tensor

from fedcore.data import Partition

MAX_COLUMNS = 26
HELD = ("classes", "train", "held out")
MAX_CLIENTS, FIRST_CLIENTS, LAST_CLIENTS = 40, 20, 5


def draw_table(partition: Partition, labels: Tensor, num_classes: int, width: int) -> Table:
    """Return the clients-by-classes table of training counts, its cells shaded by count.

    With more than 40 clients it shows the first 20 and the last 5. Adjacent classes share a column if there are more
    than 26 classes, or more than fit into ``width`` characters. The last rows summarise all clients.
    """
    counts = partition.class_counts(labels, num_classes)
    held = torch.stack([(counts > 0).sum(dim=1), counts.sum(dim=1), partition.test.sizes], dim=1)
    samples = counts.sum(dim=0, keepdim=True)
    room = (
        width
        - len(" ".join((max(("smallest", *map(legible, partition.names)), key=len), *HELD)))
        - max(0, len(str(int(samples.sum()))) - len("train"))
    )
    most = next((most for most in range(MAX_COLUMNS, 1, -1) if _width(samples, most) <= room), 1)
    groups, cells = grouped(counts, most)
    largest = max(1, int(cells.max()))

    table = Table(
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
        # Text, not str: names from a file must not be parsed as rich's markup.
        title=Text(
            f"{partition.info.get('dataset', '')} by {partition.info.get('partitioner', '')}, "
            f"{partition.num_clients} clients: training samples per class"
        ),
    )
    table.add_column("client")
    for name in (*map(span, groups), *HELD):
        table.add_column(name, justify="right")

    few, names = partition.num_clients <= MAX_CLIENTS, [legible(name) for name in partition.names]
    for client in range(partition.num_clients):
        if few or client < FIRST_CLIENTS or client >= partition.num_clients - LAST_CLIENTS:
            shaded = [Text(str(n) if n else "", style=_shade(n / largest)) for n in cells[client].tolist()]
            table.add_row(Text(names[client]), *shaded, *map(str, held[client].tolist()))
        elif client == FIRST_CLIENTS:
            table.add_row(*["…"] * len(table.columns))
    table.add_section()
    everything = torch.cat([cells, held], dim=1)
    total = everything.sum(dim=0)
    total[len(groups)] = (counts.sum(dim=0) > 0).sum()
    for name, row in (
        ("smallest", everything.min(dim=0).values),
        ("median", np.median(everything.numpy(), axis=0)),  # torch's is the lower of two
        ("largest", everything.max(dim=0).values),
        ("total", total),
    ):
        table.add_row(name, *(f"{number:.12g}" for number in row.tolist()))
    return table


def legible(name: str, most: int = 24) -> str:
    """Return a name that is at most so many characters long. A longer one is cut."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def grouped(counts: Tensor, most: int) -> tuple[list[range], Tensor]:
    """Join adjacent classes until at most ``most`` groups are left; return them and their counts (K, groups)."""
    classes = counts.shape[1]
    width = math.ceil(classes / most)
    groups = [range(first, min(first + width, classes)) for first in range(0, classes, width)]
    return groups, torch.stack([counts[:, group.start : group.stop].sum(dim=1) for group in groups], dim=1)


def span(group: range) -> str:
    """Return the heading of joined classes: ``4-7``, or ``4`` for one class."""
    return f"{group.start}-{group.stop - 1}" if len(group) > 1 else str(group.start)


def _width(samples: Tensor, most: int) -> int:
    """Return the characters that at most ``most`` groups of classes take, for the samples of each class (1, C)."""
    groups, sums = grouped(samples, most)
    return sum(1 + max(len(span(group)), len(str(n))) for group, n in zip(groups, sums[0].tolist(), strict=True))


def _shade(share: float) -> str:
    """Return a rich style for a count of ``share`` (0..1) of the largest; the square root lifts small counts."""
    if not share:
        return ""
    level = int(235 - 175 * math.sqrt(share))
    return f"{'black' if level > 140 else 'white'} on rgb({level // 2},{level},{min(255, level + 40)})"
