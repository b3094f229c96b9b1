"""The methods' shared mathematics: pure functions on tensors, independent of clients, rounds and plugins.

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
from fedcore.functional.drift import (
    correction,
    displaced_mean,
    renewed_control,
    renewed_displacement,
    renewed_mean_displacement,
    shifted_target,
)
from fedcore.functional.prototypes import (
    add_prototypes,
    check_prototypes,
    class_prototypes,
    first_prototypes,
    mean_over_holders,
    random_prototypes,
)
from fedcore.functional.statistics import (
    check_statistics,
    feature_statistics,
    pack_statistics,
    pool_answers,
    pool_statistics,
    pool_two,
    sample_features,
    unpack_statistics,
)
from fedcore.functional.terms import effective_steps, linear_term, proximal_term

__all__ = [
    "ReadyPrototypes",
    "add_prototypes",
    "check_prototypes",
    "check_statistics",
    "class_means",
    "class_prototypes",
    "class_statistics",
    "contrast_with",
    "correction",
    "cosine_similarity_matrix",
    "displaced_mean",
    "effective_steps",
    "feature_statistics",
    "first_prototypes",
    "linear_term",
    "mean_over_holders",
    "model_contrastive_loss",
    "pack_statistics",
    "pool_answers",
    "pool_statistics",
    "pool_two",
    "prototype_contrastive_loss",
    "proximal_term",
    "random_prototypes",
    "ready_prototypes",
    "renewed_control",
    "renewed_displacement",
    "renewed_mean_displacement",
    "sample_features",
    "shifted_target",
    "unpack_statistics",
]
