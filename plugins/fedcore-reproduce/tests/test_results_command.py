"""``fedcore results``: from runs of a small table to evidence files, and from these to a page."""

from __future__ import annotations

import json
import platform
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from fedcore import RunConfig
from fedcore_reproduce.evidence import Evidence, evidence_of, read_all, read_evidence
from fedcore_reproduce.places import cells, nearest, places_of
from fedcore_study.comparisons.records import read_run
from tests.sentences import refused

from .test_reproduce_command import RECIPE

PAGE = "# Results\n\nBefore.\n\n<!-- results: fedprox-table-7-quick -->\n<!-- end of results -->\n\nAfter.\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Return a folder with a recipe and its runs: a sweep, a plain run in progress, and one of no table."""
    import fedcore
    from fedcore import Interrupted
    from fedcore_reproduce import run
    from fedcore_reproduce.recipe import read_recipe

    root = tmp_path_factory.mktemp("trained")
    file = root / "table_7.yaml"
    quick = {"says": "2 rounds in place of 50.", "options": {"rounds": 2}}
    columns = [*RECIPE["columns"], {"name": "c / d", "options": {"alpha": 5, "eval_every": 2}}]
    rows = [{**row, "paper": [*row["paper"], 50 + place]} for place, row in enumerate(RECIPE["rows"])]
    rows[2]["not_run"] = "nobody asks"
    published = {"name": "theirs", "column": "a", "source": "a log", "round": [1, 2], "accuracy": [40.0, 60.0]}
    values = {**RECIPE, "columns": columns, "rows": rows, "quick": quick, "curves": [published]}
    file.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    recipe = read_recipe(file)
    planned = run.plan(recipe, "quick", columns=["a"], seeds=1)
    run.run(planned, root / "sweep", parallel=1)

    def stop(event, details) -> None:
        if event == "round":
            raise KeyboardInterrupt

    choice = next(c.choice for c in recipe.cells("quick") if (c.row, c.column) == ("FedProx", "c / d"))
    config = recipe.spec("quick").run(choice, 3).model_copy(update={"workers": 0, "eval_every": 1})
    with pytest.raises(Interrupted):
        fedcore.run(config.model_copy(update={"out": root / "stopped"}), notify=stop)
    fedcore.run(config.model_copy(update={"out": root / "other", "rounds": 1, "lr": 0.01}))
    return root


