"""Import torchvision, even if its compiled operators do not fit the installed torch.

torchvision's wheel is linked against one build of torch (CPU, or one CUDA version). Next to another build its
library of operators is not loaded and ``import torchvision`` itself fails, because it registers functions for
two operators that then do not exist (https://github.com/pytorch/vision/issues/9085). fedcore reads data sets
and calls none of these operators, so declaring them is enough.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from types import ModuleType

import torch

from fedcore import ConfigError

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
# A declaration lasts as long as its Library object, so these live as long as the process.
_declared: dict[str, torch.library.Library] = {}


@functools.cache
def load_torchvision() -> ModuleType:
    """Return the torchvision package; one that imports without help is not changed.

    :raises ConfigError: torchvision is missing or broken in a way that is not the one described above.
    """
    while True:
        try:
            return importlib.import_module("torchvision")
        except (ImportError, RuntimeError) as error:
            missing = re.search(r"operator torchvision::(\w+) does not exist", str(error))
            operator = missing.group(1) if missing else ""
            if operator not in _SCHEMAS or operator in _declared:
                raise ConfigError(
                    f"torchvision cannot be imported: {error}. Install the torchvision that belongs to torch "
                    f"{torch.__version__}, from the same package index as torch."
                ) from error
            library = torch.library.Library("torchvision", "FRAGMENT")
            library.define(_SCHEMAS[operator])
            _declared[operator] = library
            for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
