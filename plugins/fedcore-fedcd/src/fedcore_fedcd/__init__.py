"""FedCD as a fedcore plugin: fine-grained prototypes and adaptive class-level classifier aggregation."""

from fedcore_fedcd.equations import (
    assign_fine_classes,
    batch_prototype_loss,
    class_vector_weights,
    debiased_classifier_loss,
    decoupled_distillation_loss,
    hierarchical_prototype_loss,
)
from fedcore_fedcd.plugin import FedCD, FedCDOptions, FineClassifier

__all__ = [
    "FedCD",
    "FedCDOptions",
    "FineClassifier",
    "assign_fine_classes",
    "batch_prototype_loss",
    "class_vector_weights",
    "debiased_classifier_loss",
    "decoupled_distillation_loss",
    "hierarchical_prototype_loss",
]
