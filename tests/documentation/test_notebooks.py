"""The notebooks in examples/ run; the cells of one are those of docs/notebooks.md."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import documented

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "examples" / "notebooks"
PAGE = ROOT / "docs" / "notebooks.md"


def cells_of(notebook):
    """Return the texts of a notebook's cells with code."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def executed(name, folder):
    """Run a notebook in a folder and return what its cells with code show, without the first, which shows nothing."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: make setup installs it")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    install, *shown = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert install == []
    return shown


def test_every_notebook_begins_alike_and_without_outputs():
    first = {cells_of(notebook)[0] for notebook in NOTEBOOKS.glob("*.ipynb")}
    assert len(first) == 1
    assert "%pip install" in first.pop()
    for notebook in NOTEBOOKS.glob("*.ipynb"):
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        assert not any(cell.get("outputs") for cell in cells), notebook.name
        assert f"({'../examples/notebooks/' + notebook.name})" in PAGE.read_text(encoding="utf-8")


def test_the_cells_of_an_own_method_are_those_of_the_page():
    blocks = documented.blocks(PAGE.read_text(encoding="utf-8"), "python")
    assert cells_of(NOTEBOOKS / "own_method.ipynb")[1:] == [block.rstrip("\n") for block in blocks]


@pytest.mark.slow
def test_an_own_method(tmp_path):
    """With two worker processes, which define its classes again; the run is shown, and read back alike."""
    *_, run, history, predicted, again = executed("own_method", tmp_path)
    progress, result = run
    assert "4/4 rounds, done" in progress.data["text/html"]
    assert result.data["text/plain"].startswith("<RunResult NearFeatures on arrays, 4 rounds, accuracy: global ")
    assert "<svg" in result.data["text/html"]
    accuracies = [float(number) for number in re.findall(r"[\d.]+", history[0].data["text/plain"])]
    assert len(accuracies) == 4
    assert accuracies[-1] > 0.6
    assert float(predicted[0].text.split()[-1]) == pytest.approx(accuracies[-1], abs=1e-3)
    assert again[-1].data["text/plain"] == result.data["text/plain"]
    (folder,) = (tmp_path / "runs").iterdir()
    assert "workers: 2" in (folder / "config.yaml").read_text()


@pytest.mark.slow
def test_a_first_run(tmp_path):
    fedavg, moon, _, history, predicted, longer = executed("first_run", tmp_path)
    assert [outputs[1].data["text/plain"].split(", ")[1] for outputs in (fedavg, moon, longer)] == [
        "5 rounds",
        "5 rounds",
        "8 rounds",
    ]
    assert "loss.moon.contrast" in history[0].data["text/plain"]
    classes, labels = predicted[0].text.strip()[1:-1].split("] [")
    assert sum(map(str.__eq__, classes.split(), labels.split())) >= 7


@pytest.mark.slow
def test_own_data(tmp_path):
    *_, run, predicted, network, again = executed("own_data", tmp_path)
    assert "global_local" in run[1].data["text/html"]
    assert "'per_class'" in predicted[1].data["text/plain"]
    assert "(head): Linear" in network[0].data["text/plain"]
    assert again[0].data["text/plain"] == "True"


@pytest.mark.slow
def test_a_comparison(tmp_path):
    _, _, compared, _, reported, extended = executed("comparison", tmp_path)
    assert "corrected by Holm" in compared[0].text
    assert {"fedavg", "fedprox", "Near"} <= set(compared[1].data["text/plain"].split())
    assert "report.html" in reported[-1].data["text/plain"]
    assert (tmp_path / "report.html").stat().st_size > 50_000
    assert extended[-1].data["text/plain"].split()[2::2][:3] == ["4", "4", "4"]
