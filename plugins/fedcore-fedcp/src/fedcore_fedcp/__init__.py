"""FedCP as a fedcore plugin: a conditional policy splits features between a personal and the global head."""

from fedcore_fedcp.equations import context_of, maximum_mean_discrepancy, mixed_head
from fedcore_fedcp.head import ConditionalHead, PolicyNetwork
from fedcore_fedcp.plugin import FedCP, FedCPOptions

__all__ = [
    "ConditionalHead",
    "FedCP",
    "FedCPOptions",
    "PolicyNetwork",
    "context_of",
    "maximum_mean_discrepancy",
    "mixed_head",
]
