"""Errors that a run survives are printed with their traceback where a command runs with --debug."""

from __future__ import annotations

import pytest

from fedcore.base.errors import DEBUG, print_traceback


@pytest.mark.parametrize("wanted", [True, False])
def test_the_error_that_is_handled_is_printed_with_debug(monkeypatch, capsys, wanted: bool) -> None:
    monkeypatch.delenv(DEBUG, raising=False)
    if wanted:
        monkeypatch.setenv(DEBUG, "1")
    try:
        raise ValueError("no such file")
    except ValueError:
        print_traceback()
    shown = capsys.readouterr().err
    assert ("Traceback" in shown and "ValueError: no such file" in shown) if wanted else shown == ""
