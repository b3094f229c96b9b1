"""FPL as a fedcore plugin: federated prototype learning under domain shift."""

from fedcore_fpl.equations import cluster_contrast, cluster_prototypes, finch, first_neighbour_groups
from fedcore_fpl.plugin import FPL, FPLOptions

__all__ = ["FPL", "FPLOptions", "cluster_contrast", "cluster_prototypes", "finch", "first_neighbour_groups"]
