"""Reports of real runs, whole, stopped, damaged and written by a stranger."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
import yaml
from torch import nn

import fedcore
from fedcore import RunConfig, SplitModel
from fedcore_study.comparisons import formats
from fedcore_study.comparisons.compare import compare_runs
from fedcore_study.comparisons.records import find_runs
from tests.made_runs import seal
from tests.sentences import refused

from .chromium import Chromium, find
from .report_page import Page, values

TINY = {"clients": 4, "rounds": 2, "local_epochs": 1, "batch_size": 128, "workers": 0, "alpha": 1.0}
HOSTILE = "</script><script>alert('x')</script><img src=x onerror=alert(1)>$\\frac{&amp;%{y}[red]"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Two methods with two seeds each, and held-out samples; copy before changing anything."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        for name, plugins in (("fedavg", {}), ("fedprox", {"fedprox": {"mu": 20.0}})):
            options = {"seed": seed, "plugins": plugins, "out": folder / f"{name}-{seed}"}
            fedcore.run(RunConfig(**TINY, **options, client_test_fraction=0.2))
    return folder


@pytest.fixture
def copied(runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs, tmp_path / "runs"))


def report(cli, *arguments: object, out: str = "report.html") -> tuple[Page, str]:
    result = cli("report", *arguments, "--out", out, "--points", 60)
    assert result.exit_code == 0, result.output
    return Page(Path(out)), result.stderr


def test_everything_is_in_one_file(cli, runs: Path) -> None:
    page, _ = report(cli, *sorted(runs.iterdir()))
    assert list(page.figures) == [
        "Accuracy over rounds, global",
        "Differences by seed, global",
        "Accuracy over rounds, global_local",
        "Differences by seed, global_local",
        "Accuracy by client, global_local",
        "Who holds what, seed 0",
        "Who holds what, seed 1",
        "Accuracy by class",
        "Confusion matrix, global: fedavg",
        "Confusion matrix, global: fedprox",
        "Accuracy against bytes, global",
        "Communication per round",
        "Time per round",
        "Loss of the task",
        "Loss term proximal of fedprox",
        "Features of fedavg, seed 0",
        "Features of fedprox, seed 0",
    ]
    for figure in page.figures.values():
        (svg,) = [element for element in figure.children if getattr(element, "tag", "") == "svg"]
        assert svg.all(), "an empty figure"
        assert not [rect for rect in svg.all("rect") if rect.number("width") < 0.5]
    assert not page.root.all("link") + page.root.all("img") + page.root.all("iframe")
    assert not [element for element in page.root.all() if "src" in element.attributes]
    assert len(page.root.all("script")) == 1
    assert page.root.all("h1")[0].text().startswith("fedavg-0, fedavg-1, fedprox-0")
    setting = "digits, model mlp, partition dirichlet (alpha 1), 4 clients, 2 rounds of 1 local epoch, 2 seeds (0, 1)"
    assert page.root.all("p", "setting")[0].text() == setting
    assert page.text.index(setting) < page.text.index("minus fedavg") < page.text.index("Accuracy over rounds, global")
    few = "differences over 2 seeds say nothing about other seeds, and have no interval"
    assert few in page.text
    assert "(2 seeds)" in page.text

    folded = [element.all("summary")[0].text() for element in page.root.all("details")]
    names = sorted(run.name for run in runs.iterdir())
    assert folded[:3] == [
        "1 note on these runs",
        "All protocols in one table, all findings",
        "global_local: 2 figures",
    ]
    assert folded[3:7] == [
        "4 runs",
        "Settings that all runs share",
        "Machine and commit",
        "Versions of what the runs used",
    ]
    assert folded[7:] == ["Configuration of each run", *names]
    versions = yaml.safe_load((runs / "fedavg-0" / "config.yaml").read_text())["versions"]
    machine = json.loads((runs / "fedavg-0" / "sessions.jsonl").read_text().splitlines()[0])["machine"]
    shown = {element.all("summary")[0].text(): element.text() for element in page.root.all("details")}
    assert f"torch {versions['torch']}" in shown["Versions of what the runs used"]
    assert "fedcore-fedprox" in shown["Versions of what the runs used"]
    assert "fedcore-moon" not in shown["Versions of what the runs used"]
    assert f"{machine['cpu']} " in shown["Machine and commit"]
    assert "local_epochs: 1" in shown["fedavg-0"]


def test_the_table_is_that_of_compare(cli, runs: Path) -> None:
    """The main protocol alone comes first. Words stand at the left, the best mean of a column is bold."""
    page, _ = report(cli, *sorted(runs.iterdir()))
    assert page.table()[0] == ["", "global", ""]
    assert [row[:4] for row in page.table()[1:]] == [row[:4] for row in page.table(1)[1:]]
    groups, heads, *rows = page.table(1)
    assert groups == ["", "global", "global_local", ""]
    pair = ["accuracy %", "minus fedavg [95 % interval]"]
    assert heads == ["method", "seeds", *pair, *pair, "s/round"]
    assert [row[0] for row in rows] == ["fedavg", "fedprox"]
    found = find_runs(sorted(runs.iterdir()), lambda message: None)
    for protocol, place in (("global", 2), ("global_local", 4)):
        comparison = compare_runs(found, protocol=protocol)
        for cells, shown in zip(formats.printed([comparison])[0].rows, rows, strict=True):
            label, seeds, *numbers, seconds = cells
            assert [label, seeds, *numbers, seconds] == [*shown[:2], *shown[place : place + 2], shown[-1]]
    words = [cell.text() for cell in page.root.all("table")[1].all("", "word")]
    assert words == ["method", "fedavg", "fedprox"]
    bold = [cell.text() for cell in page.root.all("table")[1].all("b")]
    means = [[float(row[place].split(" ")[0]) for row in rows] for place in (2, 4)]
    assert bold == [
        row[place]
        for row in rows
        for place, column in zip((2, 4), means, strict=True)
        if float(row[place].split(" ")[0]) == max(column) > min(column)
    ]

    links = {a.attributes["download"]: unquote(a.attributes["href"] or "") for a in page.root.all("a")}
    comma = links["comparison.csv"].removeprefix("data:text/plain;charset=utf-8,")
    lines = [cli("compare", *sorted(runs.iterdir()), "--protocol", p, "--format", "csv").stdout for p in groups[1:3]]
    assert comma == lines[0] + lines[1].split("\n", 1)[1]
    assert links["comparison.tex"].count(r"\begin{table}") == 2
    assert r"\label{tab:comparison-global_local}" in links["comparison.tex"]

    clients = page.table(2)
    assert clients[0] == ["method", "clients' mean %", "std %", "worst 10 %", "best 10 %", "variance", "Jain"]
    assert page.root.all("table")[2].all("td")[0].text() == "fedavg"


def test_figures_are_the_runs_own_numbers(cli, runs: Path) -> None:
    page, _ = report(cli, *sorted(runs.iterdir()))
    drawn = page.figures
    lines = {
        run.name: [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in runs.iterdir()
    }
    curve = values(drawn["Accuracy over rounds, global"])["fedavg"]
    pairs = [[lines[f"fedavg-{s}"][r]["metrics"]["global"]["accuracy"] for s in (0, 1)] for r in (0, 1)]
    assert curve == pytest.approx({n: 100 * sum(pair) / 2 for n, pair in enumerate(pairs, start=1)}, rel=1e-3)

    # Each seed's difference, and their mean.
    ends = {
        run.name: json.loads((run / "summary.json").read_text())["metrics"]["global"]["accuracy"]
        for run in runs.iterdir()
    }
    apart = [100 * (ends[f"fedprox-{seed}"] - ends[f"fedavg-{seed}"]) for seed in (0, 1)]
    said = drawn["Differences by seed, global"].said()
    assert said[0] == f"fedprox\n{sum(apart) / 2:+.2f}"
    assert said[1:] == [f"fedprox, seed {seed}\n{apart[seed]:+.2f}" for seed in (0, 1)]

    last = [lines[f"fedavg-{s}"][-1]["metrics"]["global_local"] for s in (0, 1)]
    dots = [said for said in drawn["Accuracy by client, global_local"].said() if said.startswith("client")]
    assert dots[:8] == [
        f"client {client}, seed {seed}\n{100 * value:.1f}"
        for seed in (0, 1)
        for client, value in last[seed]["per_client"].items()
    ]
    assert len(dots) == 16
    # The recorded quantiles are those of the recorded clients.
    assert last[0]["quantiles"][3] == pytest.approx(_median(list(last[0]["per_client"].values())), abs=1e-6)
    assert (last[0]["quantiles"][0], last[0]["quantiles"][6]) == pytest.approx(
        (min(last[0]["per_client"].values()), max(last[0]["per_client"].values())), abs=1e-6
    )

    classes = [lines[f"fedavg-{s}"][-1]["metrics"]["global"]["per_class"] for s in (0, 1)]
    by_class = [50 * (a + b) for a, b in zip(*classes, strict=True)]
    assert drawn["Accuracy by class"].said()[:10] == [
        f"fedavg, class {number}\n{value:.1f} %" for number, value in enumerate(by_class)
    ]

    summaries = [json.loads((runs / f"fedavg-{s}" / "summary.json").read_text())["confusion"] for s in (0, 1)]
    first = [one + other for one, other in zip(summaries[0][0], summaries[1][0], strict=True)]
    matrix = [said for said in drawn["Confusion matrix, global: fedavg"].said() if said.startswith("class 0,")]
    assert matrix == [
        f"class 0, predicted {number}\n{100 * count / sum(first):.1f} %" for number, count in enumerate(first) if count
    ]

    traffic = [[lines[f"fedavg-{s}"][r]["bytes"] for r in (0, 1)] for s in (0, 1)]
    sent = [[bytes["down"] + bytes["up"] for bytes in rounds] for rounds in traffic]
    spent = [sum(s[0] for s in sent) / 2e6, sum(sum(s) for s in sent) / 2e6]
    assert drawn["Accuracy against bytes, global"].said()[:2] == [
        f"fedavg\n{curve[n]:.4g} at {mb:.4g} MB sent, down and up" for n, mb in enumerate(spent, start=1)
    ]

    cells = [said.split("\n") for said in drawn["Who holds what, seed 0"].said()]
    held = [sum(int(count.split()[0]) for where, count in cells if where.endswith(f"client {c}")) for c in range(4)]
    train = json.loads((runs / "fedavg-0" / "partition.json").read_text())["train"]
    assert held == [len(client) for client in train]

    points = drawn["Features of fedavg, seed 0"].all("path", "point")
    assert sum((path.attributes["d"] or "").count("M") for path in points) == 60
    up = lines["fedavg-0"][0]["bytes"]["up"] / 1e6
    assert f"fedavg up, model\n{up:.3g} MB per round" in drawn["Communication per round"].said()


def test_any_metric_stands_where_accuracy_does(cli, tmp_path: Path) -> None:
    """Curves, boxes, tables and differences are of AUROC, by the clients' names; its ROC curve is drawn."""
    options = {**TINY, "lr": 0.1, "client_test_fraction": 0.4, "metrics": ["auroc", "ece"], "alpha": 5.0}
    for name in ("fedavg", "ditto"):
        result = fedcore.run(RunConfig(**options, plugins=[name], out=tmp_path / name), progress=False)
        row = result.metrics["personal" if name == "ditto" else "global_local"]
        assert cli("compare", tmp_path / name, "--protocol", "global_local", "--metric", "auroc").exit_code == 0
    file = tmp_path / "ditto" / "sessions.jsonl"
    session = json.loads(file.read_text())
    file.write_text(json.dumps({**session, "clients": ["Basel", "Chur", "Genf", "Zug"]}) + "\n")
    seal(tmp_path / "ditto")
    page, _ = report(cli, tmp_path / "fedavg", tmp_path / "ditto", "--metric", "auroc")
    assert values(page.figures["AUROC over rounds, personal"])["ditto"][2] == pytest.approx(row["auroc"], rel=1e-3)
    said = page.figures["AUROC by client, personal"].said()
    assert f"Basel, seed 0\n{row['auroc_per_client']['0']:.3f}" in said
    assert page.table()[1][:4] == ["method", "seeds", "auroc", "auroc (clients)"]
    assert {"ditto\n1 at 1 false positive rate", "fedavg\n1 at 1 false positive rate"} <= {
        *page.figures["ROC curve, personal"].said()
    }
    assert "Reliability diagram, personal" in page.figures
    assert "Accuracy by class" in page.figures, "no run has an AUROC by class"
    clients = page.table(2)
    assert clients[0][1:4] == ["clients' auroc", "std", "worst 10 %"]
    assert f"{min(row['auroc_per_client'].values()):.4f}" in " ".join(clients[-1])
    each = page.table(3)
    assert each[0] == ["client", "fedavg", "ditto"]
    names = ["Basel", "Chur", "Genf", "Zug"]
    own = [f"{row['auroc_per_client'][str(k)]:.4f}" for k in range(4)]
    assert [(line[0], line[2]) for line in each[1:]] == list(zip(names, own, strict=True))
    chosen, _ = report(cli, tmp_path / "fedavg", tmp_path / "ditto", "--protocol", "global", out="chosen.html")
    assert chosen.table()[0] == ["", "global", ""]
    for flags, named in ((("--metric", "macro-f1"), "auroc, "), (("--protocol", "unseen"), "'unseen'")):
        refused(cli("report", tmp_path / "ditto", *flags, "--out", "no.html"), flags[0].strip("-"), named)


