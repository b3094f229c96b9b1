"""Without fedcore-console."""

from __future__ import annotations

import re
import sys

import pytest
from typer.testing import CliRunner

from fedcore.base import registry
from fedcore.base.output import stderr
from fedcore.cli.app import app
from fedcore.runs import api
from fedcore.runs.terminal import MinuteDisplay, PlainDisplay, make_display, script_display

FIGURES = r"global \d+\.\d\d %, global_local \d+\.\d\d %"


@pytest.mark.parametrize(
    "words",
    [["data"], ["data", "list"], ["data", "split", "--clients", "2"], ["data", "plot"], ["init"], ["plugins", "list"]],
)
def test_without_the_package_its_commands_are_answered_with_it(monkeypatch, words: list[str]) -> None:
    installed = registry._scan
    monkeypatch.setattr(registry, "_scan", lambda kind, path: {} if kind == "command" else installed(kind, path))
    outcome = CliRunner().invoke(app, words)
    assert outcome.exit_code == 2
    remedy = registry.how_to_install("fedcore-console")
    name = "plugins list" if words[0] == "plugins" else words[0]
    assert outcome.output == f"error: {name!r} needs the package fedcore-console: {remedy}\n"


def test_without_the_package_a_terminal_has_the_lines_of_a_file(monkeypatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(registry, "_scan", lambda kind, path: {})
    assert type(make_display(stderr())) is PlainDisplay
    assert type(script_display()) is MinuteDisplay


def test_without_the_package_the_figures_are_one_line(cli, tmp_path, monkeypatch) -> None:
    installed = registry._scan
    monkeypatch.setattr(registry, "_scan", lambda kind, path: {} if kind == "table" else installed(kind, path))
    small = ("--workers", 0, "--clients", 2, "--local-epochs", 1, "--client-test-fraction", 0.2)
    refused = cli("train", *small, "--profile", "--out", "run")
    assert refused.exit_code == 2
    remedy = registry.how_to_install("fedcore-console")
    assert refused.stderr == f"error: --profile needs the package fedcore-console: {remedy}\n"
    assert not (tmp_path / "run").exists(), "it is refused before the run"

    trained = cli("train", *small, "--rounds", 1, "--out", "run")
    assert trained.exit_code == 0
    assert re.fullmatch(rf"{FIGURES}, run directory: {tmp_path / 'run'}\n", trained.stdout)
    assert re.fullmatch(rf"{FIGURES}\n", cli("evaluate", "run").stdout)


def test_without_the_package_a_trial_of_a_run_is_answered_with_it(cli, monkeypatch) -> None:
    installed = registry._scan
    monkeypatch.setattr(registry, "_scan", lambda kind, path: {} if kind == "feature" else installed(kind, path))
    refused = cli("train", "--fast-dev-run")
    assert refused.exit_code == 2
    remedy = registry.how_to_install("fedcore-console")
    assert refused.stderr == f"error: --fast-dev-run needs the package fedcore-console: {remedy}\n"


def test_without_the_package_evaluate_says_what_was_not_measured(cli, monkeypatch) -> None:
    installed = registry._scan
    monkeypatch.setattr(registry, "_scan", lambda kind, path: {} if kind == "table" else installed(kind, path))
    failures = [{"client": client, "kind": "raised", "message": f"no {client}"} for client in range(3)]
    metrics = {"global": None, "global_reason": "parameters stay", "failed": 3, "failures": failures}
    monkeypatch.setattr(api, "evaluate_run", lambda *_, **__: metrics)
    told = cli("evaluate", "run")
    assert told.stdout.startswith("parameters stay\n")
    assert "client 0 and 2 more could not be evaluated" in " ".join(told.output.split())


def test_with_the_package_a_script_shows_what_the_command_shows_in_a_terminal(monkeypatch) -> None:
    assert type(script_display()) is MinuteDisplay, "pytest's stderr is no terminal"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert type(script_display()).__name__ == "LiveDisplay"
