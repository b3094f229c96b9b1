"""The mathematics the methods share: pure functions on tensors, nothing about clients, rounds or plugins.

Float inputs keep their dtype (float64 in, float64 out). Unless its docstring says otherwise a function is
capture-safe: no host synchronisation, no shape that depends on values, no Python branch on tensor values, so
that a training step that calls it can be compiled or recorded as a CUDA graph.
"""

from fedcore.functional.classes import class_means, class_statistics
from fedcore.functional.contrast import (
    ReadyPrototypes,
    contrast_with,
    cosine_similarity_matrix,
    model_contrastive_loss,
    prototype_contrastive_loss,
    ready_prototypes,
)
from fedcore.functional.terms import effective_steps, linear_term, proximal_term

__all__ = [
    "ReadyPrototypes",
    "class_means",
    "class_statistics",
    "contrast_with",
    "cosine_similarity_matrix",
    "effective_steps",
    "linear_term",
    "model_contrastive_loss",
    "prototype_contrastive_loss",
    "proximal_term",
    "ready_prototypes",
]
