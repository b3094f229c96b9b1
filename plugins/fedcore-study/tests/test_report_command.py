"""Reports of real runs, whole, stopped, damaged and written by a stranger."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

import fedcore
from fedcore import RunConfig
from fedcore_study.reports import optional_dependencies

from .chromium import Chromium, find
from .sealing import seal

TINY = {"clients": 4, "rounds": 2, "local_epochs": 1, "batch_size": 128, "workers": 0, "alpha": 1.0}
HOSTILE = "</script><script>alert('x')</script><img src=x onerror=alert(1)>$\\frac{&amp;%{y}[red]"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Two methods with two seeds each, and held-out samples; copy before changing anything."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        for name, plugins in (("fedavg", {}), ("fedprox", {"fedprox": {"mu": 0.1}})):
            options = {"seed": seed, "plugins": plugins, "out": folder / f"{name}-{seed}"}
            fedcore.run(RunConfig(**TINY, **options, client_test_fraction=0.2))
    return folder


@pytest.fixture
def copied(runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs, tmp_path / "runs"))


class Page(HTMLParser):
    """A report as a reader without scripts has it."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.plots: list[dict] = []
        self.scripts: list[str] = []
        self._inside: tuple[str, dict[str, str | None]] = ("", {})
        self.source = file.read_text(encoding="utf-8")
        self.feed(self.source)
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag, attrs):
        self._inside = (tag, dict(attrs))
        self.tags.append(self._inside)

    def handle_endtag(self, tag):
        self._inside = ("", {})

    def handle_data(self, data):
        tag, attributes = self._inside
        if tag == "script" and "data-plot" in attributes:
            self.plots.append(json.loads(data))
        elif tag == "script":
            self.scripts.append(data)
        elif tag != "style":
            self.texts.append(data)

    def titles(self) -> list[str]:
        return [a["aria-label"] for _, a in self.tags if a.get("class") == "plot"]

    def plot(self, title: str) -> dict:
        return self.plots[self.titles().index(title)]


def report(cli, *arguments: object, out: str = "report.html") -> tuple[Page, str]:
    result = cli("report", *arguments, "--out", out, "--points", 60)
    assert result.exit_code == 0, result.output
    return Page(Path(out)), result.stderr


def test_everything_is_in_one_file(cli, runs: Path) -> None:
    page, _ = report(cli, *sorted(runs.iterdir()))
    assert page.titles() == [
        "Accuracy over rounds, global",
        "Accuracy over rounds, global_local",
        "Accuracy against bytes, global",
        "Accuracy by client, global_local",
        "Accuracy by class",
        "Confusion matrix, global",
        "Loss of the task",
        "Loss term proximal of fedprox",
        "Communication per round",
        "Time per round",
        "Who holds what",
        "Features of fedavg, seed 0",
        "Features of fedprox, seed 0",
    ]
    assert len(page.plots) == 13
    assert not [a for tag, a in page.tags if tag in ("link", "img", "iframe") or "src" in a]
    assert page.source.count("plotly.js v") == 1
    versions = yaml.safe_load((runs / "fedavg-0" / "config.yaml").read_text())["versions"]
    few = "differences over 2 seeds say nothing about other seeds, and have no interval"
    for expected in (
        f"torch: {versions['torch']}",
        "local_epochs: 1",
        "Settings that all runs share",
        few,
        "global: Too few seeds to rank fedprox against fedavg: fedprox (",
        "Over the clients, global_local",
        "(2 seeds)",
    ):
        assert expected in page.text