@pytest.mark.slow
def test_methods_without_a_global_model(cli, tmp_path: Path) -> None:
    """They stand in the same table, next to FedAvg's global model, and have the confusions of the clients' models."""
    for name in ("fedavg", "fedper"):
        config = RunConfig(**TINY, plugins=[name], out=tmp_path / name, client_test_fraction=0.2)
        fedcore.run(config)
    page, _ = report(cli, tmp_path / "fedavg", tmp_path / "fedper")
    assert page.table()[0] == ["", "personal", ""], "the protocol that all methods have"
    groups, heads, fedavg, fedper = page.table(1)
    assert groups == ["", "global", "global_local", "personal", "personal_global", ""]
    assert fedper[2:6] == ["-"] * 4
    on_clients = [place for place, head in enumerate(heads) if head == "accuracy %"][1]
    assert fedavg[on_clients] == fedavg[on_clients + 2] != "-"
    assert "fedavg has no own models: personal has the global model on the same samples (global_local)" in page.text
    assert len(heads) == len(fedavg) == len(fedper)
    assert "which this table does not measure" not in page.text
    titles = [title for title in page.figures if title.startswith("Confusion matrix")]
    own = [f"Confusion matrix, {protocol}: fedper" for protocol in ("personal", "personal_global")]
    assert titles == ["Confusion matrix, global: fedavg", own[1], own[0]], "those of other protocols are folded"
    summary = json.loads((tmp_path / "fedper" / "summary.json").read_text())
    row = summary["confusion_personal"][3]
    shown = [said for said in page.figures[own[0]].said() if said.startswith("class 3,")]
    assert shown == [f"class 3, predicted {n}\n{100 * count / sum(row):.1f} %" for n, count in enumerate(row) if count]
    assert "each client's own model on its held-out part, at the end; all clients and seeds together" in page.text


