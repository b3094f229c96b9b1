from __future__ import annotations

from pathlib import Path

import pytest

SMALL = ("--workers", 0, "--rounds", 1, "--clients", 2, "--local-epochs", 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "--plugin", "moonn"), "unknown plugin 'moonn'. Did you mean 'moon'?"),
        (("train", "--engine", "flower"), "pip install fedcore-flower"),
        (("train", "--dataset", "digit"), "unknown dataset 'digit'. Did you mean 'digits'?"),
        (("train", "--model", "simplecnn"), "unknown model 'simplecnn'. Did you mean 'simple-cnn'?"),
        (("train", "--plugin", "moon", "--set", "moon.muu=1"), "Did you mean 'mu'?"),
        (("train", "--plugin", "moon", "--set", "moon.mu=-1"), "mu: input should be greater than or equal to 0"),
        (("train", "--set", "moon.mu=1"), "To use it, add --plugin moon"),
        (("train", "--plugin", "moon", "--plugin", "moon"), "plugin 'moon' is listed 2 times"),
        (("train", "--alpha", "-1"), "--alpha: input should be greater than 0 (given: -1.0)"),
        (("train", "--lr", "nan"), "--lr: input should be a finite number"),
        (("train", "--buffers", "none"), "--buffers: input should be 'global' or 'local'"),
        (("train", "--clients", 2, "--min-clients", 3), "min_clients is 3"),
        (("train", "--config", "missing.yaml"), "config file missing.yaml does not exist"),
        (("train", "--dataset", "npz:none.npz"), "none.npz"),
        (("resume", "nowhere"), "nowhere is no run directory"),
        (("evaluate", "nowhere"), "nowhere is no run directory"),
        (("plugins", "show", "fedprx"), "unknown plugin 'fedprx'. Did you mean 'fedprox'?"),
        (("data", "split", "--partition", "dirichlett"), "Did you mean 'dirichlet'?"),
        (("data", "split", "--out", "x.txt"), "must end with .json"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(cli, tmp_path: Path, arguments, message: str) -> None:
    result = cli(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []  # refused before anything was written


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "--alhpa", "1"), "--alpha"),
        (("train", "--clients", "abc"), "--clients"),
        (("tarin",), "train"),
        (("plugins", "shw"), "show"),
    ],
)
def test_usage_errors_name_what_is_near(cli, arguments, message: str) -> None:
    result = cli(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_markup_in_a_name_is_text(cli) -> None:
    result = cli("train", "--plugin", "[bold]x[/nope]\x1b[2J")
    assert result.exit_code == 2
    assert "[bold]x[/nope]" in result.stderr
    assert "\x1b" not in result.stderr


def test_debug_adds_the_traceback(cli) -> None:
    result = cli("train", "--plugin", "moonn", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "error: unknown plugin 'moonn'" in result.stderr


def test_what_is_a_bug_says_so(cli, monkeypatch) -> None:
    monkeypatch.setattr("fedcore.experiment.run", lambda config, notify: 1 / 0)
    result = cli("train")
    assert result.exit_code == 1
    assert result.stderr == (
        "internal error: ZeroDivisionError: division by zero; run again with --debug for the traceback\n"
    )
    assert "Traceback" in cli("train", "--debug").stderr


def test_ctrl_c_before_there_is_a_run(cli, monkeypatch) -> None:
    def run(config, notify):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedcore.experiment.run", run)
    result = cli("train")
    assert (result.exit_code, result.stderr) == (130, "error: interrupted\n")


def test_ctrl_c_leaves_a_run_that_can_go_on(cli, monkeypatch, tmp_path: Path) -> None:
    def interrupt(federation, state, notify):
        if state.round == 1:
            raise KeyboardInterrupt
        return run_round(federation, state, notify)

    from fedcore.experiment import run_round

    monkeypatch.setattr("fedcore.experiment.run_round", interrupt)
    result = cli("train", *SMALL, "--rounds", 2, "--out", "stopped")
    assert result.exit_code == 130
    assert f"fedcore resume {tmp_path / 'stopped'}" in result.stderr
    assert result.stdout == ""
    monkeypatch.undo()
    assert cli("resume", tmp_path / "stopped", "--quiet").exit_code == 0
    assert len((tmp_path / "stopped" / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_run_that_fails_says_where_its_state_is(cli, tmp_path: Path) -> None:
    result = cli("train", *SMALL, "--lr", 1e30, "--out", "broken")
    assert result.exit_code == 2
    assert "error: round 0" in result.stderr
    assert f"fedcore resume {tmp_path / 'broken'} goes on" in result.stderr
    assert "Traceback" not in result.output


def test_a_directory_that_is_taken(cli, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("x")
    result = cli("train", *SMALL, "--out", "taken")
    assert result.exit_code == 2
    assert "exists already" in result.stderr
    assert (tmp_path / "taken" / "mine").read_text() == "x"