def test_figures_are_the_runs_own_numbers(cli, runs: Path) -> None:
    page, _ = report(cli, *sorted(runs.iterdir()))
    lines = {
        run.name: [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in runs.iterdir()
    }
    curve = next(t for t in page.plot("Accuracy over rounds, global")["data"] if t.get("mode") == "lines+markers")
    pairs = [[lines[f"fedavg-{s}"][r]["metrics"]["global"]["accuracy"] for s in (0, 1)] for r in (0, 1)]
    assert (curve["name"], curve["x"]) == ("fedavg", [1.0, 2.0])
    assert curve["y"] == pytest.approx([100 * sum(pair) / 2 for pair in pairs])

    box = page.plot("Accuracy by client, global_local")["data"][0]
    last = [lines[f"fedavg-{s}"][-1]["metrics"]["global_local"] for s in (0, 1)]
    assert box["y"] == pytest.approx([100 * v for found in last for v in found["per_client"].values()])
    assert box["text"][4] == "client 0, seed 1"
    assert len(box["y"]) == sum(found["clients"] for found in last) == 8
    # The recorded quantiles are those of the recorded clients.
    assert last[0]["quantiles"][3] == pytest.approx(_median(list(last[0]["per_client"].values())), abs=1e-6)
    assert (last[0]["quantiles"][0], last[0]["quantiles"][6]) == pytest.approx(
        (min(last[0]["per_client"].values()), max(last[0]["per_client"].values())), abs=1e-6
    )

    grid = page.plot("Accuracy by class")["data"][0]["z"]
    classes = [lines[f"fedavg-{s}"][-1]["metrics"]["global"]["per_class"] for s in (0, 1)]
    assert grid[0] == pytest.approx([50 * (a + b) for a, b in zip(*classes, strict=True)])

    summaries = [json.loads((runs / f"fedavg-{s}" / "summary.json").read_text())["confusion"] for s in (0, 1)]
    first = [one + other for one, other in zip(summaries[0][0], summaries[1][0], strict=True)]
    matrix = page.plot("Confusion matrix, global")
    assert matrix["data"][0]["text"][0] == [f"{100 * n / sum(first):.0f}" if n else "" for n in first]
    assert [button["label"] for button in matrix["layout"]["updatemenus"][0]["buttons"]] == ["fedavg", "fedprox"]

    traffic = [[lines[f"fedavg-{s}"][r]["bytes"] for r in (0, 1)] for s in (0, 1)]
    sent = [[bytes["down"] + bytes["up"] for bytes in rounds] for rounds in traffic]
    against = next(t for t in page.plot("Accuracy against bytes, global")["data"] if "markers" in t.get("mode", ""))
    assert against["x"] == pytest.approx([sum(s[0] for s in sent) / 2e6, sum(sum(s) for s in sent) / 2e6])
    assert against["y"] == curve["y"]

    picture = page.plot("Who holds what")
    assert len(picture["data"]) == 2  # a layer per seed: two partitions
    held = [[int(text or 0) for text in row] for row in picture["data"][0]["text"]]
    train = json.loads((runs / "fedavg-0" / "partition.json").read_text())["train"]
    assert [sum(column) for column in zip(*held, strict=True)] == [len(client) for client in train]

    points = page.plot("Features of fedavg, seed 0")["data"]
    assert sum(len(trace["x"]) for trace in points) == 60
    up = page.plot("Communication per round")["data"][0]["x"][1]
    assert up == pytest.approx(lines["fedavg-0"][0]["bytes"]["up"] / 1e6)


def test_methods_without_a_global_model_have_the_confusions_of_the_clients_models(cli, tmp_path: Path) -> None:
    for name in ("fedavg", "fedper"):
        config = RunConfig(**TINY, plugins=[name], out=tmp_path / name, client_test_fraction=0.2)
        fedcore.run(config)
    page, _ = report(cli, tmp_path / "fedavg", tmp_path / "fedper")
    titles = [title for title in page.titles() if title.startswith("Confusion matrix")]
    assert titles == [f"Confusion matrix, {protocol}" for protocol in ("global", "personal", "personal_global")]
    summary = json.loads((tmp_path / "fedper" / "summary.json").read_text())
    row = summary["confusion_personal"][3]
    shown = page.plot("Confusion matrix, personal")["data"][0]["text"][3]
    assert shown == [f"{100 * count / sum(row):.0f}" if count else "" for count in row]
    assert "each client's own model on its held-out part, at the end; all clients and seeds together" in page.text


def test_virtual_time_and_damaged_matrices(cli, copied: Path) -> None:
    for name in ("fedavg-0", "fedavg-1", "fedprox-0"):
        file = copied / name / "metrics.jsonl"
        lines = [
            json.loads(line) | {"virtual_time": 1.5 * n} for n, line in enumerate(file.read_text().splitlines(), 1)
        ]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, matrix in (("fedavg-0", [[1, 2]]), ("fedavg-1", [[1.5]]), ("fedprox-0", "x")):
        file = copied / name / "summary.json"
        summary = json.loads(file.read_text()) | {"confusion": matrix}
        file.write_text(json.dumps(summary))
    for name in ("fedavg-0", "fedavg-1", "fedprox-0"):
        seal(copied / name)
    page, _ = report(cli, copied / "fedavg-0", copied / "fedavg-1", copied / "fedprox-0")
    traces = page.plot("Accuracy against virtual time, global")["data"]
    assert [trace["x"] for trace in traces if "markers" in trace.get("mode", "")] == [[1.5, 3.0], [1.5, 3.0]]
    assert not [title for title in page.titles() if title.startswith("Confusion matrix")]
    assert "a finished run records it" in page.text


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
    traces = page.plot("Accuracy over rounds, global")["data"]
    assert [trace["x"] for trace in traces] == [[1.0], [1.0, 2.0]]
    assert "Dotted are single runs" in page.text
    # Figures of the end are of the finished run alone.
    assert len(page.plot("Accuracy by client, global_local")["data"][0]["y"]) == 4


def test_what_is_not_recorded_is_named_with_its_reason(cli, tmp_path: Path) -> None:
    fedcore.run(RunConfig(**{**TINY, "rounds": 1}, out=tmp_path / "plain"))
    page, notes = report(cli, "plain")
    for title, reason in (("Accuracy by client", "--client-test-fraction 0.2 holds samples out on each client"),):
        assert title not in page.titles()
        assert reason in page.text
        assert f"not drawn: {title}: " in notes

    begun = tmp_path / "begun"
    begun.mkdir()
    for name in ("config.yaml", "partition.json"):
        shutil.copy(tmp_path / "plain" / name, begun)
    page, _ = report(cli, "begun", out="begun.html")
    assert page.titles() == ["Who holds what"]
    assert "no round yet" in page.text
    assert "no run has been evaluated yet" in page.text
    assert "model.safetensors is written when a run is finished" in page.text


def test_other_data_sets_stand_apart(cli, copied: Path, tmp_path: Path) -> None:
    """The second one is not to be found: what needs its samples is left out, its curves are not."""
    other = copied / "fedprox-0"
    config = yaml.safe_load((other / "config.yaml").read_text())
    (other / "config.yaml").write_text(yaml.safe_dump({**config, "dataset": "npz:/nowhere/x.npz"}))
    seal(other)
    page, _ = report(cli, copied / "fedavg-0", other)
    assert page.titles().count("Accuracy over rounds, global") == 2
    assert page.titles().count("Who holds what") == 1
    over = "Accuracy over rounds, global"
    curves = [plot["data"] for plot, title in zip(page.plots, page.titles(), strict=True) if title == over]
    assert [{trace["name"] for trace in data} for data in curves] == [{"fedavg"}, {"fedprox"}]
    assert "data set not found: " in page.text
    assert "--data-dir names the folder" in page.text


def test_a_model_that_does_not_fit(cli, copied: Path) -> None:
    shutil.copy(copied / "fedavg-0" / "partition.json", copied / "fedavg-0" / "model.safetensors")
    page, _ = report(cli, copied / "fedavg-0", copied / "fedprox-0")
    assert [title for title in page.titles() if title.startswith("Features")] == ["Features of fedprox, seed 0"]
    assert "model.safetensors cannot be used: " in page.text


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
        line["bytes"]["by_plugin"][HOSTILE] = {"down": 5, "up": HOSTILE}
        line["metrics"]["global_local"]["per_client"] = {HOSTILE: 0.5, "1": HOSTILE}
        line["time"] = {HOSTILE: HOSTILE, "aggregation": HOSTILE}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "summary.json").unlink()
    seal(run)

    result = cli("report", run, "--out", "hostile.html", "--figures", "figures", "--points", 0)
    assert result.exit_code == 0, result.output
    page = Page(tmp_path / "hostile.html")
    assert [tag for tag, _ in page.tags].count("script") == len(page.plots) + 3  # themes, plotly and the page's own
    assert not [a for tag, a in page.tags if tag == "img" or any(name.startswith("on") for name in a)]
    assert HOSTILE in page.text.replace("_script>", "/script>")
    drawn = json.dumps(page.plots)
    assert "<img" not in drawn
    assert "&lt;img" in drawn
    assert len(list((tmp_path / "figures").iterdir())) >= len(page.plots)
    policy = next(a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")

    if program := find():  # what an HTML parser of Python's takes as text, a browser does too
        with Chromium(program) as browser:
            browser.open(tmp_path / "hostile.html", width=800)
            assert browser.errors == []
            assert browser.ask("document.querySelectorAll('img, a[href^=http]').length") == 0


@pytest.mark.parametrize("form", ["png", "pdf"])
def test_figures_as_files(cli, runs: Path, tmp_path: Path, form: str) -> None:
    result = cli("report", runs / "fedavg-0", "--figures", "figures", "--figure-format", form, "--points", 30)
    assert result.exit_code == 0, result.output
    files = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert {"learning-global", "clients", "classes", "partition", "features-fedavg"} <= {Path(f).stem for f in files}
    magic = b"\x89PNG" if form == "png" else b"%PDF"
    assert all((tmp_path / "figures" / name).read_bytes().startswith(magic) for name in files)
    assert f"written: {len(files)} {form} files in figures" in result.stdout
    assert cli("report", runs / "fedavg-0", "--figures", "figures", "--points", 0, "--force").exit_code == 0


def test_bad_input_is_one_message_and_exit_code_2(cli, runs: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine.html").write_text("my thesis")
    shutil.copytree(runs / "fedavg-0", tmp_path / "twin")
    for arguments, says in (
        (["empty"], "is neither a run nor a sweep: it has no config.yaml"),
        (["nowhere"], "does not exist"),
        (
            [runs / "fedavg-0", "--out", "mine.html"],
            "mine.html exists already; choose another name, or replace it with --force",
        ),
        ([runs / "fedavg-0", "--out", "empty"], "empty is a folder; name a file such as empty/report.html"),
        ([runs / "fedavg-0", "--figures", runs], "is not empty; choose another folder, or write into it with --force"),
        ([runs / "fedavg-0", "--figure-format", "pmg"], "Did you mean 'png'?"),
        ([runs / "fedavg-0", "--by", "alhpa"], "Did you mean 'alpha'?"),
        ([runs / "fedavg-0", "twin"], "are runs of the same settings and seed"),
    ):
        result = cli("report", *arguments)
        assert (result.exit_code, says in result.stderr) == (2, True), result.output
    assert (tmp_path / "mine.html").read_text() == "my thesis"
    assert not (tmp_path / "report.html").exists()

    monkeypatch.setattr(
        optional_dependencies.importlib.util, "find_spec", lambda name: None if name == "plotly" else object()
    )
    result = cli("report", runs / "fedavg-0")
    assert result.exit_code == 2
    assert "needs plotly" in result.stderr
    assert "pip install plotly" in result.stderr


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
    seen = """[...document.querySelectorAll('.plot')].map(place => ({
        traces: (place._fullData || []).length,
        svg: place.querySelectorAll('.main-svg').length,
        inside: place.getBoundingClientRect().right <= innerWidth && place.clientWidth > 200,
        ink: place._fullLayout.font.color,
    }))"""
    with Chromium(program) as browser:
        for width, scheme, ink in ((1280, "light", "#1d2530"), (390, "dark", "#dce3ea")):
            browser.open(tmp_path / "report.html", width=width, scheme=scheme)
            assert browser.errors == []
            asked = {url for url in browser.requests if not url.startswith("data:")}
            assert asked == {(tmp_path / "report.html").as_uri()}
            figures = browser.ask(seen)
            assert len(figures) == len(page.plots) == 14
            assert all(f["traces"] and f["svg"] and f["inside"] and f["ink"] == ink for f in figures), figures
            assert browser.ask("document.documentElement.scrollWidth <= innerWidth")
        browser.prefer("light")  # while the page is open
        assert browser.ask("new Promise(done => setTimeout(() => done(true), 300))")
        assert {figure["ink"] for figure in browser.ask(seen)} == {"#1d2530"}
        assert browser.errors == []


class TestDataPlot:
    def test_terminal_and_file(self, cli, tmp_path: Path) -> None:
        result = cli("data", "plot", "--clients", 5, "--alpha", 0.1, "--seed", 3, "--out", "picture.png")
        assert result.exit_code == 0, result.output
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
        rows = [
            re.split(r"\s+", line.strip()) for line in result.stdout.splitlines() if re.match(r"\s+\d [▁-█·]", line)
        ]
        assert [row[0] for row in rows] == [str(digit) for digit in range(10)]
        assert all(len(row) == 6 for row in rows)

        cli("data", "split", "--clients", 5, "--alpha", 0.1, "--seed", 3, "--out", "p.json")
        train = json.loads((tmp_path / "p.json").read_text())["train"]
        labels = fedcore.data.load_dataset("digits").train.labels
        for client, positions in enumerate(train):
            held = set(labels[positions].tolist())
            assert {c for c in range(10) if rows[c][client + 1] != "·"} == held
        again = cli("data", "plot", "p.json")
        assert again.stdout == result.stdout.replace("written: picture.png\n", "")
        assert cli("data", "plot", "--out", "picture.png").exit_code == 2

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
        for arguments, says in (
            (["x.json"], "is not a partition file"),
            (["x.json", "--partition", "iid"], "name either x.json or --partition iid"),
            (["--out", "x.gif"], "must end with .png or .pdf"),
            (["--clients", 5000], "5000"),
        ):
            result = cli("data", "plot", *arguments)
            assert (result.exit_code, says in result.stderr) == (2, True), result.output


def test_the_records_are_read_without_torch(python) -> None:
    modules = ("cli.report", "reports.charts", "reports.gather", "reports.build", "reports.static")
    names = ", ".join(f"fedcore_study.{module}" for module in modules)
    code = f"import sys, {names}\nassert 'torch' not in sys.modules and 'plotly' not in sys.modules"
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_losses_of_other_magnitudes_have_a_logarithmic_axis(cli, copied: Path, tmp_path: Path) -> None:
    """In the page, and with labels in numbers in the files: names may hold dollar signs, so no text is TeX there."""
    run = copied / "fedavg-0"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    values = [0.01, 0.02, 0.05, 1e6]
    many = [{**lines[0], "round": r, "losses": {"task": v}} for r, v in enumerate(values)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in many))
    seal(run)
    page, _ = report(cli, run)
    assert page.plot("Loss of the task")["layout"]["yaxis"]["type"] == "log"
    assert "type" not in page.plot("Accuracy over rounds, global")["layout"]["yaxis"]

    from matplotlib.figure import Figure

    from fedcore_study.reports import charts, static

    line = charts.Line("fedavg", 0, [1.0, 2.0, 3.0, 4.0], values, [], 1)
    figure = Figure()
    axes = figure.add_subplot()
    static.draw(charts.Curves(name="x", title="x", x_title="x", y_title="y", lines=[line], log=True), axes)
    figure.draw_without_rendering()
    labels = {label.get_text() for label in axes.get_yticklabels()}
    assert {"0.01", "100", "1e+06"} <= labels