@pytest.mark.slow
def test_virtual_time(cli, copied: Path) -> None:
    for name in ("fedavg-0", "fedavg-1", "fedprox-0"):
        file = copied / name / "metrics.jsonl"
        lines = [
            json.loads(line) | {"virtual_time": 1.5 * n} for n, line in enumerate(file.read_text().splitlines(), 1)
        ]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        seal(copied / name)
    page, _ = report(cli, copied / "fedavg-0", copied / "fedavg-1", copied / "fedprox-0")
    said = page.figures["Accuracy against virtual time, global"].said()
    assert [text.split(" at ")[1] for text in said] == ["1.5 virtual seconds", "3 virtual seconds"] * 2


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def test_a_run_under_way_with_a_half_written_line(cli, copied: Path) -> None:
    """Its mean ends with the shortest run; what the other has beyond is a line of its own."""
    stopped = copied / "fedavg-1"
    (stopped / "summary.json").unlink()
    (stopped / "model.safetensors").unlink()
    text = (stopped / "metrics.jsonl").read_text()
    (stopped / "metrics.jsonl").write_text(text[: len(text) - 40])
    page, notes = report(cli, copied / "fedavg-0", stopped)
    assert "metrics.jsonl: line 2 is half written; read up to it" in notes
    assert "line 2 is half written" in page.text
    assert "1 of 2 rounds" in page.text
    curves = page.figures["Accuracy over rounds, global"]
    assert list(values(curves)["fedavg"]) == [1.0]
    assert [path.said() for path in curves.all("path", "tail")] == [["fedavg, one run"]]
    assert "Dotted are single runs" in page.text
    # Figures of the end are of the finished run alone.
    assert len(page.figures["Accuracy by client, global_local"].all("circle", "dot")) == 4


