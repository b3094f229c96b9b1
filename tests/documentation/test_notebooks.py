"""The notebook of docs/notebooks.md: its cells are those of the page, and they run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import documented

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "own_method.ipynb"
PAGE = ROOT / "docs" / "notebooks.md"


def test_the_cells_are_those_of_the_page():
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    blocks = documented.blocks(PAGE.read_text(encoding="utf-8"), "python")
    assert ["".join(cell["source"]) for cell in cells] == [block.rstrip("\n") for block in blocks]
    assert [cell["outputs"] for cell in cells] == [[]] * len(cells)


def test_the_notebook_runs(tmp_path):
    """With two worker processes, which define its classes again; the run is shown, and read back alike."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: make setup installs it")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    *_, run, history, predicted, again = [cell for cell in notebook.cells if cell.cell_type == "code"]
    progress, result = run.outputs
    assert "4/4 rounds, done" in progress.data["text/html"]
    assert result.data["text/plain"].startswith("<RunResult NearFeatures on arrays, 4 rounds, accuracy: global ")
    assert "<polyline" in result.data["text/html"]
    accuracies = [float(number) for number in re.findall(r"[\d.]+", history.outputs[0].data["text/plain"])]
    assert len(accuracies) == 4
    assert accuracies[-1] > 0.6
    predictions = predicted.outputs[0].text
    assert float(predictions.split()[-1]) == pytest.approx(accuracies[-1], abs=1e-3)
    assert again.outputs[-1].data["text/plain"] == result.data["text/plain"]
    (folder,) = (tmp_path / "runs").iterdir()
    assert "workers: 2" in (folder / "config.yaml").read_text()
