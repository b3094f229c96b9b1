"""The figures of the page, by hand and of a whole sweep: places, labels, lines that coincide, and what is left out."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from PIL import Image

import fedcore
from fedcore import RunConfig
from fedcore_report import axes, svg
from fedcore_report.axes import Scale, apart, scale_of
from fedcore_report.breakdowns import _outcomes, _parts, by_client, by_domain
from fedcore_report.build import _setting_of
from fedcore_report.charts import (
    Bars,
    Box,
    Boxes,
    Curves,
    Heatmap,
    Line,
    Part,
    legible,
)
from fedcore_report.files import save
from fedcore_study.tools import Group
from tests.made_runs import make as make
from tests.made_runs import seal

from .report_page import Element, Page, drawing, values


def drawn(chart, tmp_path: Path) -> Element:
    """Return a chart as a browser would parse it."""
    file = tmp_path / "chart.html"
    file.write_text(svg.draw(chart), encoding="utf-8")
    return Page(file).root


def curves(*lines: list[float], names: list[str] | None = None) -> Curves:
    names = names or [f"m{n}" for n in range(len(lines))]
    made = [Line(names[n], n, [float(x) for x in range(1, len(y) + 1)], y, [], 1) for n, y in enumerate(lines)]
    return Curves(name="c", title="c", x_title="round", y_title="accuracy %", lines=made)


class TestCurves:
    @pytest.mark.parametrize(
        ("lines", "covers"),
        [
            ([[10.0, 50.0, 90.0], [10.0, 50.0, 90.0]], [0, 1]),
            ([[10.0, 50.0, 90.0], [10.5, 50.5, 90.5]], [0, 1]),  # nearer than one can see
            ([[10.0, 50.0, 90.0], [20.0, 60.0, 80.0]], [0, 0]),
            ([[10.0, 50.0, 90.0], [20.0, 60.0, 90.0]], [0, 0]),  # they meet at the end
            ([[10.0, 50.0], [90.0, 10.0], [10.0, 50.0], [10.0, 50.0]], [0, 0, 1, 2]),
            ([[5.0, 5.0], [5.0, 5.0]], [0, 1]),
            ([[], [5.0]], [0, 0]),
        ],
    )
    def test_what_lies_on_others_is_found(self, lines, covers):
        assert curves(*lines).covers == covers

    def test_the_upper_line_has_gaps_and_rings_and_a_sentence_names_both(self, tmp_path):
        chart = curves([10.0, 50.0, 90.0], [10.0, 50.0, 90.0], [20.0, 20.0, 20.0])
        below, above, apart = (path.attributes["class"] for path in drawn(chart, tmp_path).all("path", "line"))
        assert (below, above, apart) == ("c0 line d0", "c1 line d1 over", "c2 line d0")
        assert {ring.attributes["class"] for ring in drawn(chart, tmp_path).all("circle", "ring")} == {"c1 ring"}
        assert chart.coinciding == "m0 and m1 coincide: the later ones are drawn with gaps."

    def test_lines_that_part_do_not_coincide_but_the_upper_one_has_gaps(self):
        chart = curves([10.0, 30.0, 50.0, 70.0], [10.0, 30.0, 50.0, 62.0])
        assert (chart.covers, chart.coinciding) == ([0, 1], "")

    def test_names_stand_at_the_ends_and_do_not_overlap(self, tmp_path):
        figure = drawn(curves(*([float(x), 50.0 + n / 100] for n, x in enumerate(range(8)))), tmp_path)
        labels = figure.all("text", "label")
        assert [label.text() for label in labels] == [f"m{n}" for n in range(8)]
        heights = [label.number("y") for label in labels]
        assert heights == sorted(heights, reverse=True), "in the order of the values"
        assert all(a - b >= 14 for a, b in pairwise(heights))
        assert not figure.all("g", "legend")

    @pytest.mark.parametrize("names", [["short", "fedprox (fedprox.mu=0.001)"], [f"m{n}" for n in range(13)]])
    def test_names_that_do_not_fit_are_a_legend_in_full(self, names, tmp_path):
        figure = drawn(curves(*([n + 0.5, float(n)] for n in range(len(names))), names=names), tmp_path)
        assert [entry.text() for entry in figure.all("g", "legend")] == names
        assert not figure.all("text", "label")
        lines = [line.attributes["class"] for line in figure.all("path", "line")]
        swatches = lines[len(names) :]
        assert swatches == lines[: len(names)]
        assert len(set(swatches)) == len(names)

    def test_the_last_third_has_axes_of_its_own(self, tmp_path):
        chart = curves([float(x) for x in range(30)], [x / 2 for x in range(30)])
        end = chart.last_third()
        assert end is not None
        assert end.lines[0].x == [float(x) for x in range(20, 31)]
        ticks = [float(text.text()) for text in drawn(end, tmp_path).all("text", "tick")]
        assert min(ticks) == 10
        assert curves([1.0, 2.0, 3.0]).last_third() is None, "too few points"
        assert replace(chart, rounds=False).last_third() is None

    def test_many_rounds_have_their_values_at_some(self, tmp_path):
        figure = drawn(curves([float(x) for x in range(1000)]), tmp_path)
        assert len(values(figure)["m0"]) == 59
        strips = [strip.all("rect")[0] for strip in figure.all("g", "strip")]
        for one, other in pairwise(strips):
            assert one.number("x") + one.number("width") == pytest.approx(other.number("x"), abs=0.11)


class TestFiles:
    """What is in a file is what the page shows, with colours of its own."""

    def test_an_svg_is_a_document_with_the_marks_of_the_page(self, tmp_path):
        chart = curves([10.0, 50.0, 90.0], [10.0, 50.0, 90.0], names=["<a> & 'b'", "c"])
        file = ElementTree.fromstring(svg.standalone(chart))  # noqa: S314 - our own
        assert {element.tag.partition("}")[0] for element in file.iter()} == {"{http://www.w3.org/2000/svg"}
        marks = [element.get("d") for element in file.iter() if element.tag.endswith("path")]
        assert marks == [mark.attributes["d"] for mark in drawn(chart, tmp_path).all("path")]
        assert "".join(file.itertext()).count("<a> & 'b'") == 4, "a label, and the values of three rounds"

    def test_no_colour_is_left_to_a_page(self):
        text = svg.standalone(curves([1.0, 2.0]))
        assert "var(" not in text
        light, dark = text.split("@media (prefers-color-scheme: dark)")
        assert ".fedcore-chart .paper { fill: #fff; }" in light
        assert ".fedcore-chart .paper { fill: #12161c; }" in dark

    def test_rules_hold_for_figures_alone(self):
        rules = [line for line in axes.style(axes.LIGHT).splitlines() if line]
        selectors = [part for rule in rules for part in rule.partition(" {")[0].split(", ")]
        assert all(selector.startswith(".fedcore-chart ") for selector in selectors)

    def test_a_png_has_the_colours_of_the_lines(self, tmp_path):
        save(curves([10.0, 20.0], [90.0, 80.0], names=["a", "b"]), tmp_path / "chart.png")
        with Image.open(tmp_path / "chart.png") as image:
            assert image.width == 1200
            colors = {color for _, color in image.convert("RGBA").getcolors(100_000)}
        assert {(255, 255, 255, 255), (0x3B, 0x82, 0xC4, 255), (0xE0, 0x7B, 0x22, 255)} <= colors
        assert (0, 0, 0, 255) not in colors, "all that has no style is black"


class TestPlaces:
    @pytest.mark.parametrize(
        ("wanted", "placed"),
        [
            ([50.0, 100.0], [50.0, 100.0]),
            ([50.0, 52.0], [50.0, 64.0]),
            ([52.0, 50.0], [64.0, 50.0]),
            ([200.0, 200.0, 200.0], [172.0, 186.0, 200.0]),
            ([0.0, 0.0], [10.0, 24.0]),
        ],
    )
    def test_apart(self, wanted, placed):
        assert apart(wanted, 10, 200) == placed

    @pytest.mark.parametrize(
        ("low", "high", "whole", "ticks"),
        [
            (0.0, 100.0, False, [0, 20, 40, 60, 80, 100]),
            (94.2, 96.9, False, [95, 96]),
            (1.0, 3.0, True, [1, 2, 3]),
            (-0.7, 4.7, False, [0, 2, 4]),
        ],
    )
    def test_round_numbers(self, low, high, whole, ticks):
        assert Scale(low, high, 0, 100, whole=whole).ticks() == pytest.approx(ticks)

    def test_constant_values_and_powers_of_ten(self):
        assert scale_of([5.0, 5.0], 0, 100)(5.0) == pytest.approx(50)
        assert Scale(0.01, 100.0, 0, 100, log=True).ticks() == pytest.approx([0.01, 0.1, 1, 10, 100])
        assert Scale(0.01, 100.0, 0, 100, log=True)(1.0) == pytest.approx(50)


class TestIntervals:
    def test_places_by_hand(self, make, cli, tmp_path):
        """Differences of 1, 2 and 3 points: mean 2, deviation 1, t(0.975, 2) = 4.302653 from the tables.

        The interval is 2 ± 4.302653 / sqrt(3) = 2 ± 2.4841. With a twentieth of its length free at each end, 380 pixels
        from 8 on are 5.4651 points from -0.7326 on.
        """
        folders = [make([], seed, [0.5, 0.5]) for seed in (0, 1, 2)]
        folders += [make(["moon"], seed, [0.5, 0.51 + seed / 100]) for seed in (0, 1, 2)]
        result = cli("report", *folders, "--points", 0)
        assert result.exit_code == 0, result.output
        figure = Page(tmp_path / "report.html").figures["Differences by seed, global"]
        (mark,) = figure.all("g", "interval")
        assert mark.said() == ["moon\n+2.00 [-0.48, +4.48]"]
        reach = 4.302653 / math.sqrt(3)
        pixels = 380 / (2.2 * reach)
        assert mark.all("circle")[0].number("cx") == 198
        low, _, high, *_ = drawing(mark.all("path", "line")[0].attributes["d"])
        assert (low, high) == pytest.approx((198 - reach * pixels, 198 + reach * pixels), abs=0.06)
        rings = figure.all("circle", "ring")
        assert [ring.said() for ring in rings] == [[f"moon, seed {n}\n+{n + 1}.00"] for n in range(3)]
        assert [ring.number("cx") for ring in rings] == pytest.approx(
            [198 + (n - 1) * pixels for n in range(3)], abs=0.06
        )
        zero, _, bottom = drawing(figure.all("path", "zero")[0].attributes["d"])
        assert zero == pytest.approx(198 - 2 * pixels, abs=0.06)
        assert bottom == 44

    def test_one_seed_has_no_interval(self, make, cli, tmp_path):
        assert cli("report", make([], 0, [0.5, 0.5]), make(["moon"], 0, [0.5, 0.6]), "--points", 0).exit_code == 0
        page = Page(tmp_path / "report.html")
        figure = page.figures["Differences by seed, global"]
        assert figure.said() == ["moon\n+10.00", "moon, seed 0\n+10.00"]
        assert not figure.all("path", "line")
        assert "These seeds give no interval." in figure.text()
        assert page.table()[1:] == [
            ["method", "seeds", "accuracy %", "minus fedavg [95 % interval]", "s/round"],
            ["fedavg", "1", "50.00", "-", "1.500"],
            ["moon", "1", "60.00", "+10.00 (1 seed)", "1.500"],
        ]
        assert "1 seed (0)" in page.root.all("p", "setting")[0].text()

    def test_other_clients_are_no_pair(self, make, cli, tmp_path):
        folders = [make([], seed, [0.5, 0.5], dealt=f"a{seed}") for seed in (0, 1)]
        folders += [make(["moon"], seed, [0.5, 0.6], dealt=f"a{seed}") for seed in (1, 2)]
        assert cli("report", *folders, "--points", 0).exit_code == 0
        said = Page(tmp_path / "report.html").figures["Differences by seed, global"].said()
        assert said == ["moon\n+10.00", "moon, seed 1\n+10.00"]

    def test_another_baseline(self, make, cli, tmp_path):
        folders = make(["fedprox"], 0, [0.5, 0.5]), make(["moon"], 0, [0.5, 0.6])
        result = cli("report", *folders, "--points", 0)
        assert "not drawn: Differences by seed, global: no single row of fedavg" in " ".join(result.stderr.split())
        assert cli("report", *folders, "--points", 0, "--baseline", "moon", "--force").exit_code == 0
        page = Page(tmp_path / "report.html")
        assert page.figures["Differences by seed, global"].said()[0] == "fedprox\n-10.00"
        assert "minus moon [95 % interval]" in page.table()[1]
        result = cli("report", *folders, "--points", 0, "--baseline", "mooon", "--out", "other.html")
        assert (result.exit_code, "Did you mean 'moon'?" in result.stderr) == (2, True)


class TestOtherFigures:
    def test_parts_too_narrow_to_be_seen_are_one_or_none(self):
        assert _parts([{"model": 10.0, "a": 0.001}]) == [Part("model", [10.0])]
        narrow = {f"n{number}": 0.04 for number in range(3)}
        assert _parts([{"local_training": 10.0, **narrow}, {"local_training": 8.0}]) == [
            Part("local training", [10.0, 8.0]),
            Part("other", [pytest.approx(0.12), 0.0]),
        ]
        assert _parts([{}]) == []

    def test_long_names_are_cut_in_the_middle(self):
        """Names of one method with several options differ at their ends."""
        assert [legible(name, 18) for name in ("fedprox (fedprox.mu=0.01)", "short")] == ["fedprox ….mu=0.01)", "short"]

    def test_bars_add_up(self, tmp_path):
        chart = Bars(
            name="b",
            title="b",
            x_title="s",
            bars=["a", "b"],
            parts=[Part("p", [1.0, 1.0]), Part("q", [1.0, 0.001])],
            totals=[2.009, 1.001],
        )
        said = [text.text() for text in drawn(chart, tmp_path).all("text", "value")]
        assert said == ["2.01", "1"], "the number beside a bar is its whole, as in the table"
        *boxes, p, q = drawn(chart, tmp_path).all("rect", "bar")  # none where a part is too narrow
        assert [(box.number("x"), box.number("width")) for box in boxes] == [(8, 190), (198, 190), (8, 190)]
        assert [swatch.number("width") for swatch in (p, q)] == [10, 10]
        assert [entry.text() for entry in drawn(chart, tmp_path).all("g", "legend")] == ["p", "q"]

    def test_quartiles(self, tmp_path):
        box = Box("m", 0, [1.0, 2.0, 3.0, 10.0], ["a", "b", "c", "d"])
        assert box.five == (1.0, 1.75, 2.5, 4.75, 10.0)
        assert Box("m", 0, [], [], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).five == (0.0, 2.0, 3.0, 4.0, 6.0)
        figure = drawn(Boxes(name="b", title="b", x_title="accuracy %", boxes=[box]), tmp_path)
        assert figure.said() == [
            "m\nlowest 1.0, middle half 1.8 to 4.8, highest 10.0",
            "a\n1.0",
            "b\n2.0",
            "c\n3.0",
            "d\n10.0",
        ]

    def test_a_grid_of_very_many_cells_is_a_path_per_shade(self, tmp_path):
        names = [str(n) for n in range(100)]
        grid = [[100.0 * (row == column) for column in range(100)] for row in range(100)]
        chart = Heatmap(
            name="h", title="h", x_title="x", y_title="y", columns=names, rows=names, grid=grid, unit="%", root=True
        )
        (cells,) = drawn(chart, tmp_path).all("path", "cell")
        assert (cells.attributes["d"] or "").count("M") == 100
        small = replace(chart, columns=["a"], rows=["b"], grid=[[40.0]])
        assert drawn(small, tmp_path).all("path", "cell")[0].said() == ["y b, x a\n40.0 %"]


def test_a_client_whose_answer_failed_has_taken_part():
    """A failed answer to a plugin's question is no failed training."""
    answer = {"client": 0, "kind": "raised", "message": "no statistics", "question": "statistics"}
    failures = [answer, {"client": 2, "kind": "dropped", "message": ""}]
    line = {"cohort": [0, 1, 2], "system": {"took_part": [0, 1], "partial": {"1": 1}}, "failures": failures}
    fared = _outcomes(SimpleNamespace(rounds=[line]))
    assert {outcome: number for outcome, number in fared.items() if number} == {
        "all epochs": 1,
        "fewer epochs": 1,
        "dropped": 1,
    }