def test_what_is_not_recorded_is_named_with_its_reason(cli, tmp_path: Path) -> None:
    fedcore.run(RunConfig(**{**TINY, "rounds": 1}, out=tmp_path / "plain"))
    page, notes = report(cli, "plain")
    for title, reason in (("Accuracy by client", "--client-test-fraction 0.2 holds samples out on each client"),):
        assert title not in page.figures
        assert reason in page.text
        assert f"not drawn: {title}: " in notes

    begun = tmp_path / "begun"
    begun.mkdir()
    for name in ("config.yaml", "partition.json"):
        shutil.copy(tmp_path / "plain" / name, begun)
    page, _ = report(cli, "begun", out="begun.html")
    assert list(page.figures) == ["Who holds what, seed 0"]
    assert not page.root.all("p", "save")
    assert "1 of 1 runs are not finished: begun (no round yet)" in page.text
    assert "no run has been evaluated twice yet" in page.text
    assert "model.safetensors is written when a run is finished" in page.text


def test_other_data_sets_stand_apart(cli, copied: Path, tmp_path: Path) -> None:
    """The second one is not to be found: what needs its samples is left out, its curves are not."""
    other = copied / "fedprox-0"
    config = yaml.safe_load((other / "config.yaml").read_text())
    (other / "config.yaml").write_text(yaml.safe_dump({**config, "dataset": "npz:/nowhere/x.npz"}))
    seal(other)
    page, _ = report(cli, copied / "fedavg-0", other)
    figures = [(figure.all("h4")[0].text(), figure) for figure in page.root.all("figure")]
    curves = [set(values(figure)) for title, figure in figures if title == "Accuracy over rounds, global"]
    assert curves == [{"fedavg"}, {"fedprox"}]
    assert len([title for title, _ in figures if title.startswith("Who holds what")]) == 1
    assert [link.attributes["href"] for link in page.root.all("nav")[0].all("a")] == ["#group-1", "#group-2"]
    assert "digits or x.npz, model mlp, " in page.root.all("p", "setting")[0].text()
    downloads = [link.attributes["download"] for link in page.root.all("p", "save")[0].all("a")]
    assert downloads == ["comparison-1.csv", "comparison-1.tex"]
    assert "data set not found: " in page.text
    assert "--data-dir names the folder" in page.text


