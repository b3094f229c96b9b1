"""Labelled graphs as a handful of tensors, batched as torch_geometric batches them."""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from torch import Tensor
from torch_geometric.data import Batch

from fedcore import DataError
from fedcore.data import JSON, check_labels, check_offsets
from fedcore_zoo import gather_runs


class GraphSamples:
    """Graphs one after the other; a batch is torch_geometric's ``Batch``. ``input_shape`` of a data set is (F,).

    :param x: features of all nodes, (N, F) float32.
    :param edge_index: source and target of all edges, (2, E) int64, each graph's nodes counted from 0.
    :param node_offsets: where each graph's nodes begin, and the end of the last: (n + 1,) int64.
    :param edge_offsets: likewise for edges; graphs without an edge are fine.
    :param labels: (n,) int64.
    :param edge_attr: features of all edges, (E, D) float32, for models that read them.
    :raises DataError: they do not belong together, or a graph has no nodes: nothing could be pooled over it.
    """

    kind: ClassVar[str] = "graphs"
    fixed_shape: ClassVar[bool] = False

    def __init__(
        self,
        x: Tensor,
        edge_index: Tensor,
        node_offsets: Tensor,
        edge_offsets: Tensor,
        labels: Tensor,
        edge_attr: Tensor | None = None,
    ) -> None:
        check_offsets("node_offsets", node_offsets, len(x))
        check_offsets("edge_offsets", edge_offsets, edge_index.shape[-1])
        check_labels(labels, len(node_offsets) - 1)
        if edge_offsets.shape != node_offsets.shape:
            raise DataError(f"nodes are those of {len(node_offsets) - 1} graphs, edges of {len(edge_offsets) - 1}")
        nodes = node_offsets.diff()
        if bool((nodes == 0).any()):
            raise DataError(f"graph {int((nodes == 0).nonzero()[0])} has no nodes; leave it out")
        if x.ndim != 2 or x.dtype != torch.float32 or not bool(x.isfinite().all()):
            raise DataError(f"x must be finite float32 of shape (nodes, features), not {x.dtype} of {tuple(x.shape)}")
        if edge_index.ndim != 2 or len(edge_index) != 2 or edge_index.dtype != torch.int64:
            raise DataError(
                f"edge_index must be int64 of shape (2, E), not {edge_index.dtype} of {tuple(edge_index.shape)}"
            )
        limits = torch.repeat_interleave(nodes, edge_offsets.diff())  # (E,) nodes of the graph that the edge is in
        astray = ((edge_index < 0) | (edge_index >= limits)).any(dim=0)
        if bool(astray.any()):
            edge = int(astray.nonzero()[0])
            graph = int(torch.searchsorted(edge_offsets, edge, right=True)) - 1
            raise DataError(
                f"graph {graph} has {int(nodes[graph])} nodes, but an edge {edge_index[:, edge].tolist()} (from 0)"
            )
        if edge_attr is not None and len(edge_attr) != edge_index.shape[1]:
            raise DataError(f"edge_attr has {len(edge_attr)} rows for {edge_index.shape[1]} edges")
        self.x, self.edge_index, self.edge_attr = x, edge_index, edge_attr
        self.node_offsets, self.edge_offsets, self.labels = node_offsets, edge_offsets, labels

    def __len__(self) -> int:
        return len(self.labels)

    def gather(self, indices: Tensor) -> Batch:
        """Return the graphs at ``indices`` (B,) int64 as one: x, edge_index, batch, ptr and perhaps edge_attr."""
        indices = indices.to(self.labels.device)
        nodes, ptr = gather_runs(self.node_offsets, indices)
        edges, edge_ptr = gather_runs(self.edge_offsets, indices)
        graphs = torch.arange(len(indices), device=indices.device)
        first_node = torch.repeat_interleave(ptr[:-1], edge_ptr.diff())  # (edges,)
        return Batch(
            x=self.x.index_select(0, nodes),
            edge_index=self.edge_index.index_select(1, edges) + first_node,
            edge_attr=None if self.edge_attr is None else self.edge_attr.index_select(0, edges),
            batch=torch.repeat_interleave(graphs, ptr.diff()),
            ptr=ptr,
        )

    def select(self, indices: Tensor) -> Self:
        """Return the graphs at ``indices`` (B,) int64 as new samples."""
        nodes, node_offsets = gather_runs(self.node_offsets, indices)
        edges, edge_offsets = gather_runs(self.edge_offsets, indices)
        attributes = None if self.edge_attr is None else self.edge_attr[edges]
        return type(self)(
            self.x[nodes], self.edge_index[:, edges], node_offsets, edge_offsets, self.labels[indices], attributes
        )

    def to(self, device: torch.device, memory_format: torch.memory_format) -> Self:
        """Return the samples on a device."""
        return type(self)(**{name: tensor.to(device) for name, tensor in self.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that these graphs are, by name."""
        names = ("x", "edge_index", "node_offsets", "edge_offsets", "labels", "edge_attr")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    def meta(self) -> dict[str, JSON]:
        """Return nothing: tensors say it all."""
        return {}
