"""FedGen as a fedcore plugin: a generator of features that is trained on the server, without data."""

from fedcore_fedgen.equations import (
    consensus_loss,
    consistency_loss,
    diversity_loss,
    first_generator,
    generate,
    label_weights,
)
from fedcore_fedgen.plugin import FedGen, FedGenOptions

__all__ = [
    "FedGen",
    "FedGenOptions",
    "consensus_loss",
    "consistency_loss",
    "diversity_loss",
    "first_generator",
    "generate",
    "label_weights",
]