def test_a_model_that_does_not_fit(cli, copied: Path) -> None:
    shutil.copy(copied / "fedavg-0" / "partition.json", copied / "fedavg-0" / "model.safetensors")
    page, _ = report(cli, copied / "fedavg-0", copied / "fedprox-0")
    assert [title for title in page.figures if title.startswith("Features")] == ["Features of fedprox, seed 0"]
    assert "model.safetensors cannot be used: " in page.text


def one_feature(num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
    return SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 1)), 1, num_classes)


def test_a_model_of_one_feature_has_no_map_of_features(cli, tmp_path: Path) -> None:
    fedcore.run(RunConfig(**TINY, out=tmp_path / "run"), model=one_feature)
    page, _ = report(cli, tmp_path / "run", "--allow-code")
    assert "features of width 1 cannot be laid out in a plane" in page.text
    assert "Who holds what, seed 0" in page.figures


def test_hostile_names_are_text(cli, copied: Path, tmp_path: Path) -> None:
    """Of a plugin, a loss, a sender, a failure, a run's folder and the classes."""
    run = copied / HOSTILE.replace("/", "_")
    (copied / "fedavg-0").rename(run)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["plugins"] = {HOSTILE: {HOSTILE: HOSTILE}}
    config["versions"][HOSTILE] = HOSTILE
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["losses"] = {f"{HOSTILE}.x": 1.0, "task": HOSTILE, "nan": float("nan")}
        line["reports"] = {HOSTILE: {HOSTILE: 1.0, "x": HOSTILE}}
        line["bytes"]["by_plugin"][HOSTILE] = {"down": 5, "up": HOSTILE}
        line["metrics"]["global_local"]["per_client"] = {HOSTILE: 0.5, "1": HOSTILE}
        line["time"] = {HOSTILE: HOSTILE, "aggregation": HOSTILE}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "summary.json").unlink()
    seal(run)

    result = cli("report", run, "--out", "hostile.html", "--figures", "figures", "--points", 0)
    assert result.exit_code == 0, result.output
    page = Page(tmp_path / "hostile.html")
    assert len(page.root.all("script")) == 1
    assert not page.root.all("img")
    assert not [e for e in page.root.all() if any(name.startswith("on") for name in e.attributes)]
    assert HOSTILE in page.text.replace("_script>", "/script>")
    assert any(HOSTILE in said for figure in page.figures.values() for said in figure.said())
    assert len(list((tmp_path / "figures").iterdir())) >= len(page.figures)
    policy = next(m for m in page.root.all("meta") if m.attributes.get("http-equiv") == "Content-Security-Policy")
    assert (policy.attributes["content"] or "").startswith("default-src 'none'; script-src 'sha256-")

    if program := find():  # what an HTML parser of Python's takes as text, a browser does too
        with Chromium(program) as browser:
            browser.open(tmp_path / "hostile.html", width=800)
            assert browser.errors == []
            assert browser.ask("document.querySelectorAll('img, a[href^=http]').length") == 0


