"""Run a script of this folder in a library's environment: ``start.py run_NAME.py FOLDER``.

Many libraries import torchvision for data sets that are not used here. One that was built for another torch (CPU, some
CUDA) does not import unless its operators are declared.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    script = Path(sys.argv.pop(1)).resolve()
    sys.path[0] = str(script.parent)
    with contextlib.suppress(ImportError):
        import torch

        try:
            import torchvision  # noqa: F401
        except RuntimeError:
            operators = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                operators.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
    runpy.run_path(str(script), run_name="__main__")
