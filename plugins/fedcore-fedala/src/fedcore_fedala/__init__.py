"""FedALA as a fedcore plugin: each client learns how much of the global model it starts from."""

from fedcore_fedala.equations import mixed, renewed_share, settled
from fedcore_fedala.plugin import FedALA, FedALAOptions

__all__ = ["FedALA", "FedALAOptions", "mixed", "renewed_share", "settled"]
