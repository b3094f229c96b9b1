"""FedRoD as a fedcore plugin."""

from fedcore_fedrod.equations import TwoHeads, personal_cross_entropy
from fedcore_fedrod.plugin import FedRoD, FedRoDOptions

__all__ = ["FedRoD", "FedRoDOptions", "TwoHeads", "personal_cross_entropy"]
