"""FedCD as a fedcore plugin: fine-grained prototypes and adaptive class-level classifier aggregation.

``fedcore_fedcd.equations`` has the paper's equations, ``fedcore_fedcd.variants`` its ablations and other readings.
"""

from fedcore_fedcd.plugin import FedCD, FedCDOptions
from fedcore_fedcd.variants import FedCDVariants, FedCDVariantsOptions

__all__ = ["FedCD", "FedCDOptions", "FedCDVariants", "FedCDVariantsOptions"]