@pytest.mark.parametrize(("figure", "name"), [("worst10", "Accuracy"), ("auroc_mean", "AUROC")])
def test_a_client_and_a_domain_have_the_figure_itself(figure, name):
    """``--metric worst10`` and ``auroc_mean`` are of all clients together; each one has an accuracy, or an AUROC."""
    row = {"accuracy": 0.6, "per_client": {"0": 0.5, "1": 0.7}, "domains": {"a": 0.6}}
    row |= {"auroc": 0.6, "auroc_per_client": {"0": 0.5, "1": 0.7}, "auroc_domains": {"a": 0.6}}
    run = SimpleNamespace(figure=figure, signs={}, summary={"rounds": 1}, figures=lambda *_: row, client=str)
    run.config = SimpleNamespace(seed=0)
    group = Group({}, {"fedavg": [run]})
    titles = [chart.title for chart in (by_client(group, {"fedavg": 0}, "global_local"), *by_domain(group))]
    assert titles == [f"{name} by client, global_local", f"{name} by domain"]


def test_the_rounds_of_a_picture_are_those_of_its_runs():
    """Runs with ``--patience`` end after different numbers of rounds: the largest one stood for all of them."""
    row = {"accuracy": 0.6, "per_client": {"0": 0.5, "1": 0.7}}
    runs = [
        SimpleNamespace(figure="accuracy", signs={}, summary={"rounds": n}, figures=lambda *_: row, client=str)
        for n in (4, 9, 5)
    ]
    for seed, run in enumerate(runs):
        run.config = SimpleNamespace(seed=seed)
    assert ", after 4 to 9 rounds. " in by_client(Group({}, {"fedavg": runs}), {"fedavg": 0}, "global_local").about
    assert ", after 4 rounds. " in by_client(Group({}, {"fedavg": runs[:1]}), {"fedavg": 0}, "global_local").about