@pytest.mark.slow
@pytest.mark.parametrize("forms", [["png"], ["svg", "pdf"]])
def test_figures_as_files(cli, runs: Path, tmp_path: Path, forms: list[str]) -> None:
    asked = ("--figures", "figures", "--figure-format", ",".join(forms), "--points", 30)
    result = cli("report", runs / "fedavg-0", *asked)
    assert result.exit_code == 0, result.output
    files = sorted((tmp_path / "figures").iterdir())
    for form in forms:
        of_form = [file for file in files if file.suffix == f".{form}"]
        stems = {file.stem for file in of_form}
        assert {"learning-global", "clients", "classes", "partition-seed_0", "features-fedavg"} <= stems
        magic = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<svg"}[form]
        assert all(file.read_bytes().startswith(magic) for file in of_form)
        assert len(of_form) == len(files) / len(forms)
    assert f"written: {len(files)} {' and '.join(forms)} files in figures" in result.stdout
    assert cli("report", runs / "fedavg-0", "--figures", "figures", "--points", 0, "--force").exit_code == 0


def test_bad_input_is_one_message_and_exit_code_2(cli, runs: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine.html").write_text("my thesis")
    shutil.copytree(runs / "fedavg-0", tmp_path / "twin")
    for arguments, named in (
        (["empty"], ("empty", "config.yaml")),
        (["nowhere"], ("nowhere",)),
        ([runs / "fedavg-0", "--out", "mine.html"], ("mine.html", "--force")),
        ([runs / "fedavg-0", "--out", "empty"], ("empty/report.html",)),
        ([runs / "fedavg-0", "--figures", runs], (runs, "--force")),
        ([runs / "fedavg-0", "--figure-format", "pmg"], ("'pmg'", "'png'")),
        ([runs / "fedavg-0", "--by", "alhpa"], ("'alhpa'", "'alpha'")),
        ([runs / "fedavg-0", "twin"], (runs / "fedavg-0", "twin")),
    ):
        refused(cli("report", *arguments), *named)
    assert (tmp_path / "mine.html").read_text() == "my thesis"
    assert not (tmp_path / "report.html").exists()

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: None if name == "vl_convert" else found(name, *of)
    )
    result = cli("report", runs / "fedavg-0", "--figures", "files")
    assert result.exit_code == 2
    assert "pip install vl-convert-python" in result.stderr
    assert cli("report", runs / "fedavg-0", "--points", 0).exit_code == 0, "the page needs none"
    svg = ("--figures", "files", "--figure-format", "svg", "--out", "svg.html")
    assert cli("report", runs / "fedavg-0", "--points", 0, *svg).exit_code == 0, "neither does SVG"


def test_a_report_is_written_over_a_report_with_force(cli, runs: Path) -> None:
    report(cli, runs / "fedavg-0")
    assert "replace it with --force" in cli("report", runs / "fedprox-0", "--out", "report.html").stderr
    page, _ = report(cli, runs / "fedprox-0", "--force")
    assert "fedprox-0" in page.text


@pytest.mark.skipif(find() is None, reason="no chromium on the PATH (Debian: apt-get install chromium)")
def test_a_browser_draws_every_figure(cli, runs: Path, tmp_path: Path) -> None:
    page, _ = report(cli, *sorted(runs.iterdir()))
    program = find()
    assert program is not None
    seen = """[...document.querySelectorAll('figure > svg')].map(svg => {
        const box = svg.getBoundingClientRect(), texts = [...svg.querySelectorAll('text')];
        return {
            inside: box.left >= 0 && box.right <= innerWidth && box.width > 200,
            cut: texts.map(t => t.getBoundingClientRect()).filter(t => t.right > innerWidth || t.left < 0).length,
            ink: getComputedStyle(texts[0] || document.body).fill,
            size: 12 * box.width / 412,
        };
    })"""
    with Chromium(program) as browser:
        for width, scheme, paper in ((1280, "light", "rgb(255, 255, 255)"), (390, "dark", "rgb(18, 22, 28)")):
            browser.open(tmp_path / "report.html", width=width, scheme=scheme)
            assert browser.errors == []
            asked = {url for url in browser.requests if not url.startswith("data:")}
            assert asked == {(tmp_path / "report.html").as_uri()}
            figures = browser.ask(seen)
            assert len(figures) == len(page.figures) == 17
            assert all(f["inside"] and not f["cut"] and f["size"] >= 10 for f in figures), figures
            assert browser.ask("getComputedStyle(document.body).backgroundColor") == paper
            assert browser.ask("document.documentElement.scrollWidth <= innerWidth")
            for kind, said in (("hit", "round 1\nfedavg: "), ("interval", "fedprox\n")):
                shown = browser.ask(f"""(() => {{
                    const mark = document.querySelector('.{kind}'), box = mark.getBoundingClientRect();
                    const at = {{bubbles: true, clientX: box.left, clientY: 100}};
                    mark.dispatchEvent(new PointerEvent('pointermove', at));
                    const tip = document.getElementById('tip'), place = tip.getBoundingClientRect();
                    return [tip.hidden, tip.textContent, place.left >= 0 && place.right <= innerWidth];
                }})()""")
                assert (shown[0], shown[2]) == (False, True)
                assert shown[1].startswith(said)


