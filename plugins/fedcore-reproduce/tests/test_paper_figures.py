"""Recipes of a paper's figures: from a small recipe to its claims, its evidence, its page and its pictures."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from scipy import stats

from fedcore import ConfigError, UnknownNameError
from fedcore.tools import digest, settings
from fedcore_reproduce import claims
from fedcore_reproduce.evidence import Evidence, Place, write_evidence
from fedcore_reproduce.find import find_recipe, find_recipes
from fedcore_reproduce.formats import PAPERS
from fedcore_reproduce.recipe import SCALES, Recipe, read_recipe
from fedcore_study.sweeps.run import resolved
from tests.sentences import raises, refused

RECIPE = {
    "method": "fedprox",
    "figure": 7,
    "title": "two panels",
    "source": "Somebody, 2026",
    "base": {"clients": 2, "rounds": 50, "batch_size": 256, "workers": 0},
    "axis": "local epochs",
    "columns": [
        {"name": "a 1", "x": 1, "panel": "a", "options": {"local_epochs": 1}},
        {"name": "a 2", "x": 2, "panel": "a", "options": {"local_epochs": 2}},
        {"name": "b 1", "x": 1, "panel": "b", "options": {"alpha": 5, "local_epochs": 1}},
    ],
    "rows": [
        {"name": "FedAvg", "plugins": "fedavg"},
        {"name": "FedProx", "plugins": {"fedprox": {"mu": 0.1}}},
    ],
    "claims": [
        {"says": "FedProx is above FedAvg.", "better": "FedProx", "worse": ["FedAvg"], "among": ["a 1", "a 2"]},
        {"says": "One epoch is best.", "better": "a 1", "worse": ["a 2"]},
    ],
    "quick": {"says": "1 round in place of 50.", "options": {"rounds": 1}, "seeds": 3},
}
TABLE = {
    "method": "fedprox",
    "table": 7,
    "title": "a table of the same number",
    "source": "Somebody, 2026",
    "columns": [{"name": "a"}],
    "rows": [{"name": "FedAvg", "plugins": "fedavg", "paper": [50]}],
    "quick": {"says": "Nothing is left out."},
}


def written(folder: Path, values: dict, **changes) -> Path:
    kept = {name: value for name, value in {**values, **changes}.items() if value is not None}
    kind = "figure" if kept.get("figure") else "table"
    file = folder / f"{kind}_7.yaml"
    file.write_text(yaml.safe_dump(kept, sort_keys=False), encoding="utf-8")
    return file


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    from fedcore_reproduce import find

    files = [written(tmp_path, RECIPE), written(tmp_path, TABLE)]
    monkeypatch.setattr(find, "recipe_files", lambda: files)
    return read_recipe(files[0])


def test_a_table_and_a_figure_of_one_number_are_two_recipes(recipe: Recipe) -> None:
    broken: list[str] = []
    assert [found.label for found in find_recipes(broken.append)] == ["Table 7", "Figure 7"]
    assert not broken
    assert find_recipe(print, "fedprox", "7").title == "a table of the same number"
    assert find_recipe(print, "fedprox", "7", "figure") == recipe
    with raises(UnknownNameError, "fedprox", "'8'", "Known: 7."):
        find_recipe(print, "fedprox", "8", "figure")


def test_the_command_runs_a_figure_and_prints_its_claims(cli, recipe: Recipe, tmp_path: Path) -> None:
    command = ("reproduce", "fedprox", "--figure", 7, "--column", "a 1", "--column", "a 2", "--seeds", 1)
    result = cli(*command, "--format", "json")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "reproduce" / "fedprox-figure-7-quick" / "sweep.json").is_file()
    content = json.loads(result.stdout)
    assert content["figure"] == 7
    cells = {(cell["row"], cell["column"]): cell["ours"]["ours"]["mean"] for cell in content["cells"]}
    gain = (cells["FedProx", "a 1"] + cells["FedProx", "a 2"] - cells["FedAvg", "a 1"] - cells["FedAvg", "a 2"]) / 2
    first, second = content["claims"]
    assert first == (
        f"Claim: FedProx is above FedAvg. Here: FedProx minus the others, not told apart: FedAvg {gain:+.2f}."
    )
    assert second.startswith("Claim: One epoch is best. Here: a 1 minus the others, not told apart: a 2 ")
    text = cli(*command, "--quiet").stdout
    assert "Figure 7 of Somebody, 2026: two panels" in text
    assert "FedProx is above FedAvg." in text


def test_a_claim_is_judged_by_the_paired_interval(recipe: Recipe) -> None:
    fedavg, fedprox = [0.50, 0.61, 0.55], [0.53, 0.63, 0.585]
    values = {
        ("FedAvg", "a 1"): dict(enumerate(fedavg)),
        ("FedAvg", "a 2"): dict(enumerate(fedavg)),
        ("FedProx", "a 1"): dict(enumerate(fedprox)),
        ("FedProx", "a 2"): dict(enumerate(fedavg)),
        ("FedProx", "b 1"): {0: 0.9},  # not among the claim's columns
    }
    halves = [(b - a) / 2 for a, b in zip(fedavg, fedprox)]
    interval = stats.ttest_1samp(halves, 0).confidence_interval()
    mean = sum(halves) / 3
    said = f"FedAvg {100 * mean:+.2f} [{100 * interval.low:+.2f}, {100 * interval.high:+.2f}]"
    assert interval.low > 0
    assert claims.sentences(recipe, values)[0].endswith(f"FedProx minus the others, same order: {said}.")
    swapped = {(("FedProx" if row == "FedAvg" else "FedAvg"), column): seeds for (row, column), seeds in values.items()}
    assert "other order: FedAvg -" in claims.sentences(recipe, swapped)[0]
    assert "no seed has the runs yet" in claims.sentences(recipe, {})[0]


def evidence(recipe: Recipe, row: str, column: str, seed: int, accuracy: float) -> Evidence:
    """Return what a finished run of a cell would leave, with a made-up accuracy."""
    choice = next(cell.choice for cell in recipe.cells("quick") if (cell.row, cell.column) == (row, column))
    config = resolved(recipe.spec("quick").run(choice, seed))
    now = datetime(2026, 11, 29, tzinfo=UTC)
    return Evidence(
        place=Place(method="fedprox", figure=7, scale="quick", row=row, column=column),
        method=row.lower(),
        seed=seed,
        identity=digest(config),
        config=settings(config),
        partition=f"{seed:064d}",
        rounds=1,
        planned=1,
        curves={"global": {"round": [1], "accuracy": [accuracy], "loss": [1.0]}},
        figures={"global": {"accuracy": accuracy, "loss": 1.0}},
        bytes={"down": 1, "up": 1},
        seconds=1,
        finished=now,
    )


def test_evidence_becomes_a_table_and_a_picture_for_each_panel(cli, recipe: Recipe, tmp_path: Path) -> None:
    for seed in range(3):
        for place, column in enumerate(("a 1", "a 2")):
            for better, row in enumerate(("FedAvg", "FedProx")):
                accuracy = 0.5 + 0.1 * place + 0.05 * better + 0.01 * seed
                write_evidence(evidence(recipe, row, column, seed, accuracy), tmp_path / "results")
    assert len(list((tmp_path / "results" / "fedprox-figure-7-quick").iterdir())) == 12
    page = tmp_path / "docs" / "results.md"
    page.parent.mkdir()
    page.write_text("<!-- results: fedprox-figure-7-quick -->\n<!-- end of results -->\n", encoding="utf-8")
    made = cli("results", "page", page, "--from", tmp_path / "results")
    assert made.exit_code == 0, made.output
    text = page.read_text(encoding="utf-8")
    assert "    fedcore reproduce fedprox --figure 7\n" in text
    assert not [heading for heading in PAPERS if heading in text], "the paper prints no numbers"
    assert "| FedProx | 56.00 ± 1.00 | 66.00 ± 1.00 |" in text
    assert "Columns without runs so far: 1 of 3." in text
    assert "- Claim: FedProx is above FedAvg. Here: FedProx minus the others, " in text
    pictures = list((page.parent / "results").iterdir())
    assert [file.name for file in pictures] == ["fedprox-figure-7-quick-a.svg"]
    assert "local epochs" in "".join(ElementTree.parse(pictures[0]).getroot().itertext())  # noqa: S314
    assert cli("results", "page", page, "--from", tmp_path / "results", "--check").exit_code == 0
    write_evidence(evidence(recipe, "FedProx", "a 2", 2, 0.1), tmp_path / "results")
    assert cli("results", "page", page, "--from", tmp_path / "results", "--check").exit_code == 1


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"table": 7}, ("table", "figure")),
        ({"figure": None}, ("table", "figure")),
        ({"figure": None, "table": 7}, ("axis",)),
        ({"figure": None, "table": 7, "axis": None}, ("claims",)),
        ({"axis": None}, ("'a 1'", "axis")),
        ({"columns": [{"name": "a 1"}]}, ("'a 1'", "x")),
        ({"claims": [{"says": "It is.", "better": "FedPro", "worse": ["FedAvg"]}]}, ("row or column", "'FedPro'")),
        ({"claims": [{"says": "It is.", "better": "FedProx", "worse": ["a 1"]}]}, ("row", "'a 1'")),
        (
            {"claims": [{"says": "It is.", "better": "FedProx", "worse": ["FedAvg"], "among": ["FedAvg"]}]},
            ("column", "'FedAvg'"),
        ),
    ],
)
def test_mistakes_in_a_recipe(tmp_path: Path, changes, named) -> None:
    with raises(ConfigError, *named):
        read_recipe(written(tmp_path, RECIPE, **changes))


def test_mistakes_on_the_command_line(cli, recipe: Recipe) -> None:
    for arguments, named in (
        (("fedprox", "--figure", 7, "--table", 7), ("--table", "--figure")),
        (("--figure", 7), ("fedcore reproduce METHOD --figure 7",)),
        (("fedprox", "--figure", 2), ("fedprox", "'2'", "Known: 7.")),
    ):
        refused(cli("reproduce", *arguments), *named)


@pytest.mark.parametrize("scale", SCALES)
def test_every_cell_of_an_installed_figure_is_a_run_or_has_a_reason(scale) -> None:
    figures = [recipe for recipe in find_recipes(print) if recipe.kind == "figure"]
    numbers = {"fedcd": (4, 5, 6), "fedproc": (4, 5, 6), "fdcl": (6, 7, 8), "fedcme": (3, 4, 5)}
    expected = {(method, number) for method, several in numbers.items() for number in several}
    assert {(recipe.method, recipe.figure) for recipe in figures} >= expected
    for recipe in figures:
        assert recipe.claims, recipe.file
        spec = recipe.spec(scale)
        assert len(spec.seeds) == 3
        runs = [resolved(spec.run(cell.choice, 0)) for cell in recipe.cells(scale) if cell.choice is not None]
        assert runs
        if scale == "quick":
            assert all(f"{run.samples:,}" in recipe.quick.says for run in runs if run.samples), recipe.file
            assert f"{recipe.quick.says} ".count("three seeds") == 1, recipe.file
