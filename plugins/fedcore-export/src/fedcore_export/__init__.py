"""A finished run's model for other programs: PyTorch, ONNX or safetensors, each with a model card."""

from fedcore_export.export import FORMATS, Exported, export_run

__all__ = ["FORMATS", "Exported", "export_run"]
