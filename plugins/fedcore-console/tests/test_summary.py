"""The figures of a run as tables."""

from __future__ import annotations

import re

import pytest

from fedcore.tools import output, rounds
from fedcore_console.summary import metrics_tables, profile_table, summary_tables, time_line
from tests.cli import events
from tests.cli.test_terminal import drawn


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
            assert all(output.percent(row[name]) in picture for name in ("accuracy", "std", "worst10"))
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


@pytest.mark.parametrize(
    ("figure", "said"), [("accuracy", "accuracy % by domain: a 91.00"), ("rmse", "rmse by domain: a 0.91")]
)
def test_the_figure_by_domain_is_that_of_the_task(figure: str, said: str) -> None:
    picture = drawn(metrics_tables({"global": {figure: 0.9, "loss": 0.1, "domains": {"a": 0.91, "b": None}}}, 120))
    assert said in picture


def test_a_process_that_had_no_round_to_train_has_no_seconds():
    summary = events.summary() | {"time": rounds.RoundTimes().split(2)}
    assert "per round local training 0.00 s" in time_line(summary).plain
    assert "0.000" in drawn(profile_table(summary["time"]), width=120)


def test_the_profile_says_where_a_round_went():
    picture = drawn(profile_table(events.summary()["time"]), width=120)
    rows = {line.split("  ")[0].strip(): line for line in picture.splitlines() if line.strip()}
    assert "19.000" in next(line for name, line in rows.items() if name.startswith("local training"))
    assert "90.5" in next(line for name, line in rows.items() if name.startswith("local training"))  # of 20 + 0.4 + 0.6
    assert "20.0" in next(line for name, line in rows.items() if name.startswith("idle workers"))  # of 40 + 10
    assert "10.0" in next(line for name, line in rows.items() if name.startswith("hooks of moon"))  # of 40
