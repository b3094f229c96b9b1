"""Without fedcore-console."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from fedcore.base import registry
from fedcore.base.output import stderr
from fedcore.cli.app import app
from fedcore.runs.terminal import MinuteDisplay, PlainDisplay, make_display, script_display


@pytest.mark.parametrize(
    "words", [["data"], ["data", "list"], ["data", "split", "--clients", "2"], ["data", "plot"], ["init"]]
)
def test_without_the_package_its_commands_are_answered_with_it(monkeypatch, words: list[str]) -> None:
    installed = registry._scan
    monkeypatch.setattr(registry, "_scan", lambda kind, path: {} if kind == "command" else installed(kind, path))
    outcome = CliRunner().invoke(app, words)
    assert outcome.exit_code == 2
    remedy = registry.how_to_install("fedcore-console")
    assert outcome.output == f"error: {words[0]!r} needs the package fedcore-console: {remedy}\n"


def test_without_the_package_a_terminal_has_the_lines_of_a_file(monkeypatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(registry, "_scan", lambda kind, path: {})
    assert type(make_display(stderr())) is PlainDisplay
    assert type(script_display()) is MinuteDisplay
