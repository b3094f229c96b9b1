"""Code that methods share: pure functions on tensors, and parts of plugins that are built from them.

:class:`PrototypeExchange` and :class:`ClassifierCalibration` are such parts (``parts`` of :class:`fedcore.Plugin`). The
other names are functions, and the options, constants and small classes that they take.

Float inputs keep their dtype (float64 in, float64 out). The losses, and what they are computed from in a batch, are
capture-safe: no host synchronisation, no shape that depends on values, no Python branch on tensor values. A training
step that calls them can then be compiled or recorded as a CUDA graph. The checks and what the server computes read
values on the host.
"""

from fedcore_functional.bounds import (
    SLACK,
    FeatureOptions,
    FeatureRange,
    check_covariance,
    check_means,
    check_moves,
    feature_range,
    largest_move,
)
from fedcore_functional.calibration import CalibrationOptions, ClassifierCalibration
from fedcore_functional.classes import (
    balanced_cross_entropy,
    check_counts,
    class_means,
    class_statistics,
    class_sums,
    log_prior,
    refuse_changed_counts,
)
from fedcore_functional.contrast import (
    ReadyPrototypes,
    UnitLength,
    contrast_with,
    cosine_similarity_matrix,
    model_contrastive_loss,
    prototype_contrastive_loss,
    ready_prototypes,
)
from fedcore_functional.drift import (
    correction,
    displaced_mean,
    renewed_control,
    renewed_displacement,
    renewed_mean_displacement,
    shifted_target,
)
from fedcore_functional.layers import check_layers, may_draw, move_split, names_of_last_layers
from fedcore_functional.prototype_exchange import PrototypeExchange, PrototypeOptions
from fedcore_functional.prototypes import (
    add_prototypes,
    check_prototypes,
    class_prototypes,
    first_prototypes,
    mean_over_holders,
    prototype_distance,
    random_prototypes,
)
from fedcore_functional.statistics import (
    check_statistics,
    feature_statistics,
    pack_statistics,
    pool_answers,
    pool_statistics,
    pool_two,
    sample_features,
    unpack_statistics,
)
from fedcore_functional.terms import effective_steps, linear_term, mean_loss, moved_model, proximal_term, update_vector
from fedcore_functional.under_vmap import VmapRules, as_parameters

__all__ = [
    "SLACK",
    "CalibrationOptions",
    "ClassifierCalibration",
    "FeatureOptions",
    "FeatureRange",
    "PrototypeExchange",
    "PrototypeOptions",
    "ReadyPrototypes",
    "UnitLength",
    "VmapRules",
    "add_prototypes",
    "as_parameters",
    "balanced_cross_entropy",
    "check_counts",
    "check_covariance",
    "check_layers",
    "check_means",
    "check_moves",
    "check_prototypes",
    "check_statistics",
    "class_means",
    "class_prototypes",
    "class_statistics",
    "class_sums",
    "contrast_with",
    "correction",
    "cosine_similarity_matrix",
    "displaced_mean",
    "effective_steps",
    "feature_range",
    "feature_statistics",
    "first_prototypes",
    "largest_move",
    "linear_term",
    "log_prior",
    "may_draw",
    "mean_loss",
    "mean_over_holders",
    "model_contrastive_loss",
    "move_split",
    "moved_model",
    "names_of_last_layers",
    "pack_statistics",
    "pool_answers",
    "pool_statistics",
    "pool_two",
    "prototype_contrastive_loss",
    "prototype_distance",
    "proximal_term",
    "random_prototypes",
    "ready_prototypes",
    "refuse_changed_counts",
    "renewed_control",
    "renewed_displacement",
    "renewed_mean_displacement",
    "sample_features",
    "shifted_target",
    "unpack_statistics",
    "update_vector",
]
