"""A finished run's model for other programs: PyTorch, ONNX or safetensors, each with a model card.

The names are imported on first use, so that ``fedcore export --help`` needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedcore_export.export import FORMATS, Exported, export_run

__all__ = ["FORMATS", "Exported", "export_run"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from fedcore_export import export

        return getattr(export, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