def test_the_setting_names_all_models_and_who_never_trains():
    config = RunConfig(model="mlp", client_models=["mlp", "simple-cnn"], clients=10, unseen_clients=0.2, local_epochs=1)
    models, _, clients, _ = _setting_of(config)[1:]
    assert (models, clients) == ("model mlp and simple-cnn", "10 clients, 2 of them never trained")


def test_a_run_without_evaluations(make, cli, tmp_path):
    """It is under way, and was not evaluated yet: there is no table and no line, and the page says so."""
    folder = make([], 0, [None, None, None], finished=False, rounds=9)
    result = cli("report", folder, "--points", 0)
    assert result.exit_code == 0, result.output
    page = Page(tmp_path / "report.html")
    assert list(page.figures) == ["Communication per round", "Time per round"]
    assert not page.root.all("p", "save")
    assert "1 of 1 runs are not finished: run0 (3 of 9 rounds)" in page.text
    assert "Accuracy over rounds no run has been evaluated twice yet" in page.text


def test_long_names_and_many_methods(make, cli, tmp_path):
    """They differ in an option alone, which makes their names long; none of them is cut."""
    mus = [0.001 * 3**n for n in range(13)]
    folders = [make({"fedprox": {"mu": mu}}, seed, [0.2, 0.3 + mu / 1000]) for mu in mus for seed in (0, 1)]
    assert cli("report", *folders, make([], 0, [0.2, 0.3]), "--points", 0).exit_code == 0
    page = Page(tmp_path / "report.html")
    labels = [row[0] for row in page.table()[2:]]
    assert len(set(labels)) == 14
    figure = page.figures["Accuracy over rounds, global"]
    assert [entry.text() for entry in figure.all("g", "legend")] == labels
    assert "coincide" in figure.all("strong")[0].text()
    rows = page.figures["Differences by seed, global"]
    assert [text.text() for text in rows.all("text") if text.text().startswith("fedprox")] == labels[:-1]


