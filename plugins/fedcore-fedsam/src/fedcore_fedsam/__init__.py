"""FedSAM as a fedcore plugin: sharpness-aware minimisation on the clients."""

from fedcore_fedsam.equations import ascended, scales
from fedcore_fedsam.plugin import FedSAM, FedSAMOptions

__all__ = ["FedSAM", "FedSAMOptions", "ascended", "scales"]
