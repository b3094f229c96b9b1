"""FedAMP as a fedcore plugin: attentive message passing between clients' own models."""

from fedcore_fedamp.equations import attention, cosine, cosine_attention, mixture, squared_distance
from fedcore_fedamp.plugin import FedAMP, FedAMPOptions

__all__ = ["FedAMP", "FedAMPOptions", "attention", "cosine", "cosine_attention", "mixture", "squared_distance"]
