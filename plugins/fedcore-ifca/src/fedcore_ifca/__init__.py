"""IFCA as a fedcore plugin: iterative federated clustering."""

from fedcore_ifca.equations import best_cluster, cluster_mean, mean_by_samples, redrawn
from fedcore_ifca.plugin import IFCA, IFCAOptions

__all__ = ["IFCA", "IFCAOptions", "best_cluster", "cluster_mean", "mean_by_samples", "redrawn"]
