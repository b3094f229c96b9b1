from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

import fedcore
from fedcore.base.output import clean, duration, number, percent, size, stopwatch
from fedcore.cli.summary import metrics_tables, profile_table, summary_tables
from fedcore.runs import terminal
from fedcore.runs.progress import Progress
from fedcore.runs.terminal import Display, MinuteDisplay, PlainDisplay, make_display

from . import events


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


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
        "moon on digits (mlp), dirichlet, 4 clients, 3 rounds, in /runs/one",
        "note: 12 samples were moved [red]",
        # the workers have started in the first round, too: it does not tell how long others take
        "round 1/3  global 50.00 %  task 1.5000  moon.contrast 0.2500  2.00 s/round",
        "round 2/3  task 1.5000  moon.contrast 0.2500  2.00 s/round  4.00 s left",
    ]


def test_a_script_prints_a_line_a_minute_and_nothing_before() -> None:
    target, clock = console(width=30), Clock()
    display = MinuteDisplay(target, clock=clock)
    with pytest.warns(RuntimeWarning, match="12 samples"):
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
        "moon on digits (mlp), dirichlet, 4 clients, 3 rounds, in /runs/one",
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


def test_summary_shows_every_protocol_and_figure() -> None:
    picture = drawn(summary_tables(events.summary(), 200), width=200)
    for words in (
        ("global ", "93.06", "0.1234"),
        ("global_local", "91.00"),
        ("personal ", "95.50", "80.00", "1.00", "4"),
        ("personal_global", "70.00"),
        ("global_before_correction", "92.00"),
        ("best by validation: round 1, personal 96.00 %, global 94.00 % there, before the correction",),
        ("model", "800 kB", "500 kB", "2.4 MB"),
        ("scaffold", "200 kB", "0 B"),
        ("total", "1 MB", "3 MB"),
        ("time: 1 min 05 s", "local training 19 s", "moon 10 %", "workers 2"),
    ):
        assert any(all(word in line for word in words) for line in picture.splitlines()), words


def test_the_time_of_a_resumed_run_is_of_its_last_rounds() -> None:
    summary = events.summary()
    summary["time"]["rounds"] = 2
    assert "time of the last 2 of 3 rounds: 1 min 05 s; per round" in drawn(summary_tables(summary, 200), width=200)


@pytest.mark.parametrize("width", [80, 110, 120])
def test_a_narrow_summary_cuts_no_figure_off(width: int) -> None:
    summary = events.summary()
    picture = drawn(metrics_tables(summary["metrics"], width), width=width)
    assert "…" not in picture
    for row in summary["metrics"].values():
        if row and "std" in row:
            assert all(percent(row[name]) in picture for name in ("accuracy", "std", "worst10"))
    alone = {**summary["metrics"], "global": None, "global_reason": "parameters stay"}
    assert "parameters stay" in drawn(metrics_tables(alone, width), width=width)


def test_no_global_model_says_why() -> None:
    failures = [{"client": client, "kind": "raised", "message": f"no [b] {client}"} for client in range(3)]
    assert "client 0 and 2 more could not be evaluated by every protocol: no [b] 0" in drawn(
        metrics_tables({"global": None, "failed": 3, "failures": failures}, 120)
    )
    picture = drawn(metrics_tables({"global": None, "global_reason": "no global model: [b] stays"}, 120))
    assert "no global model: [b] stays" in picture


def test_a_metric_says_over_how_many_clients_or_domains_its_mean_is() -> None:
    row = {"accuracy": 0.9, "loss": None, "auroc": 0.7, "auroc_mean": 0.6, "mean_over": {"auroc": 3}, "undefined": 2}
    on_clients = row | {"std": 0.1, "worst10": 0.5, "clients": 4, "untrained": 0}
    picture = drawn(metrics_tables({"global": None, "mean_domain": row, "global_local": on_clients}, 120))
    assert re.search(r"mean_domain +0.7000 \(over 3\)", picture)
    assert re.search(r"mean over clients +0.6000 \(over 3\)", picture)
    assert "output is nan or infinite: 2 in mean_domain, 2 in global_local" in " ".join(picture.split())


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


def test_the_profile_says_where_a_round_went():
    picture = drawn(profile_table(events.summary()["time"]), width=120)
    rows = {line.split("  ")[0].strip(): line for line in picture.splitlines() if line.strip()}
    assert "19.000" in next(line for name, line in rows.items() if name.startswith("local training"))
    assert "90.5" in next(line for name, line in rows.items() if name.startswith("local training"))  # of 20 + 0.4 + 0.6
    assert "20.0" in next(line for name, line in rows.items() if name.startswith("idle workers"))  # of 40 + 10
    assert "10.0" in next(line for name, line in rows.items() if name.startswith("hooks of moon"))  # of 40
