"""FedTGP as a fedcore plugin: trainable global prototypes with an adaptive margin; no model travels."""

from fedcore_fedtgp.equations import adaptive_margin, class_margins, margin_contrast, prototypes_of
from fedcore_fedtgp.plugin import FedTGP, FedTGPOptions, PrototypeModel

__all__ = [
    "FedTGP",
    "FedTGPOptions",
    "PrototypeModel",
    "adaptive_margin",
    "class_margins",
    "margin_contrast",
    "prototypes_of",
]