def test_ranks_over_data_settings(make, cli, tmp_path):
    folders = [
        make(plugins, 0, [accuracy], alpha=alpha)
        for alpha in (0.1, 0.5, 1.0)
        for plugins, accuracy in (([], 0.5), (["moon"], 0.6), (["fedprox"], 0.55))
    ]
    assert cli("report", *folders, "--out", "r.html", "--points", 0).exit_code == 0
    page = Page(tmp_path / "r.html")
    assert page.root.all("nav")[0].all("a")[0].attributes["href"] == "#ranks"
    ranks = page.root.all("section")[0]
    assert [cell.text() for cell in ranks.all("th")] == [
        "method",
        "average rank",
        "alpha 0.1",
        "alpha 0.5",
        "alpha 1.0",
    ]
    cells = [[cell.text() for cell in row.all("td")] for row in ranks.all("tr")[1:]]
    assert cells == [["moon", "1.00", *"111"], ["fedprox", "2.00", *"222"], ["fedavg", "3.00", *"333"]]
    assert "1 is the best. Friedman's test finds a difference (p = 0.050)." in ranks.text()
    drawn_ranks = page.figures["Average ranks, global"]
    assert drawn_ranks.said()[0] == "moon\n1.00 [0.04, 1.96]", "bars of moon and fedavg do not overlap"
    assert not drawn_ranks.all("path", "zero")
    assert cli("report", *folders[:6], "--out", "two.html", "--points", 0).exit_code == 0
    assert "Ranks over 2 data settings" in Page(tmp_path / "two.html").text
    assert cli("report", *folders[:3], "--out", "one.html", "--points", 0).exit_code == 0
    assert "Ranks over" not in Page(tmp_path / "one.html").text


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Path:
    """Three methods over three seeds and thirty rounds; fedprox without its term is fedavg."""
    folder = tmp_path_factory.mktemp("sweep")
    size = {"clients": 3, "rounds": 30, "local_epochs": 1, "batch_size": 128, "workers": 0, "client_test_fraction": 0.2}
    size["samples"] = 400  # fast
    for seed in (0, 1, 2):
        for name, plugins in (("fedavg", {}), ("fedprox", {"fedprox": {"mu": 0.0}}), ("moon", {"moon": {}})):
            options = {"seed": seed, "plugins": plugins, "out": folder / f"{name}-{seed}"}
            fedcore.run(RunConfig(**size, **options, projection=True))
    return folder


