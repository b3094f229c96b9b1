"""FedCME as a fedcore plugin: client matching, classifier exchange in mid-training and feature alignment."""

from fedcore_fedcme.equations import (
    alignment_loss,
    evaluation_vector,
    global_features,
    local_features,
)
from fedcore_fedcme.matching import match_clients, match_many_to_one
from fedcore_fedcme.plugin import FedCME, FedCMEOptions

__all__ = [
    "FedCME",
    "FedCMEOptions",
    "alignment_loss",
    "evaluation_vector",
    "global_features",
    "local_features",
    "match_clients",
    "match_many_to_one",
]
