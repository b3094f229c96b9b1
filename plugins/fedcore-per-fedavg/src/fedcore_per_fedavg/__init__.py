"""Per-FedAvg as a fedcore plugin: an initial model that one gradient step adapts to each client."""

from fedcore_per_fedavg.equations import curvature, moved, parts
from fedcore_per_fedavg.plugin import PerFedAvg, PerFedAvgOptions

__all__ = ["PerFedAvg", "PerFedAvgOptions", "curvature", "moved", "parts"]
