"""What a running sweep shows: bars on a terminal, elsewhere one line a minute."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from fedcore_study.cli import sweep_display
from fedcore_study.cli.sweep_display import NotebookSweepDisplay, SweepDisplay

PLAN = {
    "runs": ["old", "a", "b", "c"],
    "left": ["a", "b", "c"],
    "longer": ["b"],
    "parallel": 2,
    "rounds": {"old": 4, "a": 4, "b": 10, "c": 4},
    "out": Path("sweeps/s"),
}


def ended(seconds, message=""):
    return {"seconds": seconds, "message": message}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def played(display: SweepDisplay, clock: Clock) -> None:
    display("", "plan", PLAN)
    for name in ("a", "b"):
        display(name, "start", {})
    display("b", "begun", {"round": 5, "notes": []})
    clock.now = 2.0
    display("a", "round", {"round": 1, "figure": "50.00 %", "clients": 10, "lost": {"raised": 3, "dropped": 1}})
    display("b", "round", {"round": 6, "figure": None, "clients": 10, "lost": {"dropped": 1}})


def test_the_status_names_rounds_accuracy_and_the_time_left() -> None:
    clock = Clock()
    display = SweepDisplay(Console(file=io.StringIO()), clock=clock)
    played(display, clock)
    assert display.status() == (
        "all runs: 0/3 finished, about 11 s left; a: 1/4 rounds, 50.00 %, 6.00 s left; b: 6/10 rounds, 8.00 s left"
    )
    display("a", "failed", ended(3, "no memory"))
    display("b", "finished", ended(4))
    display("c", "start", {})
    assert display.status() == "all runs: 1/3 finished, 1 failed, about 4.00 s left; c: 0/4 rounds"


def test_an_accuracy_of_zero_is_shown() -> None:
    clock = Clock()
    display = SweepDisplay(Console(file=io.StringIO()), clock=clock)
    played(display, clock)
    display("a", "round", {"round": 2, "figure": "0.00 %", "clients": 10, "lost": {}})
    assert "a: 2/4 rounds, 0.00 %, " in display.status()


def test_an_accuracy_of_own_models_names_its_protocol() -> None:
    clock, file = Clock(), io.StringIO()
    with SweepDisplay(Console(file=file, width=200), clock=clock) as display:
        played(display, clock)
        display("b", "round", {"round": 7, "figure": "90.00 %", "protocol": "personal", "clients": 10, "lost": {}})
        assert "b: 7/10 rounds, personal 90.00 %" in display.status()
        display("b", "finished", ended(4))
    assert file.getvalue().splitlines()[-1].startswith("finished b after 4.00 s, personal 90.00 %")


def test_a_finished_run_shows_the_model_that_stays() -> None:
    clock, file = Clock(), io.StringIO()
    with SweepDisplay(Console(file=file, width=200), clock=clock) as display:
        played(display, clock)
        display("b", "round", {"round": 10, "figure": "90.00 %", "protocol": "global", "clients": 10, "lost": {}})
        display("b", "done", {"figure": "92.00 %", "protocol": "global"})  # corrected after the training
        display("b", "finished", ended(4))
    assert file.getvalue().splitlines()[-1].startswith("finished b after 4.00 s, 92.00 %")


@pytest.mark.parametrize("quiet", [False, True])
def test_what_runs_note_at_their_start_is_said_once(quiet: bool) -> None:
    file = io.StringIO()
    with SweepDisplay(Console(file=file, width=200), quiet=quiet) as display:
        display("", "plan", PLAN)
        for name, notes in (("a", ["heads are never trained"]), ("b", ["heads are never trained", "no held-out part"])):
            display(name, "start", {})
            display(name, "begun", {"round": 0, "notes": notes})
    said = [line for line in file.getvalue().splitlines() if line.startswith("note: ") and "finished" not in line]
    assert said == ["note: a: heads are never trained", "note: b: no held-out part"]


@pytest.mark.parametrize("quiet", [False, True])
def test_without_a_terminal_there_is_a_line_a_minute(monkeypatch, quiet: bool) -> None:
    monkeypatch.setattr(sweep_display, "PERIOD", 0.02)
    file, clock = io.StringIO(), Clock()
    with SweepDisplay(Console(file=file, width=200), quiet=quiet, clock=clock) as display:
        played(display, clock)
        time.sleep(0.2)
        display("a", "finished", ended(9))
    said = file.getvalue().splitlines()
    if quiet:
        assert said == []
        return
    assert said[:3] == [
        "note: 1 of 4 runs are finished already",
        "note: 1 finished runs go on to more rounds, as with resume --rounds",
        "3 runs, 2 at a time, in sweeps/s",
    ]
    assert said[3].startswith("all runs: 0/3 finished, about ")
    assert said[-1] == "finished a after 9.00 s, 50.00 %, clients failed: 3.0 of 10 in a round (1/3)"


def test_a_terminal_has_a_bar_for_each_run_and_for_all() -> None:
    file, clock = io.StringIO(), Clock()
    console = Console(file=file, width=120, force_terminal=True, color_system=None)
    with SweepDisplay(console, clock=clock) as display:
        played(display, clock)
        console.print("now:", display._bars.get_renderable())
    shown = file.getvalue().rpartition("now:")[2]
    for words in ("all runs", "0/3 finished, about 11 s left", "1/4 rounds, 50.00 %, 6.00 s left", "6/10 rounds"):
        assert words in shown


def test_a_notebook_has_a_bar_for_each_run_and_for_all() -> None:
    pages, clock = [], Clock()
    with NotebookSweepDisplay(pages.append, clock=clock) as display:
        played(display, clock)
        under_way = display.page()
        display("a", "failed", ended(3, "no <memory>"))
        display("b", "finished", ended(4))
    for shown in (
        "3 runs, 2 at a time, in sweeps/s",
        "<progress value='0' max='3'></progress>",
        "0/3 finished, about 11 s left",
        "<progress value='1' max='4'></progress>",
        "1/4 rounds, 50.00 %, 6.00 s left",
        "note: 1 of 4 runs are finished already",
    ):
        assert shown in under_way
    assert "failed a after 3.00 s (1/3): no &lt;memory&gt;" in pages[-1]
    assert "<details><summary>1 finished</summary>finished b after 4.00 s (2/3)</details>" in pages[-1]