class TestDataPlot:
    def test_terminal_and_file(self, cli, tmp_path: Path) -> None:
        result = cli(
            "data", "plot", "--clients", 5, "--alpha", 0.1, "--seed", 3, "--out", "picture.png", "--out", "p.svg"
        )
        assert result.exit_code == 0, result.output
        assert (tmp_path / "p.svg").read_text().startswith("<svg")
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
        rows = [
            re.split(r"\s+", line.strip()) for line in result.stdout.splitlines() if re.match(r"\s+\d [▁-█·]", line)
        ]
        assert [row[0] for row in rows] == [str(digit) for digit in range(10)]
        assert all(len(row) == 6 for row in rows)
        few = cli("data", "plot", "--clients", 120, "--alpha", 0.05, "--samples", 300)
        assert "▄ 1 to █ 4 training samples" in few.stdout  # blocks by the square root of the count

        cli("data", "split", "--clients", 5, "--alpha", 0.1, "--seed", 3, "--out", "p.json")
        train = json.loads((tmp_path / "p.json").read_text())["train"]
        labels = fedcore.data.load_dataset("digits").train.labels
        for client, positions in enumerate(train):
            held = set(labels[positions].tolist())
            assert {c for c in range(10) if rows[c][client + 1] != "·"} == held
        again = cli("data", "plot", "p.json")
        assert again.stdout == re.sub("written: .*\n", "", result.stdout)
        assert cli("data", "plot", "--out", "picture.png").exit_code == 2

    def test_a_run_brings_its_data_set(self, cli, tmp_path: Path) -> None:
        rows, labels = np.zeros((12, 2, 2), np.uint8), np.arange(12) % 3
        rows[:, 0, 0] = labels
        np.savez(tmp_path / "mine.npz", x_train=rows, y_train=labels, x_test=rows, y_test=labels)
        fedcore.run(RunConfig(**{**TINY, "clients": 2}, dataset="npz:mine.npz", out=tmp_path / "run"))
        for named in ("run", "run/partition.json"):
            result = cli("data", "plot", named)
            assert result.exit_code == 0, result.stderr
            assert result.stdout.startswith("npz:mine.npz by dirichlet, 2 clients")
        assert "whose labels differ" in cli("data", "plot", "run", "--dataset", "digits").stderr

        config = tmp_path / "run" / "config.yaml"
        config.write_text(config.read_text().replace("npz:mine.npz", "module:os.system"))
        assert "--allow-code" in cli("data", "plot", "run").stderr
        config.write_text("dataset: nothing of fedcore\n")  # another program's
        assert "whose labels differ" in cli("data", "plot", "run").stderr

    def test_clients_that_hold_their_own_data_are_not_drawn(self, cli, tmp_path: Path) -> None:
        fedcore.data.Partition.declared([5, 3], [0, 0], "digits").save(tmp_path / "partition.json")
        result = cli("data", "plot", "partition.json")
        assert (result.exit_code, "its clients hold their own data" in result.stderr) == (2, True), result.output

    def test_wide_federations_fit_the_terminal(self, cli, monkeypatch) -> None:
        monkeypatch.setenv("COLUMNS", "60")
        several = cli("data", "plot", "--clients", 100, "--partition", "iid")
        assert several.stdout.count("client 0") == 1
        assert len(re.findall(r"^client ", several.stdout, re.MULTILINE)) == 2
        assert all(len(line) <= 60 for line in several.stdout.splitlines())
        wide = cli("data", "plot", "--clients", 700, "--partition", "iid")
        assert "212 of 700 clients are shown, evenly spaced" in wide.stdout
        assert len(re.findall(r"^client ", wide.stdout, re.MULTILINE)) == 4

    def test_bad_input(self, cli, tmp_path: Path) -> None:
        (tmp_path / "x.json").write_text("{}")
        for arguments, named in (
            (["x.json"], "x.json"),
            (["x.json", "--partition", "iid"], "x.json or --partition iid"),
            (["--out", "x.gif"], ".png or .pdf or .svg"),
            (["--clients", 5000], 5000),
        ):
            refused(cli("data", "plot", *arguments), named)


