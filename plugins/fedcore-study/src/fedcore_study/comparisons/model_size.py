"""The size of a run's model, as the run recorded it or as the model it left has it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class ModelSize:
    """A run's model: trainable parameters, and the width of its projection head (None without one)."""

    parameters: int
    projection: int | None

    def __str__(self) -> str:
        head = "no projection head" if self.projection is None else "a projection head"
        return f"{self.parameters:,} parameters and {head}"


def model_size(path: Path, sessions: Sequence[Mapping[str, Any]]) -> ModelSize | None:
    """Return the size of a run's model from its last session, else from model.safetensors; None where neither says."""
    try:
        return _size(sessions[-1]["model"])
    except (LookupError, TypeError):
        return _size_of_tensors(path / "model.safetensors")


def _size(values: Any) -> ModelSize | None:
    parameters, projection = values["parameters"], values.get("projection")
    whole = isinstance(parameters, int) and (projection is None or isinstance(projection, int))
    return ModelSize(parameters, projection) if whole else None


def _size_of_tensors(file: Path) -> ModelSize | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as tensors:
            shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return None
    trained = {name: shape for name, shape in shapes.items() if name.rpartition(".")[2] not in _BUFFERS}
    head = [shape[0] for name, shape in trained.items() if name.startswith("encoder.projection.") and shape]
    return ModelSize(sum(map(math.prod, trained.values())), head[-1] if head else None)
