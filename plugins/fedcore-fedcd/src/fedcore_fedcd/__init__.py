"""FedCD as a fedcore plugin: fine-grained prototypes and adaptive class-level classifier aggregation."""

from fedcore_fedcd.equations import (
    FineClassifier,
    Points,
    Rebalanced,
    assign_fine_classes,
    batch_prototype_loss,
    class_vector_weights,
    decoupled_distillation,
    hierarchical_contrast,
    hierarchical_weights,
    largest_move,
)
from fedcore_fedcd.plugin import FedCD, FedCDOptions

__all__ = [
    "FedCD",
    "FedCDOptions",
    "FineClassifier",
    "Points",
    "Rebalanced",
    "assign_fine_classes",
    "batch_prototype_loss",
    "class_vector_weights",
    "decoupled_distillation",
    "hierarchical_contrast",
    "hierarchical_weights",
    "largest_move",
]