def test_the_records_are_read_without_torch(python) -> None:
    modules = ("cli.report", "files", "page", "svg")
    names = ", ".join(f"fedcore_report.{module}" for module in modules)
    code = f"import sys, {names}\nassert 'torch' not in sys.modules"
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_figures_that_plugins_report_are_drawn(cli, copied: Path) -> None:
    """Numbers alone: not lists, and not what has fewer than two rounds."""
    run = copied / "fedavg-0"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        line["reports"] = {"tool": {"nc1": 2.0 - number, "rows": [1.0, 2.0], "deep": {"er": 3}}}
    lines[-1]["reports"]["tool"]["late"] = 1.0
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    seal(run)
    page, _ = report(cli, run)
    drawn = [title for title in page.figures if "reported by" in title]
    assert drawn == ["nc1, reported by tool", "deep.er, reported by tool"]


def test_the_table_shows_a_plugins_figure_once_where_it_is_asked_for(cli, copied: Path) -> None:
    for seed in (0, 1):
        run = copied / f"fedavg-{seed}"
        summary = json.loads((run / "summary.json").read_text())
        summary["reports"] = {"tool": {"success": 0.25 + seed / 2}}
        (run / "summary.json").write_text(json.dumps(summary) + "\n")
        seal(run)
    page, _ = report(cli, *sorted(copied.iterdir()), "--reported", "tool.success")
    groups, heads, *rows = page.table(1)
    assert groups == ["", "global", "global_local", ""]
    assert (heads[2], heads.count("tool.success")) == ("tool.success", 1)
    assert {row[0]: row[2] for row in rows} == {"fedavg": "0.5000 ± 0.3536", "fedprox": "-"}
    assert {len(row) for row in rows} == {len(heads)}
    plain, _ = report(cli, *sorted(copied.iterdir()), out="plain.html")
    assert [*heads[:2], *heads[3:]] == plain.table(1)[1]
    refused = cli("report", copied / "fedavg-0", "--reported", "tool.failure", "--out", "refused.html")
    assert (refused.exit_code, "no run has a number 'tool.failure' in its reports" in refused.stderr) == (2, True)


def test_methods_at_their_own_options_are_one_section_with_names(cli, copied: Path) -> None:
    for seed in (0, 1):
        file = copied / f"fedprox-{seed}" / "config.yaml"
        config = yaml.safe_load(file.read_text())
        file.write_text(yaml.safe_dump({**config, "lr": 0.0934727}, sort_keys=False))
        seal(copied / f"fedprox-{seed}")
    report(cli, *sorted(copied.iterdir()))
    assert "<h2>lr 0.0935" in re.sub(r" id=\S+?>", ">", Path("report.html").read_text())
    page, _ = report(cli, *sorted(copied.iterdir()), "--tuned", "lr", "--label", "fedprox=FedProx", out="tuned.html")
    assert [row[0] for row in page.table()[2:]] == ["fedavg", "FedProx"]
    assert "FedProx: lr 0.0935" in Path("tuned.html").read_text()


def test_losses_of_other_magnitudes_have_a_logarithmic_axis(cli, copied: Path, tmp_path: Path) -> None:
    run = copied / "fedavg-0"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    values = [0.01, 0.02, 0.05, 1e6]
    many = [{**lines[0], "round": r, "losses": {"task": v}} for r, v in enumerate(values)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in many))
    seal(run)
    page, _ = report(cli, run)
    assert {"0.01", "100", "1e+06"} <= {text.text() for text in page.figures["Loss of the task"].all("text", "tick")}


def test_the_help_names_the_extra(cli) -> None:
    """In brackets rich would take it for markup and leave it out."""
    assert "extra `report` of fedcore" in " ".join(cli("report", "--help").stdout.split())
