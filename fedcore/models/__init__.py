"""Models: an encoder and a classifier, built by name and seed.

A custom model is a function ``factory(num_classes, input_shape) -> SplitModel``, or, with the package fedcore-zoo, a
class of a network that ends with a linear layer. It is named on the command line as ``--model module:package.factory``,
given to ``fedcore.run`` as an object, or installed under the entry point group ``fedcore.models``. If its models take
other batches than tensors, the factory declares them: ``factory.takes = ("graphs",)``.

The names below are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedcore.base.lazy import lazy

# At once: later the file of this name would be found instead.
from fedcore.models.mlp import mlp as mlp

if TYPE_CHECKING:
    from fedcore.models.build import HINT as HINT
    from fedcore.models.build import build_model as build_model
    from fedcore.models.build import dtype_hint as dtype_hint
    from fedcore.models.build import require_takes as require_takes
    from fedcore.models.layout import Layout as Layout
    from fedcore.models.placement import Placement as Placement
    from fedcore.models.placement import convolves as convolves
    from fedcore.models.placement import forward_chunk as forward_chunk
    from fedcore.models.placement import problem_in_channels_last as problem_in_channels_last
    from fedcore.models.placement import resolve_device as resolve_device
    from fedcore.models.split import Outputs as Outputs
    from fedcore.models.split import PlainAttributes as PlainAttributes
    from fedcore.models.split import copied as copied
    from fedcore.models.split import evaluating as evaluating
    from fedcore.models.split import frozen_modules as frozen_modules
    from fedcore.models.split import has_batch_norm as has_batch_norm
    from fedcore.models.split import smallest_batch as smallest_batch
    from fedcore.models.split import training_copy as training_copy
    from fedcore.models.split import tried as tried

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
