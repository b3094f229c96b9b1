"""FedRep and FedBABU as fedcore plugins: a shared representation, and heads that clients train on their own."""

from fedcore_fedrep.fedbabu import FedBABU, FedBABUOptions
from fedcore_fedrep.fedrep import FedRep, FedRepOptions

__all__ = ["FedBABU", "FedBABUOptions", "FedRep", "FedRepOptions"]
