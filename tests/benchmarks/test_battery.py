"""The GPU battery on commands of a second: limits, what a cut leaves, the table, what to carry to a bare machine."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


def loaded(name):
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


battery = loaded("battery")
RATIO = {"name": "W1", "beside_name": "reference", "seconds": {"median": 0.2}, "beside": {"median": 0.1},
         "ratio": {"median": 0.5, "least": 0.4, "greatest": 0.6}, "ratio_is": "throughput"}  # fmt: skip


def step(part, code, limit=20.0):
    return battery.Step(part, part, [sys.executable, "-c", code], limit)


def asked(folder, **changes):
    values = {"device": "cpu", "out": folder, "data_dir": None, "seconds": 100.0, "small": True, "parts": battery.PARTS}
    return battery.Asked(**{**values, **changes})


def test_a_step_that_is_cut_or_fails_leaves_what_it_printed_and_the_others_run(tmp_path, monkeypatch):
    row = 'print(\'{"method": "fedavg", "difference": 0.25}\', flush=True)'
    monkeypatch.setattr(
        battery,
        "steps",
        lambda given: [
            step("equality", f"{row}; import subprocess; subprocess.run(['sleep', '60'])", limit=1.0),
            step("bench", f"print('note'); print({json.dumps([RATIO], indent=1)!r})"),
            step("stacking", "print('| mlp | 4 | 1.25 |'); print('| cnn | 4 | 0.5 |')"),
            step("pfl", "raise SystemExit('no such workload')"),
        ],
    )
    done = battery.battery(asked(tmp_path))
    assert [each.ended for each in done] == ["cut", "whole", "whole", "failed"]
    assert done[0].seconds < 30
    assert done[0].rows == [{"method": "fedavg", "difference": 0.25}]
    assert done[1].rows == [RATIO]
    assert done[2].rows == [["mlp", "4", "1.25"], ["cnn", "4", "0.5"]]
    assert done[3].told == ["no such workload"]
    content = json.loads((tmp_path / "battery.json").read_text())
    assert [each["ended"] for each in content["steps"]] == ["cut", "whole", "whole", "failed"]
    table = (tmp_path / "battery.md").read_text()
    assert "self-test" in table
    assert "method fedavg, difference 0.25" in table
    assert "0.50 (0.40 to 0.60) of reference's throughput" in table
    assert "failed: no such workload" in table
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in rows}) == 1


def test_results_are_written_after_every_step(tmp_path, monkeypatch):
    held = f"import json; print(json.dumps(open({str(tmp_path / 'battery.json')!r}).read().count('ended')))"
    monkeypatch.setattr(battery, "steps", lambda given: [step("equality", "print('{}')"), step("bench", held)])
    done = battery.battery(asked(tmp_path))
    assert done[1].told == ["1"]


def test_no_step_begins_without_time_and_only_the_asked_parts_run(tmp_path, monkeypatch):
    monkeypatch.setattr(battery, "steps", lambda given: [step("equality", "1"), step("bench", "1"), step("pfl", "1")])
    done = battery.battery(asked(tmp_path, seconds=1.0, parts=("bench", "pfl")))
    assert [(each.part, each.ended) for each in done] == [("bench", "skipped"), ("pfl", "skipped")]


@pytest.mark.parametrize("small", [True, False])
def test_the_limits_of_all_parts_but_the_last_fit_into_25_minutes(small, tmp_path):
    all_steps = list(battery.steps(asked(tmp_path, small=small, device="cuda", data_dir=tmp_path)))
    assert [part for part in battery.PARTS if part in {each.part for each in all_steps}] == list(battery.PARTS)
    assert sum(each.limit for each in all_steps if each.part != "paper") <= 25 * 60 - 180 or small
    for each in all_steps:
        assert "--device" in each.command
        assert all(Path(word).is_file() for word in each.command if word.endswith(".py"))


def test_what_to_carry_is_all_that_fedcore_needs_but_torch():
    found = [line.partition("==")[0] for line in battery.wheels(["fedcore-fl", "fedcore-study"])]
    assert {"pydantic", "pluggy", "safetensors", "typer", "numpy", "pydantic-core"} <= set(found)
    assert not {"torch", "torchvision", "sympy", "fedcore-fl", "pytest"} & set(found)


def test_captured_plain_and_side_by_side_runs_are_compared():
    equality = loaded("equality")
    equality.RUN.update(rounds=1, local_epochs=1, model="mlp")
    assert equality.differences("fedavg", "cpu") == (0.0, 0.0, 0.0)


@pytest.mark.slow
def test_the_battery_tests_itself_on_a_cpu(tmp_path):
    assert battery.main(["--out", str(tmp_path), "--device", "cpu", "--small"]) == 0
    steps = json.loads((tmp_path / "battery.json").read_text())["steps"]
    assert {each["part"]: each["ended"] for each in steps} == dict.fromkeys(battery.PARTS[:-1], "whole")
    assert all(each["rows"] for each in steps)
