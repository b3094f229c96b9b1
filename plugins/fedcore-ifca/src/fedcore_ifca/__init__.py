"""IFCA as a fedcore plugin: iterative federated clustering."""

from fedcore_ifca.equations import best_cluster, redrawn
from fedcore_ifca.plugin import IFCA, IFCAOptions

__all__ = ["IFCA", "IFCAOptions", "best_cluster", "redrawn"]
