"""Models: an encoder and a classifier, built by name and seed.

A custom model is a function ``factory(num_classes, input_shape) -> SplitModel``, or, with the package fedcore-zoo, a
class of a network that ends with a linear layer. It is named on the command line as ``--model module:package.factory``,
given to ``fedcore.run`` as an object, or installed under the entry point group ``fedcore.models``. If its models take
other batches than tensors, the factory declares them: ``factory.takes = ("graphs",)``.
"""

from fedcore.models.build import HINT, build_model, dtype_hint, require_takes
from fedcore.models.layout import Layout
from fedcore.models.mlp import mlp
from fedcore.models.placement import Placement, convolves, forward_chunk, problem_in_channels_last, resolve_device
from fedcore.models.split import ModelTask as ModelTask
from fedcore.models.split import Outputs, frozen_modules, has_batch_norm, smallest_batch, tried
from fedcore.models.split import SplitModel as SplitModel

__all__ = [
    "HINT",
    "Layout",
    "Outputs",
    "Placement",
    "build_model",
    "convolves",
    "dtype_hint",
    "forward_chunk",
    "frozen_modules",
    "has_batch_norm",
    "mlp",
    "problem_in_channels_last",
    "require_takes",
    "resolve_device",
    "smallest_batch",
    "tried",
]