@pytest.mark.slow
def test_a_sweep(sweep: Path, cli, tmp_path) -> None:
    result = cli("report", *sorted(sweep.iterdir()))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "report.html").stat().st_size < 1_500_000
    page = Page(tmp_path / "report.html")
    over = page.figures["Accuracy over rounds, global"]
    assert "fedavg and fedprox have the same line." in over.text()
    assert next(iter(values(over))) == "fedavg = fedprox"
    assert len(values(over)["moon"]) == 30
    end = page.figures["Accuracy over rounds, global: last third"]
    assert list(values(end)["moon"]) == [float(n) for n in range(20, 31)]
    assert values(end)["moon"] == {n: value for n, value in values(over)["moon"].items() if n >= 20}
    differences = page.figures["Differences by seed, global"]
    assert differences.said()[0] == "fedprox\n+0.00 [+0.00, +0.00]"
    assert len(differences.all("circle", "ring")) == 6
    assert "silhouette is" in page.figures["Features of moon, seed 0"].text()

    short = tmp_path / "short"
    shutil.copytree(sweep / "moon-0", short)
    lines = (short / "metrics.jsonl").read_text().splitlines()
    unevaluated = [json.dumps({**json.loads(line), "metrics": None}) for line in lines[:-1]]
    (short / "metrics.jsonl").write_text("\n".join([*unevaluated, lines[-1], ""]))
    seal(short)
    assert cli("report", short, "--out", "short.html", "--points", 0).exit_code == 0
    page = Page(tmp_path / "short.html")
    assert not [title for title in page.figures if title.startswith("Accuracy over")], "a single point is no line"
    assert len(page.table()[2:]) == 1
