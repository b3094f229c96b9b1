"""Small graph sets as the text files of the TU Dortmund collection."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest


class Graph(NamedTuple):
    """Number of nodes, undirected edges from 0, label; labels of the nodes where there are any."""

    nodes: int
    edges: list[tuple[int, int]]
    label: int
    node_labels: list[int] | None = None


def write(folder: Path, name: str, graphs: list[Graph]) -> Path:
    """Write the files of a set; returns the data directory."""
    raw = folder / name / "raw"
    raw.mkdir(parents=True)
    first, lines = 1, {"A": [], "graph_indicator": [], "graph_labels": [], "node_labels": []}
    for number, graph in enumerate(graphs, 1):
        for a, b in graph.edges:
            lines["A"] += [f"{first + a}, {first + b}", f"{first + b}, {first + a}"]
        lines["graph_indicator"] += [str(number)] * graph.nodes
        lines["graph_labels"].append(str(graph.label))
        lines["node_labels"] += map(str, graph.node_labels or [])
        first += graph.nodes
    for kind, content in lines.items():
        if content:
            (raw / f"{name}_{kind}.txt").write_text("\n".join(content) + "\n")
    return folder


def ring(nodes: int) -> Graph:
    return Graph(nodes, [(i, (i + 1) % nodes) for i in range(nodes)], 1, [i % 3 for i in range(nodes)])


def star(nodes: int) -> Graph:
    return Graph(nodes, [(0, i) for i in range(1, nodes)], -1, [i % 3 for i in range(nodes)])


def rings_and_stars(count: int, *, node_labels: bool = True) -> list[Graph]:
    """Return rings (class 1) and stars (class 0) in turn, of 4 to 9 nodes."""
    sizes = np.random.default_rng(0).integers(4, 10, size=count).tolist()
    graphs = [(ring if i % 2 else star)(size) for i, size in enumerate(sizes)]
    return graphs if node_labels else [graph._replace(node_labels=None) for graph in graphs]


@pytest.fixture(scope="session")
def tu() -> SimpleNamespace:
    """``tu.write(folder, name, graphs)`` and graphs to write: ``tu.Graph``, ``tu.ring(nodes)``, ``tu.star(nodes)``."""
    return SimpleNamespace(Graph=Graph, write=write, ring=ring, star=star, rings_and_stars=rings_and_stars)
