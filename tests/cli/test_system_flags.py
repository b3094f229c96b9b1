"""``--system`` on the command line: flags beside a file, what a person sees of who took part, and the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedcore.base.config import RunConfig
from fedcore.base.identity import digest
from fedcore.cli.settings import build_config
from fedcore_report.breakdowns import _outcomes, participation
from fedcore_study.comparisons.groups import group_runs
from fedcore_study.comparisons.records import read_run
from fedcore_study.sweeps.spec import SweepSpec, parse_axis

SMALL = ("--model", "mlp", "--clients", 6, "--rounds", 3, "--local-epochs", 2, "--workers", 0, "--batch-size", 64)
FAULTY = ("--system", "no_show=0.2", "--system", "dropout=0.3", "--system", "stragglers=0.5")


def test_flags_override_the_files_options_one_by_one(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("system: {dropout: 0.1, slow: 0.5}\n", encoding="utf-8")
    system = build_config({"system": ["dropout=0.3", "deadline=20"]}, file, []).system
    assert system is not None
    assert (system.dropout, system.slow, system.deadline) == (0.3, 0.5, 20)
    assert build_config({"rounds": 2}, file, []).system is not None
    file.write_text("system: [dropout=0.1, slow=0.5]\n", encoding="utf-8")
    system = build_config({"system": ["dropout=0.3"]}, file, []).system
    assert system is not None
    assert (system.dropout, system.slow) == (0.3, 0.5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("dropuot=0.1", "unknown system option 'dropuot'. Did you mean 'dropout'?"),
        ("dropout=2", "--system dropout: input should be less than or equal to 1 (given: 2)"),
        ("dropout", "--system dropout: write OPTION=VALUE, for example --system dropout=0.1"),
        ("deadline=-1", "--system deadline: input should be greater than 0 (given: -1)"),
    ],
)
def test_mistakes_end_with_2_and_write_nothing(cli, tmp_path: Path, given: str, message: str) -> None:
    result = cli("train", "--system", given, "--out", "run")
    assert (result.exit_code, result.stderr) == (2, f"error: {message}\n")
    assert not (tmp_path / "run").exists()


def test_the_round_lines_and_the_summary_say_who_took_part(cli, tmp_path: Path) -> None:
    result = cli("train", *SMALL, *FAULTY, "--out", "run")
    assert result.exit_code == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    shown = [line for line in result.stderr.splitlines() if line.startswith("round ")]
    for line, text in zip(lines, shown, strict=True):
        assert f"  {line['accepted']} of 6 clients (" in text
        assert " virtual  " in text
        assert f"{len(line['system']['partial'])} partial" in text or not line["system"]["partial"]
        for kind in {failure["kind"] for failure in line["failures"]}:
            assert kind in text
    assert "failed (" not in result.stderr, "simulated losses are no accidents"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["system"]
    assert summary["selected"] == 18
    assert summary["accepted"] + sum(summary["lost"].values()) == 18
    assert summary["virtual_time"] == lines[-1]["virtual_time"]
    assert f"took part: {summary['accepted']} of 18 clients (" in " ".join(result.stdout.split())


def test_the_report_shows_who_took_part(cli, tmp_path: Path) -> None:
    assert cli("train", *SMALL, *FAULTY, "--out", "run", "--quiet").exit_code == 0
    assert cli("train", *SMALL, "--out", "plain", "--quiet").exit_code == 0

    run = read_run(tmp_path / "run", print)
    fared = _outcomes(run)
    summary = run.summary["system"] if run.summary else {}
    assert fared["all epochs"] + fared["fewer epochs"] == pytest.approx(summary["accepted"] / 3)
    assert fared["dropped"] == pytest.approx(summary["lost"]["dropped"] / 3)
    assert sum(fared.values()) == pytest.approx(6)
    (group,) = group_runs([run], ["plugins"])[1]
    (chart,) = participation(group)
    assert {part.label for part in chart.parts} <= {"all epochs", "fewer epochs", "unavailable", "dropped"}
    (group,) = group_runs([read_run(tmp_path / "plain", print)], ["plugins"])[1]
    assert list(participation(group)) == []
    result = cli("report", "run", "plain", "--out", "page.html", "--points", 0)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "page.html").read_text(encoding="utf-8").count("Who took part") >= 1


def test_a_sweep_varies_the_system() -> None:
    axis, values = parse_axis("system={dropout: 0.1},{dropout: 0.9}")
    spec = SweepSpec.create({"grid": {axis: values}, "base": {"rounds": 1}})
    found = [config.system for _, config in spec.cells()]
    assert [system and system.dropout for system in found] == [0.1, 0.9]
    assert len({digest(config) for _, config in spec.cells()} | {digest(RunConfig(rounds=1))}) == 3
