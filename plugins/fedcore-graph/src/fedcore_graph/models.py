"""Graph models, split into encoder (graph -> features) and classifier: ``factory(num_classes, input_shape)``."""

from __future__ import annotations

from torch import Tensor, nn
from torch_geometric.data import Batch
from torch_geometric.nn import global_add_pool
from torch_geometric.nn.models import GIN

from fedcore import SplitModel

WIDTH, LAYERS = 32, 5


class GraphEncoder(nn.Module):
    """A network on nodes, the sum over each graph's nodes, and a layer on the sums: graphs to features (B, d).

    :param gnn: maps node features (N, F) and edges (2, E) to (N, w).
    :param head: maps the sums (B, w) to (B, d).
    """

    def __init__(self, gnn: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.gnn, self.head = gnn, head

    def forward(self, graphs: Batch) -> Tensor:
        """Return the features of a batch of graphs."""
        nodes = self.gnn(graphs.x, graphs.edge_index)  # (N, w)
        pooled = global_add_pool(nodes, graphs.batch, graphs.num_graphs)  # (B, w)
        features: Tensor = self.head(pooled)  # (B, d)
        return features


def gin(num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
    """Graph Isomorphism Network: 5 layers of 32, joined, summed over nodes, Linear 32; features (B, 32).

    torch_geometric's GIN-0 with the paper's layers for small molecules: in each an MLP of two linear layers, with
    BatchNorm; the readout joins the layers ("jumping knowledge"). On the sums, as in torch_geometric's MUTAG example,
    Linear, BatchNorm, ReLU: without it they grow with the number of nodes, and SGD diverges at the learning rates that
    images take. Edge features are not read. No dropout. With 7 node features and 2 classes it has 16,738 parameters.

    :param input_shape: (F,), the number of node features.
    :source: Xu, Hu, Leskovec, Jegelka, How Powerful are Graph Neural Networks? (ICLR 2019, arXiv 1810.00826).
    """
    gnn = GIN(input_shape[0], WIDTH, LAYERS, norm="batch_norm", jk="cat")
    head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
    return SplitModel(GraphEncoder(gnn, head), WIDTH, num_classes)


gin.takes = ("graphs",)  # type: ignore[attr-defined]
