"""The progress of a run in a terminal."""

from __future__ import annotations

from fedcore_console.live import LiveDisplay, rounds_table
from tests.cli import events
from tests.cli.test_terminal import Clock, console, drawn, output


def test_live_display_draws_progress_and_the_last_rounds() -> None:
    target, clock = console(terminal=True), Clock()
    display = LiveDisplay(target, clock=clock)
    with display:
        display("start", events.start(notes=("a note",)))
        display("client", {"client": 0, "failed": True})
        assert "0/3 rounds  round 1: 1/4 clients, 1 failed  0:00 elapsed" in drawn(display.render())
        for client in (1, 2, 3):
            display("client", {"client": client, "failed": False})
        assert "round 1: evaluating" in drawn(display.render())
        clock.now += 65
        display("round", events.record(0, failures=(events.failure(0, "error", "oh"),)))
        picture = drawn(display.render())
        assert "1/3 rounds  round 2: 0/4 clients  1:05 elapsed\n" in picture.replace(" \n", "\n")
        for word in ("round", "global %", "task", "moon.contrast", "failed", "s/round"):
            assert word in picture
        clock.now += 30
        display("round", events.record(1))
        assert "1:35 elapsed, 0:30 left" in drawn(display.render())
        for round_ in range(2, 12):
            display("round", events.record(round_))
        assert "finishing" in drawn(display.render())
        display("done", events.summary())
    text = output(target)
    assert "note: a note" in text
    assert "round 1: client 0 failed (error): oh" in text
    picture = drawn(display.render())
    assert "done" in picture
    assert [line.split()[0] for line in picture.splitlines()[3:-2]] == [str(round_) for round_ in range(5, 13)]


def test_live_display_stops_when_the_run_fails() -> None:
    target = console(terminal=True)
    display = LiveDisplay(target)
    try:
        with display:
            display("start", events.start())
            raise RuntimeError
    except RuntimeError:
        pass
    assert output(target).endswith("\x1b[?25h")  # the cursor is back


def test_rounds_fit_into_a_narrow_terminal() -> None:
    losses = {f"plugin.term{number}": 0.5 for number in range(12)}
    personal = {"personal": {"accuracy": 0.25}, "global_local": {"accuracy": 0.125}}
    picture = drawn(rounds_table([events.record(0, losses={"task": 1.0, **losses}, **personal)], 80), 80)
    assert all(len(line) <= 80 for line in picture.splitlines())
    for word in ("global %", "global_local %", "personal %", "25.00", "12.50", "task", "s/round"):
        assert word in picture
    assert "…" not in picture


def test_a_figure_of_another_task_is_no_percentage() -> None:
    record = {**events.record(0), "metrics": {"global": {"rmse": 45.4, "loss": 0.3}}}
    picture = drawn(rounds_table([record], 100), 100)
    assert "rmse 45.4" in picture
    assert "%" not in picture
