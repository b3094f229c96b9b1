"""The text files of a TU Dortmund graph set, read by torch_geometric; nothing is downloaded, cached or unpickled."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.io import read_tu_data
from torch_geometric.utils import degree, one_hot

from fedcore import DataError
from fedcore_graph.samples import GraphSamples

FILES = ("A", "graph_indicator", "graph_labels")
"""What every set has; node and edge labels and attributes are read where they are."""

MAX_ONE_HOT_DEGREE = 1000
"""From here on a node's degree is one number, as in torch_geometric's benchmarks: one-hot it would be too wide."""


def read_tudataset(root: Path, name: str) -> GraphSamples:
    """Return the graphs of ``root/name/raw/name_*.txt``, the layout of torch_geometric's ``TUDataset``.

    Node features are attributes and one-hot labels as far as there are any; without either it is the degree, one-hot.
    Classes are numbered from 0 in the order of the files' labels; loops and repeated edges are dropped.

    :raises DataError: files are missing or damaged, or hold a graph without nodes.
    """
    raw = root / name / "raw"
    files = [raw / f"{name}_{file}.txt" for file in FILES]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise DataError(
            f"{name}: {', '.join(missing)} missing. fedcore does not download graphs: unpack {name}.zip of the TU "
            f"Dortmund collection as {raw}, or let torch_geometric.datasets.TUDataset({str(root)!r}, {name!r}) fetch "
            "it; --data-dir (or FEDCORE_DATA) names the folder"
        )
    try:
        graph_of = _graph_of_each_node(files[1])
        data, slices, _ = read_tu_data(str(raw), name)
        x, y, edge_index, edge_attr = data.x, data.y, data.edge_index, data.edge_attr
        count = int(graph_of[-1]) + 1
        node_offsets = _offsets(torch.bincount(graph_of, minlength=count))
        # The reader stops at the last graph with an edge.
        edges = slices["edge_index"].diff()
        edge_offsets = _offsets(torch.cat([edges, edges.new_zeros(count - len(edges))]))
        if len(y) != count:
            raise ValueError(f"{len(y)} labels for {count} graphs")
        if x is None:
            x = _degrees(edge_index, node_offsets, edge_offsets)
        return GraphSamples(x.float(), edge_index, node_offsets, edge_offsets, y, edge_attr)
    except Exception as error:  # the parser raises anything on a damaged file
        raise DataError(f"{name}: the files in {raw} cannot be used: {error or type(error).__name__}") from error


def file_labels(root: Path, name: str) -> list[int]:
    """Return the labels that a set's file has for classes 0 to C-1.

    They name the classes: in a file that lacks a label, such as a part of the set at one site, classes have other
    numbers.
    """
    lines = (root / name / "raw" / f"{name}_graph_labels.txt").read_text(encoding="utf-8").split()
    return sorted({int(float(line)) for line in lines})


def _graph_of_each_node(file: Path) -> Tensor:
    """Return each node's graph, from 0, (N,) int64.

    :raises ValueError: they do not come in order, as the format has it.
    """
    graph_of = torch.tensor([int(line) - 1 for line in file.read_text(encoding="utf-8").split()])
    if not len(graph_of) or int(graph_of[0]) < 0 or bool((graph_of.diff() < 0).any()):
        raise ValueError(f"{file.name} must name each node's graph, from 1 and rising")
    return graph_of


def _offsets(sizes: Tensor) -> Tensor:
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


def _degrees(edge_index: Tensor, node_offsets: Tensor, edge_offsets: Tensor) -> Tensor:
    """Return each node's degree as features (N, F) float32: one-hot, or standardised where that would be too wide."""
    first_node = torch.repeat_interleave(node_offsets[:-1], edge_offsets.diff())  # (E,)
    degrees = degree(edge_index[0] + first_node, int(node_offsets[-1]), dtype=torch.int64)
    if int(degrees.max()) < MAX_ONE_HOT_DEGREE:
        features: Tensor = one_hot(degrees)
    else:
        numbers = degrees.double()
        features = ((numbers - numbers.mean()) / numbers.std()).float().unsqueeze(1)
    return features
