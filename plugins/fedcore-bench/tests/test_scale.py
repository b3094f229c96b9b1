"""The workload scale: rows by number of clients, sides in turn, memory of processes of their own."""

import json

import pytest
from typer.testing import CliRunner

from fedcore import FedcoreError
from fedcore.tools import app
from fedcore_bench import scale
from fedcore_bench.measure import Spread
from fedcore_bench.scale import Memory
from tests.sentences import raises


@pytest.fixture
def tiny(monkeypatch):
    config = {**scale.SCALE.config, "dataset": "digits", "local_epochs": 1}
    monkeypatch.setattr(scale, "SCALE", scale.Workload("scale", config, block=1))
    monkeypatch.setattr(scale, "COHORT", 2)


def test_ratios_are_to_the_first_number_of_clients(tiny, monkeypatch):
    peaks = {4: Memory(100.0, 50.0), 40: Memory(150.0, 75.0)}
    monkeypatch.setattr(scale, "peak_memory", lambda config, block: peaks[config.clients])
    first, second = scale.over_clients("fedavg", {"workers": 0, "device": "cpu"}, clients=[4, 40], blocks=2)
    assert (first.clients, second.clients, second.blocks, second.rounds) == (4, 40, 2, 1)
    assert first.ratio == Spread(1, 1, 1)
    assert second.seconds.least / first.seconds.greatest <= second.ratio.median
    assert second.ratio.median <= second.seconds.greatest / first.seconds.least
    assert (first.memory_ratio, second.memory_ratio) == (Memory(1, 1), Memory(1.5, 1.5))


@pytest.mark.slow
def test_memory_is_that_of_a_fresh_process_and_its_workers(tiny):
    ballast = bytearray(1 << 30)
    ballast[:: 1 << 12] = b"x" * (1 << 18)  # this process's own peak is not counted
    found = scale.peak_memory(scale.scaled_config("fedavg", 4, {"workers": 1, "device": "cpu"}), 1)
    assert scale.peaks().parent > 1000
    assert 100 < found.parent < 1000
    assert 100 < found.worker < 1000


@pytest.mark.slow
def test_a_process_that_fails_is_said(tiny):
    config = scale.scaled_config("fedavg", 4, {"workers": 0, "device": "cpu", "dataset": "nope"})
    with raises(FedcoreError, "4 clients", "dataset 'nope'"):
        scale.peak_memory(config, 1)


def test_the_command_prints_rows_by_number_of_clients(tiny, monkeypatch):
    monkeypatch.setattr(scale, "peak_memory", lambda config, block: Memory(100.0 * config.clients, None))
    arguments = ["bench", "--workload", "scale", "--clients", "4", "--clients", "8", "--workers", "0", "--blocks", "1"]
    found = CliRunner().invoke(app, [*arguments, "--json"])
    assert found.exit_code == 0, found.output
    rows = json.loads(found.stdout)
    assert [(row["name"], row["method"], row["clients"]) for row in rows] == [
        ("scale", method, count) for method in ("fedavg", "moon") for count in (4, 8)
    ]
    assert rows[1]["memory_ratio"] == {"parent": 2.0, "worker": None}
    shown = CliRunner().invoke(app, [*arguments, "--plugin", "fedavg"], env={"COLUMNS": "200"})
    assert [line.split()[1] for line in shown.stdout.splitlines() if "fedavg" in line] == ["fedavg"] * 2
    assert "moon" not in shown.stdout


def test_what_grows_is_the_number_of_clients_only():
    configs = [scale.scaled_config("fedavg", count, {}) for count in scale.CLIENTS]
    assert [config.cohort_size for config in configs] == [50] * 4
    different = {field for c in configs for field, value in c if value != getattr(configs[0], field)}
    assert different == {"clients", "participation"}


@pytest.mark.parametrize(
    ("arguments", "said"), [(["--clients", "0"], "--clients"), (["--plugin", "nope"], "unknown plugin 'nope'")]
)
def test_what_cannot_be_measured_is_said(arguments, said):
    found = CliRunner().invoke(app, ["bench", "--workload", "scale", *arguments])
    assert found.exit_code == 2
    assert said in found.stderr
