"""Columns of what is predicted: numbers, several labels, times with events."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import fedcore
from fedcore import ConfigError, DataError
from fedcore.data import load_dataset
from fedcore_tasks import MultiLabel, Regression, RegressionHuber, Survival
from tests.sentences import raises

from .conftest import save

pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"bmi": rng.normal(25, 4, 150).round(1), "sex": rng.choice(["F", "M"], 150)})
    frame["age"] = (40 + frame["bmi"] + rng.integers(0, 9, 150)).astype(int)
    frame["days"], frame["died"] = rng.integers(1, 900, 150), rng.integers(0, 2, 150)
    frame["diabetic"], frame["grade"] = (frame["bmi"] > 26).astype(int), rng.choice([1, 2, 5], 150)
    frame.loc[3, "pressure"] = np.nan
    path: Path = tmp_path_factory.mktemp("targets") / "patients.csv"
    frame.to_csv(path, index=False)
    return path


def test_an_event_that_is_not_0_or_1_is_noted(table, tmp_path) -> None:
    """R writes 1 for a censored time and 2 for an event."""
    frame = pd.read_csv(table)
    frame.assign(status=frame["died"] + 1).to_csv(tmp_path / "patients.csv", index=False)
    for target, noted in {"days,status": True, "died,days": True, "days,died": False, "age,bmi": False}.items():
        notes = load_dataset(f"hf:{tmp_path / 'patients.csv'}?columns=sex&target={target}").notes
        assert any("TIME,EVENT" in note for note in notes) == noted


@pytest.mark.parametrize(
    ("target", "task"),
    [
        ("age", Regression),
        ("age,bmi", Regression),
        ("died", Regression),
        ("died,diabetic", MultiLabel),
        ("days,died", Survival),
        ("died,days", Regression),
    ],
)
def test_targets_are_the_numbers_of_the_file_and_say_the_task(table, target, task) -> None:
    columns = target.split(",")
    dataset = load_dataset(f"hf:{table}?columns=sex&target={target}")
    values = pd.read_csv(table)[columns].to_numpy(dtype=np.float64)
    labels = np.concatenate([dataset.train.labels.numpy(), dataset.test.labels.numpy()]).reshape(150, -1)
    assert type(dataset.task) is task
    assert sorted(map(tuple, labels.tolist())) == sorted(map(tuple, values.tolist()))
    assert len(dataset.test) == 30


def test_the_part_for_testing_has_its_share_of_events_and_of_large_numbers(table) -> None:
    events = load_dataset(f"hf:{table}?columns=bmi,sex&target=days,died").test.labels[:, 1]
    assert abs(float(events.mean()) - pd.read_csv(table)["died"].mean()) < 0.07
    ages = load_dataset(f"hf:{table}?columns=bmi,sex&target=age").test.labels.numpy()
    whole = pd.read_csv(table)["age"]
    assert abs((ages > whole.median()).mean() - (whole > whole.median()).mean()) < 0.1


def test_a_run_from_the_command_line_has_figures_in_the_columns_units(table, tmp_path, cli) -> None:
    out = tmp_path / "run"
    name = f"hf:{table}?columns=bmi&target=age"
    options = ("--clients", "2", "--partition", "iid", "--rounds", "30", "--lr", "0.02", "--batch-size", "16")
    result = cli("train", "--dataset", name, *options, "--out", str(out), "--quiet")
    assert result.exit_code == 0, result.stderr
    ages = pd.read_csv(table)["age"]
    figures = json.loads((out / "summary.json").read_text())["metrics"]["global"]
    assert 0 < figures["rmse"] < 0.8 * ages.std()  # the age is 40 + bmi + up to 8, the mean alone has the deviation
    test = load_dataset(name).test
    predicted = fedcore.load_run(out).predict(test.gather(torch.arange(len(test))))
    assert ages.min() - 10 < float(np.mean(predicted)) < ages.max() + 10


def test_another_task_reads_the_same_numbers(table) -> None:
    dataset = load_dataset(f"hf:{table}?columns=bmi,sex&target=age", task="regression-huber")
    assert type(dataset.task) is RegressionHuber
    assert set(dataset.test.labels.tolist()) <= set(pd.read_csv(table)["age"].astype(float))


def test_numbers_of_classes_are_not_taken_for_values(table) -> None:
    with raises(DataError, "(1, 2, 5)", "?target=COLUMN"):
        load_dataset(f"hf:{table}?columns=bmi,sex&label=grade", task="regression")
    assert load_dataset("breast-cancer", task="multilabel").task.name == "multilabel"  # malignant or benign: 0 or 1
    assert load_dataset("digits", task="regression").task.name == "regression"  # 0 to 9 are values, too


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("columns=bmi&target=age&label=grade", ("?label", "?target")),
        ("columns=bmi&target=sex", ("'sex'", "?label=sex")),
        ("columns=bmi&target=pressure", ("'pressure'", "150 of the 150")),
        ("columns=bmi,age&target=age", ("'age'",)),
        ("columns=bmi&target=agee", ("'agee'", "bmi, sex, age")),
        ("target=age&block_size=8", ("?block_size", "?target")),
    ],
)
def test_what_cannot_be_a_target_is_refused(table, options, named) -> None:
    with raises(ConfigError, *named):
        load_dataset(f"hf:{table}?{options}")


def test_a_test_split_without_the_target_is_refused(tmp_path) -> None:
    numbers = {"age": [30.0, 40.0] * 10, "bmi": [20.0, 25.0, 30.0, 21.0] * 5}
    folder = save(tmp_path / "set", train=numbers, test={"bmi": numbers["bmi"]})
    with raises(ConfigError, "'age'", "bmi"):
        load_dataset(f"hf:{folder}?columns=bmi&target=age")


def test_a_label_with_fractions_is_answered_with_the_option(table) -> None:
    with raises(ConfigError, "'bmi'", "?target=bmi"):
        load_dataset(f"hf:{table}?columns=sex&label=bmi")
