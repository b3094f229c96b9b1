"""examples/nine_sites.py: every number of its table is scikit-learn's for the predictions, and the table fits."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.calibration import calibration_curve
from sklearn.metrics import roc_auc_score

from tests.documentation.test_examples import EXAMPLES

TEXT_WIDTH = 345.0
"""The width of a line of article at 10 pt, in pt."""


@pytest.fixture(scope="module")
def example():
    pytest.importorskip("datasets")
    pytest.importorskip("matplotlib")
    sys.path.insert(0, str(EXAMPLES))
    try:
        import nine_sites

        yield nine_sites
    finally:
        sys.path.remove(str(EXAMPLES))


def stand_in(path: Path, rows: int = 900) -> Path:
    """Write a file of flchain's form: risk by age and free light chains, sites of other sizes, empty creatinine."""
    rng = np.random.default_rng(0)
    heads = [
        "age",
        "sex",
        "sample.yr",
        "kappa",
        "lambda",
        "flc.grp",
        "creatinine",
        "mgus",
        "futime",
        "death",
        "chapter",
    ]
    years = rng.choice(range(1995, 2004), rows, p=np.array([9, 7, 6, 5, 4, 4, 3, 3, 3]) / 44)
    age, chains = rng.uniform(50, 95, rows), rng.gamma(4, 0.4, (rows, 2))
    risk = 1 / (1 + np.exp(-(age - 78) / 6 - chains.sum(axis=1) + 3.2))
    lines = ["@relation flchain", *(f"@attribute {head} numeric" for head in heads), "@data"]
    for k in range(rows):
        creatinine = "?" if rng.random() < 0.2 else f"{rng.gamma(8, 0.14):.1f}"
        died = "dead" if rng.random() < risk[k] else "alive"
        cells = [f"{age[k]:.0f}", rng.choice(["F", "M"]), years[k], *(f"{c:.3g}" for c in chains[k]), "1", creatinine]
        lines.append(",".join(map(str, [*cells, rng.choice(["no", "yes"], p=[0.98, 0.02]), "100", died, "?"])))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def section(example, tmp_path_factory):
    """The result section of one seed at two rates, of two methods and the pooled baseline."""
    folder = tmp_path_factory.mktemp("nine-sites")
    source = os.environ.get("FEDCORE_TEST_FLCHAIN") or stand_in(folder / "flchain.arff")
    options = {"rates": [0.03, 0.1], "seeds": 1, "rounds": 3, "eval_every": 3, "parallel": 1}
    figures = example.main(Path(source), folder, methods=["fedavg", "ditto", "centralised"], **options)
    return folder, figures


@pytest.mark.slow
def test_every_number_is_that_of_scikit_learn_for_the_predictions(section):
    folder, figures = section
    found, known = np.load(folder / "predictions.npz"), 0
    sites = sorted(figures["site"].unique())
    assert len(sites) == 9
    for row in figures.itertuples():
        key = f"{row.method}/{row.seed}/{sites.index(row.site)}"
        labels, shares = found[f"{key}/labels"], found[f"{key}/shares"].astype(float)
        if len(set(labels)) == 2:
            known += 1
            assert row.auroc == pytest.approx(roc_auc_score(labels, shares), abs=1e-9)
            ties = 2.01 * 0.5 / (labels.sum() * (1 - labels).sum())  # two pairs of samples
            assert row.recorded_auroc == pytest.approx(row.auroc, abs=max(0.02, ties)), "1,000 bins make ties"
        else:
            assert np.isnan(row.auroc)
            assert np.isnan(row.recorded_auroc)
        sure, right = np.maximum(shares, 1 - shares), (shares > 0.5) == labels
        accuracy, confidence = calibration_curve(right, sure, n_bins=15)
        counts = np.histogram(sure, np.linspace(0, 1, 16))[0]
        ece = (counts[counts > 0] * np.abs(accuracy - confidence)).sum() / len(labels)
        assert row.ece == pytest.approx(ece, abs=2e-6)
    assert known >= 20


@pytest.mark.slow
def test_the_table_says_these_numbers(section):
    folder, figures = section
    text = (folder / "table.tex").read_text()
    rows = [line.removesuffix(r" \\").split(" & ") for line in text.splitlines() if line.startswith(("Year", "Mean"))]
    assert len(rows) == 20
    for name, block in (("auroc", rows[:10]), ("ece", rows[10:])):
        for site, *cells in block:
            chosen = figures if site == "Mean" else figures[figures["site"] == site]
            for method, cell in zip(["fedavg", "ditto", "centralised"], cells, strict=True):
                value = 100 * chosen[chosen["method"] == method][name].mean()
                assert cell == "--" if np.isnan(value) else cell.startswith(f"${value:.1f}_")
    for name in ("auroc.pdf", "calibration.pdf"):
        assert (folder / name).read_bytes().startswith(b"%PDF")


def test_the_table_of_all_methods_fits_a_line_of_text(example):
    """In Computer Modern at 8 pt (footnotesize), with 2.5 pt on both sides of each column.

    The font of 8 pt is 6.3 % wider than that of 10 pt, which is here, and that of 6 pt, for deviations, 22.2 %.
    """
    import pandas as pd
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    sites = [f"Year {year}" for year in range(1995, 2004)]
    rows = [
        {"method": method, "seed": seed, "site": site, "lr": 0.03, "auroc": 0.888, "ece": 0.288 + seed / 10}
        for method in example.NAMES
        for seed in range(3)
        for site in sites
    ]
    text = example.latex(pd.DataFrame(rows), sites)

    def width(cell: str) -> float:
        plain, _, small = cell.strip("$").replace("}", "").partition("_{")
        parts = ((plain, 8.0 * 1.063), (small, 6.0 * 1.222))
        font = FontProperties(fname=_computer_modern())
        return sum(TextPath((0, 0), part, size=size, prop=font).get_extents().width for part, size in parts if part)

    body = [line.removesuffix(r" \\").split(" & ") for line in text.splitlines() if " & " in line]
    widest = [max(map(width, column)) for column in zip(*body, strict=True)]
    assert sum(widest) + 2 * 2.5 * len(widest) < TEXT_WIDTH
    assert re.search(r"\\toprule.*\\midrule.*\\bottomrule", text, re.DOTALL)


def _computer_modern() -> str:
    import matplotlib as mpl

    return str(Path(mpl.get_data_path(), "fonts", "ttf", "cmr10.ttf"))
