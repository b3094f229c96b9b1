"""Networks of transformers as modules with other inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn


class OfTransformers(nn.Module):
    """A network of transformers with other inputs and outputs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network: Any = network

    def save_pretrained(self, folder: Path, class_names: Sequence[str] = ()) -> None:
        """Write the network into a folder, as transformers reads it.

        :param class_names: the names of the classes in order; empty where they have none.
        """
        if class_names:
            self.network.config.id2label = dict(enumerate(class_names))
            self.network.config.label2id = {name: number for number, name in enumerate(class_names)}
        self.network.save_pretrained(str(folder))
