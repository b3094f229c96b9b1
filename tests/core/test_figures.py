"""Figures that cannot be computed are None, with the reason beside them; no internal error, no NaN in JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fedcore.client.evaluation import silhouette
from fedcore.data import ResidentSamples
from fedcore.storage.files import finite, sealed, unsealed
from fedcore.testing import federate


class Features(torch.nn.Module):
    """Gives the pixels, times a factor, as features."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = images.flatten(1) * self.factor
        return features, features


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 3e38])
def test_features_that_are_not_finite_have_no_silhouette(factor: float) -> None:
    images = torch.arange(1.0, 25.0).view(6, 1, 2, 2)
    samples = ResidentSamples(images, torch.tensor([0, 0, 0, 1, 1, 1]), [0.0], [1.0])
    value, reason = silhouette(Features(factor), samples, 0, torch.device("cpu"))
    assert value is None
    assert "not finite" in str(reason)
    value, reason = silhouette(Features(1.0), samples, 0, torch.device("cpu"))
    assert (value is not None, reason) == (True, None)


def test_noise_beyond_all_numbers_is_told(tmp_path: Path) -> None:
    """The model diverges in aggregation, after which nothing is trained that could say so."""
    result = federate(tmp_path, ("dp", {"clip": 1e20}), rounds=1)
    assert result.metrics["silhouette"] is None or isinstance(result.metrics["silhouette"], float)
    for name in ("metrics.jsonl", "summary.json"):
        assert "NaN" not in (result.directory / name).read_text()
        assert "Infinity" not in (result.directory / name).read_text()


def test_records_hold_no_nan() -> None:
    record = finite({"a": 1.0, "b": {"c": [float("nan"), 2.0], "d": float("inf")}})
    assert record == {"a": 1.0, "b": {"c": [None, 2.0], "d": None}, "not_finite": ["b.c.0", "b.d"]}
    assert finite({"a": 1.0}) == {"a": 1.0}


def test_a_checksum_is_of_the_values_and_not_of_how_they_are_written() -> None:
    value = sealed({"a": [1.5, None, "\u00e9"], "b": {"c": 1e-300}})
    assert unsealed(json.loads(json.dumps(value, indent=2, ensure_ascii=False))) == {
        "a": [1.5, None, "\u00e9"],
        "b": {"c": 1e-300},
    }
    with pytest.raises(ValueError, match="checksum"):
        unsealed({**value, "a": [1.25, None, "\u00e9"]})
