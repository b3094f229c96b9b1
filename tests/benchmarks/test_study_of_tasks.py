"""The study of tasks: its table is what the evidence gives, and its data sets are what the page says."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def study():
    return runpy.run_path(str(ROOT / "benchmarks" / "tasks" / "study.py"))


def test_the_table_is_what_the_evidence_gives(study):
    assert study["page"]() in (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")


def test_every_method_has_three_seeds_of_every_study(study):
    page = study["page"]().splitlines()[2:]
    assert len(page) == len(study["STUDIES"])
    assert sum(line.count("±") for line in page) >= len(page) * len(study["METHODS"])


def test_the_noise_of_drawn_prices_is_what_it_says(study):
    """A model of the prices' own terms, with a level and a slope for each region, has errors with a deviation of 20."""
    dataset = study["regions"]()
    raw = dataset.train.gather(torch.arange(len(dataset.train))).numpy().astype(float)
    region = np.eye(8)[dataset.sources.numpy()]
    terms = np.column_stack([raw, raw[:, 1] ** 2, raw[:, 2] * raw[:, 3], region, region * raw[:, [4]]])
    labels = dataset.train.labels.numpy()
    left = labels - terms @ np.linalg.lstsq(terms, labels, rcond=None)[0]
    assert left.std() == pytest.approx(20, rel=0.05)