@pytest.fixture
def recipes(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from fedcore_reproduce import find

    monkeypatch.setattr(find, "recipe_files", lambda: [trained / "table_7.yaml"])
    return trained


def test_runs_become_evidence_and_evidence_a_page(cli, recipes: Path, tmp_path: Path) -> None:
    added = cli("results", "add", recipes / "sweep", recipes / "stopped", recipes / "other")
    assert added.exit_code == 0, added.output
    folder = tmp_path / "results" / "fedprox-table-7-quick"
    assert {file.name for file in folder.iterdir()} == {
        "a_fedavg_seed-0.json",
        "a_fedprox_seed-0.json",
        "c-d_fedprox_seed-3.json",
    }
    assert "belongs to no table of a paper; nearest is fedprox-table-7-quick, FedProx" in added.stderr
    assert f"lr 0.01 (in the recipe {RunConfig().lr})" in added.stderr
    found = {(e.place.row, e.seed) if e.place else None: e for e in read_all(tmp_path / "results")}
    fedavg, stopped, other = found["FedAvg", 0], found["FedProx", 3], found[None]
    (run,) = (recipes / "sweep" / "runs").glob("fedavg_*")
    metrics = json.loads((run / "summary.json").read_text())["metrics"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert fedavg.figures["global"]["accuracy"] == pytest.approx(metrics["global"]["accuracy"], abs=1e-6)
    curve = fedavg.curves["global"]
    assert curve.round == [1, 2]
    assert curve.loss == pytest.approx([line["metrics"]["global"]["loss"] for line in lines], abs=1e-6)
    assert fedavg.partition == json.loads((run / "partition.json").read_text())["sha256"]
    assert fedavg.seconds == pytest.approx(
        sum(line["time"]["round"] + line["time"]["evaluation"] for line in lines), abs=1e-3
    )
    (session,) = fedavg.sessions
    assert session.started <= fedavg.finished
    assert session.versions.keys() >= {"torch", "fedcore"}
    assert "fedcore-moon" not in session.versions  # the run does not use it
    assert (stopped.rounds, stopped.planned, stopped.is_finished, stopped.finished) == (1, 2, False, None)
    assert (other.folder, other.config["lr"]) == ("runs", 0.01)
    for file in (tmp_path / "results").glob("*/*.json"):
        text = file.read_text(encoding="utf-8")
        assert str(recipes) not in text
        assert platform.node() not in text
        assert len(text) < 6000
        again = Evidence.model_validate_json(text)
        assert again.as_json() == text

    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    assert cli("results", "page", page, "--check").exit_code == 1
    assert page.read_text(encoding="utf-8") == PAGE
    made = cli("results", "page", page)
    assert made.exit_code == 0, made.output
    text = page.read_text(encoding="utf-8")
    ours = 100 * metrics["global"]["accuracy"]
    local = 100 * metrics["global_local"]["accuracy"]
    late = 100 * sum(line["metrics"]["global"]["accuracy"] for line in lines) / 2
    baseline = f"{ours:.2f} | - | {ours - 66.3:+.2f} | {local:.2f} | - | {local - 66.3:+.2f} | {late:.2f} | 0 | 2 |"
    assert f"| FedAvg | 66.3 ± 0.5 | - | {baseline}" in text
    so_far = 100 * stopped.curves["global"].accuracy[-1]
    assert f"| FedProx | 51 | +1.00 | {so_far:.2f} after round 1 of 2 | - | - |" in text
    assert text.count("after round 1 of 2") == 2  # under both protocols, and nowhere as finished
    assert "| SOLO |" not in text
    assert "Rows without runs so far: SOLO" in text
    assert "Columns without runs so far: 1 of 3." in text
    assert text.startswith("# Results\n\nBefore.\n")
    assert text.endswith("\n\nAfter.\n")
    for column in ("a", "c-d"):
        assert f"](results/fedprox-table-7-quick-{column}.svg)" in text
        svg = (tmp_path / "results" / f"fedprox-table-7-quick-{column}.svg").read_text(encoding="utf-8")
        assert "FedProx" in svg
        assert ("theirs" in svg) is (column == "a")
    assert "- theirs: a log.\n" in text
    assert cli("results", "page", page, "--check").exit_code == 0

    # Other figures: the page and its picture are out of date.
    file = folder / "a_fedavg_seed-0.json"
    values = json.loads(file.read_text())
    values["curves"]["global"]["accuracy"][0] = 0.5
    values["figures"]["global"]["accuracy"] = 0.5
    file.write_text(json.dumps(values))
    stale = cli("results", "page", page, "--check")
    assert stale.exit_code == 1
    assert stale.stderr.count("is not what results gives") == 2
    assert cli("results", "page", page).exit_code == 0
    fedprox = next(e for e in read_all(tmp_path / "results") if e.place and (e.place.row, e.seed) == ("FedProx", 0))
    theirs = 100 * fedprox.accuracy("global")
    text = page.read_text(encoding="utf-8")
    assert "| FedAvg | 66.3 ± 0.5 | - | 50.00 | - | -16.30 |" in text
    assert f"| FedProx | unreadable | - | {theirs:.2f} | {theirs - 50:+.2f} | - |" in text


def test_several_seeds_have_deviation_paired_difference_and_interval(cli, recipes: Path, tmp_path: Path) -> None:
    """By hand: differences 1, 3 and 0 have mean 4/3 and deviation 1.528; t(0.975; 2) = 4.303."""
    cli("results", "add", recipes / "sweep")
    folder, page = tmp_path / "results" / "fedprox-table-7-quick", tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")

    def evidence(row: str, seed: int, accuracy: float, **changes: object) -> None:
        values = json.loads((folder / f"a_{row}_seed-0.json").read_text())
        figures = {name: {**figure, "accuracy": accuracy} for name, figure in values["figures"].items()}
        values |= {"seed": seed, "figures": figures, **changes}
        (folder / f"a_{row}_seed-{seed}.json").write_text(json.dumps(values))

    def lines() -> tuple[str, str]:
        assert cli("results", "page", page).exit_code == 0
        found = page.read_text(encoding="utf-8").splitlines()
        return next(x for x in found if x.startswith("| method")), next(x for x in found if x.startswith("| FedProx"))

    for seed, ours, fedavg in ((0, 0.71, 0.70), (1, 0.75, 0.72)):
        evidence("fedprox", seed, ours)
        evidence("fedavg", seed, fedavg)
    heading, fedprox = lines()
    assert "interval" not in heading
    assert "| 73.00 ± 2.83 | +2.00 (2 seeds: no interval) |" in fedprox
    evidence("fedprox", 2, 0.74)
    assert "| 73.33 ± 2.08 | +2.00 (2 seeds: no interval) |" in lines()[1]  # FedAvg has no third
    evidence("fedavg", 2, 0.74)
    heading, fedprox = lines()
    assert heading.count("| minus FedAvg [95 % interval] |") == 2  # under both protocols
    assert "| 73.33 ± 2.08 | +1.33 [-2.46, +5.13] |" in fedprox
    assert "| 0, 1, 2 | 2 |" in fedprox
    evidence("fedavg", 2, 0.74, partition="0" * 64)  # other clients: no pair
    assert "+2.00 (2 seeds: no interval)" in lines()[1]


def test_an_own_model_is_not_compared_with_a_global_one(cli, recipes: Path, tmp_path: Path) -> None:
    cli("results", "add", recipes / "sweep")
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    file = tmp_path / "results" / "fedprox-table-7-quick" / "a_fedprox_seed-0.json"
    values = json.loads(file.read_text())
    values["figures"]["personal"] = {"accuracy": 0.99}
    file.write_text(json.dumps(values))
    cli("results", "page", page)
    row = next(x for x in page.read_text(encoding="utf-8").splitlines() if x.startswith("| FedProx"))
    assert "| 99.00 | - |" in row


@pytest.mark.parametrize(
    ("dataset", "kept"),
    [
        ("npz:/data/x.npz", "npz:x.npz"),
        ("hf:imdb?text=text&tokenizer=/home/me/bert", "hf:imdb?text=text&tokenizer=bert"),
        ("hf:/data/imdb?tokenizer=/home/me/bert", "hf:imdb?tokenizer=bert"),
        ("domains:/data/PACS?size=64&classes=dog,horse", "domains:PACS?size=64&classes=dog,horse"),
    ],
)
def test_evidence_holds_no_absolute_path(trained: Path, dataset: str, kept: str) -> None:
    run = read_run(trained / "other", print)
    run = replace(run, config=run.config.model_copy(update={"dataset": dataset}))
    assert evidence_of(run, None, print).config["dataset"] == kept


def test_code_that_a_run_names_is_not_imported(recipes: Path) -> None:
    from fedcore_reproduce.find import find_recipes

    among = cells(find_recipes(print))
    (folder,) = (recipes / "sweep" / "runs").glob("fedprox_*")
    config = read_run(folder, print).config
    assert places_of(config, among)
    own = config.model_copy(update={"plugins": {"module:nowhere.Mine": {"mu": 1.0}}})
    assert not places_of(own, among)
    assert nearest(own, among) is None
    tracked = config.model_copy(update={"trackers": {"module:nowhere.Shown": {}}})
    assert places_of(tracked, among) == places_of(config, among)


def test_figures_before_the_correction_are_told_by_column(cli, recipes: Path, tmp_path: Path) -> None:
    cli("results", "add", recipes / "sweep", recipes / "stopped")
    for name, before in (("a_fedavg_seed-0", 0.5), ("a_fedprox_seed-0", 0.6), ("c-d_fedprox_seed-3", 0.9)):
        file = tmp_path / "results" / "fedprox-table-7-quick" / f"{name}.json"
        values = json.loads(file.read_text())
        figures = {"global": {"accuracy": 0.8}, "global_before_correction": {"accuracy": before}}
        file.write_text(json.dumps({**values, "rounds": 2, "figures": figures}))
    (tmp_path / "page.md").write_text(PAGE, encoding="utf-8")
    cli("results", "page", "page.md")
    said = "which the curves do not show: a: FedAvg 50.00, FedProx 60.00; c / d: FedProx 90.00."
    assert said in (tmp_path / "page.md").read_text(encoding="utf-8")


def test_the_bits_of_a_picture_are_those_of_its_data(cli, recipes: Path, tmp_path: Path) -> None:
    cli("results", "add", recipes / "sweep")
    bits = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "page.md").write_text(PAGE, encoding="utf-8")
        assert cli("results", "page", tmp_path / name / "page.md").exit_code == 0
        bits.append((tmp_path / name / "results" / "fedprox-table-7-quick-a.svg").read_bytes())
    assert bits[0] == bits[1]


def test_what_says_more_is_kept_and_what_was_configured_otherwise_is_said(cli, recipes: Path, tmp_path: Path) -> None:
    cli("results", "add", recipes / "stopped")
    (file,) = (tmp_path / "results").glob("*/*.json")
    values = json.loads(file.read_text())
    values |= {"rounds": 2, "figures": {"global": {"accuracy": 0.75}}}
    file.write_text(json.dumps(values))
    again = cli("results", "add", recipes / "stopped")
    assert "is kept: it holds 2 rounds, the run 1" in again.stderr
    assert read_all(tmp_path / "results")[0].is_finished

    values["config"]["momentum"] = 0.5
    file.write_text(json.dumps(values))
    (tmp_path / "page.md").write_text(PAGE, encoding="utf-8")
    cli("results", "page", "page.md")
    said = "Run with other options than the recipe has now: FedProx, seed 3: momentum 0.5 (in the recipe 0.9)."
    assert said in (tmp_path / "page.md").read_text(encoding="utf-8")


def test_a_run_that_stopped_early_is_complete_and_a_refused_one_keeps_no_other_out(cli, recipes, tmp_path) -> None:
    import fedcore

    options = {**RECIPE["base"], "alpha": 0.5, "rounds": 2, "seed": 4, "out": tmp_path / "early"}
    fedcore.run(**options, on_round=lambda row: True, notify=lambda event, details: None)
    refused = [tmp_path / name for name in ("summary", "line")]
    for folder, name in zip(refused, ("summary.json", "metrics.jsonl"), strict=True):
        shutil.copytree(recipes / "other", folder)
        record = json.loads((folder / name).read_text())
        record["metrics"]["global"]["accuracy"] = 50
        (folder / name).write_text(json.dumps(record) + "\n")
    added = cli("results", "add", *refused, recipes / "sweep", tmp_path / "early")
    assert added.exit_code == 2
    assert "the accuracy of global is not between 0 and 1; it is left out" in added.stderr
    assert "curves.global.accuracy.0: input should be less than or equal to 1 (given: 50); it is left" in added.stderr
    assert "2 of the runs are left out" in added.stderr
    early = next(evidence for evidence in read_all(tmp_path / "results") if evidence.seed == 4)
    assert (early.rounds, early.planned, early.is_finished, early.folder) == (1, 2, True, "fedprox-table-7-quick")
    (tmp_path / "page.md").write_text(PAGE, encoding="utf-8")
    assert cli("results", "page", "page.md").exit_code == 0
    assert "| 0, 4 | 2, 1 (stopped early) |" in (tmp_path / "page.md").read_text(encoding="utf-8")


def test_a_table_without_runs_and_evidence_without_a_place(cli, recipes: Path, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "page.md").write_text(PAGE, encoding="utf-8")
    assert cli("results", "page", "page.md").exit_code == 0
    assert "No run of it has been recorded yet." in (tmp_path / "page.md").read_text(encoding="utf-8")
    cli("results", "add", recipes / "sweep")
    (tmp_path / "bare.md").write_text("# Bare\n", encoding="utf-8")
    said = cli("results", "page", "bare.md")
    assert "bare.md has no place for fedprox-table-7-quick: add the lines <!-- results: fedprox-" in said.stderr


def test_mistakes(cli, recipes: Path, tmp_path: Path) -> None:
    refused(cli("results", "add", "nowhere"), "nowhere")
    refused(cli("results", "page", "nowhere.md"), "nowhere.md")
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    refused(cli("results", "page", page), "results", "fedcore results add")
    (tmp_path / "results").mkdir()
    page.write_text(PAGE.replace("fedprox", "fedporx"), encoding="utf-8")
    refused(cli("results", "page", page), "'fedporx-table-7-quick'", "'fedprox-table-7-quick'")
    page.write_text(PAGE.replace("<!-- end of results -->", ""), encoding="utf-8")
    refused(cli("results", "page", page), "<!-- end of results -->")
    page.write_text(PAGE, encoding="utf-8")
    cli("results", "add", recipes / "sweep")
    (first, *_) = sorted((tmp_path / "results").glob("*/*.json"))
    values = json.loads(first.read_text())
    for change, named in (
        ({"rounds": 9}, ("9 rounds", "2 planned")),
        ({"rounds": 1}, ("1 of 2 rounds",)),
        ({"figures": {"global": {"accuracy": 50}}}, ("global", "between 0 and 1")),
        ({"seed": 4}, ("name",)),
        ({"format": "fedcore-evidence-9"}, ("format", "'fedcore-evidence-1'")),
        ({"hostname": "me"}, ("hostname",)),
    ):
        first.write_text(json.dumps(values | change))
        refused(cli("results", "page", page), first.name, *named)
    first.write_text("{half")
    done = cli("results", "page", page)  # with what json says
    assert (done.exit_code, "cannot be read as a run's evidence" in done.stderr) == (2, True), done.output
    first.unlink()
    for part, name in (("row", "a_gone_seed-0.json"), ("column", "gone_fedavg_seed-0.json")):
        gone = first.parent / name
        gone.write_text(json.dumps(values | {"place": {**values["place"], part: "Gone"}}))
        refused(cli("results", "page", page), f"{part} 'Gone'")
        gone.unlink()


def test_a_run_that_is_further_than_the_others_goes_on_alone() -> None:
    from fedcore_reproduce.curves import chart
    from fedcore_reproduce.evidence import Curve
    from fedcore_reproduce.find import find_recipe

    folder = Path(__file__).parents[3] / "results" / "fedproc-table-2-paper"
    whole = read_evidence(folder / "cifar-10_fedproc_seed-0.json")
    curve = whole.curves["global"]
    cut = Curve(round=curve.round[:4], accuracy=curve.accuracy[:4], loss=curve.loss[:4])
    other = whole.model_copy(update={"seed": 1, "figures": None, "rounds": 44, "curves": {"global": cut}})
    recipe = find_recipe(print, "fedproc", "2")
    line = next(line for line in chart(recipe, "CIFAR-10", [whole, other]).lines if line.label.startswith("FedProc ("))
    assert line.x == [10, 20, 30, 40]
    assert line.tails == [(curve.round[3:], [100 * accuracy for accuracy in curve.accuracy[3:]])]
