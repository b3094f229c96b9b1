from __future__ import annotations

import io

import pytest
from rich.console import Console

import fedcore
from fedcore import RunConfig
from fedcore.base.output import clean, duration, number, percent, size
from fedcore.runs import terminal
from fedcore.runs.progress import Progress, headline
from fedcore.runs.terminal import Display, MinuteDisplay, PlainDisplay, make_display
from fedcore_console.words import stopwatch
from tests.sentences import warns

from . import events


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


HEADLINE = (
    "moon on digits (mlp), dirichlet, 4 clients, 3 rounds, sgd with momentum 0.9 and weight decay 1e-05, in /runs/one"
)


def console(*, terminal: bool = False, width: int = 120) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=terminal, width=width, markup=False, highlight=False, color_system=None
    )


def output(target: Console) -> str:
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


def drawn(thing: object, width: int = 120) -> str:
    target = console(width=width)
    target.print(thing)
    return output(target)


def test_plain_display_prints_a_line_per_round() -> None:
    target, clock = console(width=30), Clock()
    display = PlainDisplay(target, clock=clock)
    with display:
        display("start", events.start(notes=("12 samples were moved [red]",)))
        for client in range(4):
            display("client", {"client": client, "failed": False})
        clock.now += 2
        display("round", events.record(0))
        clock.now += 4
        display("round", events.record(1, none=True))
        display("done", events.summary())
    assert output(target).splitlines() == [
        HEADLINE,
        "note: 12 samples were moved [red]",
        # the workers have started in the first round, too: it does not tell how long others take
        "round 1/3  global 50.00 %  task 1.5000  moon.contrast 0.2500  2.00 s/round",
        "round 2/3  task 1.5000  moon.contrast 0.2500  2.00 s/round  4.00 s left",
    ]


def test_a_script_prints_a_line_a_minute_and_nothing_before() -> None:
    target, clock = console(width=30), Clock()
    display = MinuteDisplay(target, clock=clock)
    with warns(RuntimeWarning, 12):
        display("start", events.start(notes=("12 samples were moved",)))
    for round, passed in enumerate((30, 29)):
        clock.now += passed
        display("round", events.record(round))
    assert output(target) == ""
    clock.now += 2
    display("round", events.record(2))
    clock.now += 59
    display("round", events.record(3))
    assert [line.split("  ")[0] for line in output(target).splitlines()] == [
        HEADLINE,
        "round 3/3",
    ]


def test_a_run_of_a_script_shows_its_progress_unless_told_not_to(monkeypatch, tmp_path) -> None:
    shown = []
    monkeypatch.setattr(terminal, "script_display", lambda: shown.append(Progress()) or shown[-1])
    options = {"clients": 2, "rounds": 1, "samples": 100, "workers": 0}
    fedcore.run(**options, progress=False, out=tmp_path / "silent")
    fedcore.run(**options, notify=lambda event, said: None, out=tmp_path / "own")
    assert not shown
    fedcore.run(**options, out=tmp_path / "shown")
    assert [(display.done, display.ending) for display in shown] == [(1, "done")]


def test_failures_show_their_kinds_and_first_messages() -> None:
    target = console()
    display = PlainDisplay(target)
    display("start", events.start())
    failures = (
        events.failure(3, "nonfinite", "loss is nan\x1b[31m"),
        events.failure(1, "nonfinite", "loss is inf"),
        events.failure(2, "worker_lost", "gone"),
    )
    display("round", events.record(0, failures=failures))
    lines = output(target).splitlines()
    assert "3 of 4 clients failed" in lines[1]
    assert lines[2:] == [
        "  client 3 and 1 more failed (nonfinite): loss is nan�[31m",
        "  client 2 failed (worker_lost): gone",
    ]


def test_a_resumed_run_says_where_it_goes_on() -> None:
    target = console()
    PlainDisplay(target)("start", events.start(round_=2))
    assert "3 rounds, from round 3, in" in output(target)


def test_a_quiet_display_prints_the_notes_alone() -> None:
    target = console(terminal=True)
    with make_display(target, quiet=True) as display:
        display("start", events.start(notes=("--alpha 0.1 has no effect with --partition p.json",)))
        display("round", events.record(0))
        display("note", {"message": "stopped after round 1"})
    assert output(target).splitlines() == [
        "note: --alpha 0.1 has no effect with --partition p.json",
        "note: stopped after round 1",
    ]


def test_the_display_that_fits() -> None:
    assert isinstance(make_display(console()), PlainDisplay)
    assert isinstance(make_display(console(terminal=True)), PlainDisplay)  # colours forced into a file


def test_a_package_brings_the_display_where_it_suits(monkeypatch) -> None:
    own, target = Progress(), console()
    offers = {"first": lambda console: None, "second": lambda console: own if console is target else None}
    monkeypatch.setattr(terminal.registry, "available", lambda kind: offers if kind == "display" else {})
    monkeypatch.setattr(terminal.registry, "resolve", lambda kind, name: offers[name])
    assert make_display(target) is own
    assert type(make_display(console())) is PlainDisplay
    assert type(make_display(target, quiet=True)) is Display


def test_numbers_as_people_read_them() -> None:
    assert [duration(s) for s in (0.434, 12.3, 59.6, 185, 7800)] == [
        "0.43 s",
        "12 s",
        "1 min 00 s",
        "3 min 05 s",
        "2 h 10 min",
    ]
    assert [stopwatch(s) for s in (7.9, 3723)] == ["0:07", "1:02:03"]
    assert [size(n) for n in (0, 999, 1000, 479_352, 1_500_000_000)] == ["0 B", "999 B", "1 kB", "479 kB", "1.5 GB"]
    assert [number(x) for x in (None, 0.0, 1.5, 1e-6, float("nan"))] == ["-", "0.0000", "1.5000", "1.00e-06", "nan"]
    assert [percent(x) for x in (None, 0.93056)] == ["-", "93.06"]
    assert clean("a\x07\x1b[2Jb\n") == "a��[2Jb\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"momentum": 0.0, "weight_decay": 0.0}, "1 round, in /runs/one"),
        ({"weight_decay": 0.0}, "1 round, sgd with momentum 0.9, in /runs/one"),
        ({"optimizer": "adam", "weight_decay": 0.0}, "1 round, adam, in /runs/one"),
        ({"optimizer": "adamw", "weight_decay": 0.01}, "1 round, adamw with weight decay 0.01, in /runs/one"),
    ],
)
def test_the_first_line_names_an_optimizer_that_is_not_plain_sgd(options, words) -> None:
    config = RunConfig(rounds=1, **options)
    assert headline({"config": config, "round": 0, "directory": "/runs/one"}).endswith(words)
