"""IFCA as a fedcore plugin: iterative federated clustering."""

from fedcore_ifca.equations import best_clusters, redrawn
from fedcore_ifca.plugin import IFCA, IFCAOptions

__all__ = ["IFCA", "IFCAOptions", "best_clusters", "redrawn"]
