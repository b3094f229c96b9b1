"""The data set of the core: handwritten digits, in ``digits.npz`` next to this file (see ``digits.LICENSE.txt``).

It is a file of its own, as in a package with a data set: a loader behind an entry point of the group
``fedcore.datasets``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fedcore.data.dataset import Dataset
from fedcore.data.images import Split, assemble


def digits(data_dir: Path | None = None) -> Dataset:
    """Return the bundled digits (UCI, as in scikit-learn): (1, 8, 8), 10 classes, 1437 to train and 360 to test.

    The split is stratified and fixed; it does not depend on the run's seed.
    """
    with np.load(Path(__file__).with_suffix(".npz"), allow_pickle=False) as file:
        images = torch.from_numpy(file["pixels"] / 16.0).to(torch.float32).unsqueeze(1)
        labels, train, test = (torch.from_numpy(file[name].astype(np.int64)) for name in ("labels", "train", "test"))
    return assemble(
        "digits",
        Split(images[train], labels[train]),
        Split(images[test], labels[test]),
        class_names=tuple(str(digit) for digit in range(10)),
    )
