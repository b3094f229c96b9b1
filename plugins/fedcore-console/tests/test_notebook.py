"""The progress of a run in a notebook."""

from dataclasses import replace
from xml.etree import ElementTree as Xml

from rich.console import Console

import fedcore
from fedcore import RunConfig
from fedcore_console import notebook

CONFIG = RunConfig(plugins=["fedprox"], clients=3, rounds=3, eval_every=2, local_epochs=1, samples=200, workers=0)


def test_a_notebook_shows_every_round(tmp_path):
    drawn = []
    now = iter(range(1000))
    display = notebook.NotebookDisplay(drawn.append, clock=lambda: float(next(now)))
    fedcore.run(CONFIG, notify=display, out=tmp_path / "run")
    assert "fedprox on digits" in drawn[0]
    assert any("round 2: 2/3 clients" in page for page in drawn)
    assert not any("left" in page and "1/3 rounds" in page for page in drawn)  # the workers have started in it, too
    assert any("left" in page and "2/3 rounds" in page for page in drawn)
    assert "3/3 rounds, done" in drawn[-1]
    assert any("<svg" in page for page in drawn)
    assert "<svg" not in drawn[-1]  # the result shows the curve below


def test_a_notebook_does_not_count_clients_that_the_simulated_system_lost(tmp_path):
    drawn = []
    display = notebook.NotebookDisplay(drawn.append)
    result = fedcore.run(CONFIG, notify=display, system={"dropout": 0.7}, min_clients=0, out=tmp_path / "run")
    assert any(record["failures"] for record in result.records)
    assert "clients failed" not in drawn[-1]


def test_a_script_has_no_notebook():
    assert notebook.notebook_output() is None
    assert notebook.show(Console()) is None


def test_the_page_of_a_result_has_the_table_and_the_curve(tmp_path, monkeypatch):
    result = fedcore.run(CONFIG, client_test_fraction=0.25, progress=False, out=tmp_path / "run")
    page = Xml.fromstring(f"<div>{result._repr_html_()}</div>")  # noqa: S314 - our own text
    rows = [[cell.text for cell in row] for row in page.iter("tr")]
    assert [row[0] for row in rows] == ["protocol", "global", "global_local"]
    assert rows[1][2] == f"{100 * result.metrics['global']['accuracy']:.2f}"
    lines = [mark.attrib["d"] for mark in page.iter() if "line" in mark.get("class", "").split()]
    assert [len(line.split("L")) for line in lines] == [2, 2]
    rounds = sum(sum(record["time"][part] for part in ("round", "evaluation")) for record in result.records)
    resumed = replace(result, summary={**result.summary, "seconds": rounds + 99})  # of the process that finished it
    assert f"3 rounds, {rounds:.1f} s<" in notebook.result_page(resumed)
    monkeypatch.setattr(notebook.registry, "available", lambda kind: {})  # fedcore-report is not installed
    page = notebook.result_page(result)
    assert ("<table>" in page, "<svg" in page) == (True, False)
