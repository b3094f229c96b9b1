"""``fedcore reproduce``: a small recipe of real runs, from its listing to its table."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
import yaml

from tests.sentences import refused

RECIPE = {
    "method": "fedprox",
    "table": 7,
    "title": "two alphas",
    "source": "Somebody, 2026",
    "notes": ["What the paper leaves open."],
    # A run that is alone in its sweep would start workers.
    "base": {
        "clients": 2,
        "rounds": 50,
        "local_epochs": 1,
        "batch_size": 256,
        "client_test_fraction": 0.2,
        "workers": 0,
    },
    "protocols": {"test set": ["global", "personal_global"], "clients": ["personal", "global_local"]},
    "columns": [
        {"name": "a", "options": {"alpha": 0.5}},
        {"name": "b", "not_run": "there is no such data set"},
    ],
    "rows": [
        {"name": "FedAvg", "plugins": "fedavg", "paper": ["66.3 ± 0.5", 1]},
        {"name": "FedProx", "plugins": {"fedprox": {"mu": 0.1}}, "paper": ["?", 2]},
        {"name": "SOLO", "plugins": "solo", "paper": [None, 3], "not_run": {"a": "nobody asks"}},
    ],
    "quick": {"says": "1 round in place of 50.", "options": {"rounds": 1}},
}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from fedcore_reproduce import find

    file = tmp_path / "table_7.yaml"
    file.write_text(yaml.safe_dump(RECIPE, sort_keys=False), encoding="utf-8")
    monkeypatch.setattr(find, "recipe_files", lambda: [file])
    return file


def test_a_table_beside_the_papers_and_the_same_command_goes_on(cli, recipe, tmp_path: Path, monkeypatch) -> None:
    command = ("reproduce", "fedprox", "--table", 7, "--format", "json")
    result = cli(*command)
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert (content["scale"], content["notes"]) == ("quick", RECIPE["notes"])
    assert content["scaled"] == RECIPE["quick"]["says"]
    cells = {(cell["row"], cell["column"]): cell for cell in content["cells"]}
    assert len(cells) == 6
    assert cells["FedAvg", "b"]["reason"] == "not run: there is no such data set"
    assert cells["SOLO", "a"]["reason"] == "not run: nobody asks"

    folder = tmp_path / "reproduce" / "fedprox-table-7-quick"
    summaries = {file.parent.name.partition("_")[0]: file for file in folder.glob("runs/*/summary.json")}
    assert summaries.keys() == {"fedavg", "fedprox"}
    for plugin, row in (("fedavg", "FedAvg"), ("fedprox", "FedProx")):
        metrics = json.loads(summaries[plugin].read_text())["metrics"]
        ours = cells[row, "a"]["ours"]
        assert ours["test set"]["mean"] == pytest.approx(100 * metrics["global"]["accuracy"])
        assert (ours["clients"]["protocol"], ours["clients"]["n"]) == ("global_local", 1)
        assert ours["clients"]["mean"] == pytest.approx(100 * metrics["global_local"]["accuracy"])
    ours = cells["FedAvg", "a"]["ours"]["test set"]
    assert ours["difference"] == pytest.approx(ours["mean"] - 66.3)
    assert cells["FedProx", "a"]["ours"]["test set"]["difference"] is None
    assert cells["FedProx", "a"]["paper"]["text"] == "unreadable"

    before = {file: file.stat().st_mtime_ns for file in folder.glob("runs/*/summary.json")}
    lines = list(csv.DictReader(io.StringIO(cli(*command[:-1], "csv").stdout)))
    assert [(line["row"], line["ours"], line["n"], line["reason"]) for line in lines[:2]] == [
        ("FedAvg", "test set", "1", ""),
        ("FedAvg", "clients", "1", ""),
    ]
    assert lines[0]["paper"] == "66.3 ± 0.5"
    assert float(lines[0]["difference"]) == pytest.approx(ours["difference"])
    table = cli(*command[:-2], "--quiet").stdout
    assert "Table 7 of Somebody, 2026: two alphas" in table
    assert "b: not run: there is no such data set" in table
    assert "not run: nobody asks" in table
    assert "1 round in place of 50." in table
    markdown = cli(*command[:-1], "markdown").stdout
    assert f"| FedAvg | 66.3 ± 0.5 | {ours['mean']:.2f} | {ours['difference']:+.2f} |" in markdown
    assert r"\toprule" in cli(*command[:-1], "latex").stdout
    assert {file: file.stat().st_mtime_ns for file in folder.glob("runs/*/summary.json")} == before

    # Another seed goes on in the same folder; its runs fail, and the table says so.
    jobs_end(monkeypatch, "failed", "it broke", interrupted=False)
    partly = cli(*command[:-2], "--seeds", 2, "--quiet")
    assert partly.exit_code == 3
    assert f"{ours['mean']:.2f} (1/2 seeds)" in partly.stdout
    assert partly.stderr.count("it broke") == 2
    content = json.loads(cli(*command, "--seeds", 2).stdout)
    assert {cell["reason"] for cell in content["cells"] if cell["planned"]} == {"failed: it broke"}
    assert {file: file.stat().st_mtime_ns for file in folder.glob("runs/*/summary.json")} == before


def test_chosen_rows_share_a_folder_with_the_whole_table(cli, recipe, tmp_path: Path) -> None:
    def ran() -> dict[str, int]:
        files = (tmp_path / "reproduce" / "fedprox-table-7-quick").glob("runs/*/summary.json")
        return {file.parent.name.partition("_")[0]: file.stat().st_mtime_ns for file in files}

    command = ("reproduce", "fedprox", "--table", 7, "--format", "json")
    chosen = cli(*command, "--row", "FedProx", "--column", "a")
    assert chosen.exit_code == 0, chosen.output
    content = json.loads(chosen.stdout)
    assert [(cell["row"], cell["column"]) for cell in content["cells"]] == [("FedProx", "a")]
    first = ran()
    assert first.keys() == {"fedprox"}
    text = cli(*command[:-2], "--row", "FedProx", "--column", "a", "--quiet").stdout
    assert "FedAvg" not in text
    assert "Shown: 1 of the 3 rows and 1 of the 2 columns of the paper's table." in text

    other = cli(*command, "--row", "FedAvg", "--evidence", "kept")
    assert "the evidence of 1 runs is in kept" in other.stderr
    assert [file.name for file in (tmp_path / "kept").glob("*/*")] == ["a_fedavg_seed-0.json"]
    assert [cell["row"] for cell in json.loads(other.stdout)["cells"]] == ["FedAvg", "FedAvg"]
    assert ran().keys() == {"fedavg", "fedprox"}
    whole = json.loads(cli(*command).stdout)
    assert {(c["row"], c["column"]): c["seeds"] for c in whole["cells"] if c["planned"]} == {
        ("FedAvg", "a"): 1,
        ("FedProx", "a"): 1,
    }
    assert ran()["fedprox"] == first["fedprox"]  # not run again


def jobs_end(monkeypatch: pytest.MonkeyPatch, status: str, message: str = "", *, interrupted: bool) -> None:
    """Let the processes of a sweep end at once."""
    from fedcore_study.sweeps import run
    from fedcore_study.sweeps.processes import Outcome

    def ended(jobs, *_, **__):
        return [Outcome(job.name, status, message=message) for job in jobs], interrupted

    monkeypatch.setattr(run, "run_jobs", ended)


def test_ctrl_c_says_how_to_go_on(cli, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs_end(monkeypatch, "stopped", interrupted=True)
    result = cli("reproduce", "fedprox", "--table", 7)
    assert result.exit_code == 130
    assert "stopped: 0 of 2 runs are finished. Go on with the same command" in result.stderr
    assert result.stdout == ""


def test_nothing_to_run_is_still_a_table(cli, recipe: Path, tmp_path: Path) -> None:
    columns = [{**column, "not_run": "no data"} for column in RECIPE["columns"]]
    recipe.write_text(yaml.safe_dump({**RECIPE, "columns": columns}, sort_keys=False), encoding="utf-8")
    result = cli("reproduce", "fedprox", "--table", 7)
    assert result.exit_code == 0
    assert "66.3 ± 0.5" in result.stdout
    assert not (tmp_path / "reproduce").exists()


def test_the_list_and_the_dry_run_start_nothing(cli, recipe: Path, tmp_path: Path) -> None:
    for arguments in ((), ("fedprox",)):
        listed = cli("reproduce", *arguments)
        assert listed.exit_code == 0
        assert "two alphas" in listed.stdout
        assert "Run one: fedcore reproduce fedprox --table 7" in listed.stdout
    dry = cli("reproduce", "fedprox", "--table", 7, "--dry-run", "--seeds", 3)
    assert "a: FedAvg, FedProx: 3 runs each\n" in dry.stdout
    assert "b: FedAvg, FedProx, SOLO: not run: there is no such data set\n" in dry.stdout
    assert "6 runs, none started" in dry.stderr
    chosen = cli(
        "reproduce", "fedprox", "--table", 7, "--dry-run", "--row", "FedProx", "--row", "SOLO", "--column", "a"
    )
    assert chosen.stdout == "a: FedProx: 1 run each\na: SOLO: not run: nobody asks\n"
    assert not (tmp_path / "reproduce").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("fedprx",), ("'fedprx'", "'fedprox'")),
        (("fedprox", "--table", "8"), ("fedprox", "'8'", "Known: 7.")),
        (("--table", "7"), ("METHOD --table 7",)),
        (("fedprox", "--table", "7", "--scale", "papre"), ("'papre'", "'paper'")),
        (("fedprox", "--table", "7", "--format", "html"), ("'html'",)),
        (("fedprox", "--table", "7", "--row", "fedprox"), ("row of Table 7", "'fedprox'", "'FedProx'")),
        (("fedprox", "--table", "7", "--column", "A"), ("column of Table 7", "'A'", "'a'")),
        (("fedprox", "--row", "FedAvg"), ("--row FedAvg", "--table N")),
        (("fedprox", "--table", "7", "--out", "table_7.yaml"), ("table_7.yaml",)),
    ],
)
def test_mistakes(cli, recipe: Path, arguments, named) -> None:
    refused(cli("reproduce", *arguments), *named)
