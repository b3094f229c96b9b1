"""Tables with words and empty cells: the numbers against scikit-learn's, what training rows say, and new rows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import fedcore
from fedcore import ConfigError, DataError, RunConfig
from fedcore.data import load_dataset, make_partition
from fedcore.tools import Run
from fedcore_testing import federate, partition_of
from fedcore_zoo import Cells, Recipe, fixed_split
from tests.sentences import raises, warns

pytest.importorskip("datasets")

OPTIONS = "?columns=age,creatinine,sex,ward&missing=median&indicators=yes&label=dead"


def patients(rows: int = 120, seed: int = 0) -> pd.DataFrame:
    """Return a table whose rare ward has a single patient, with empty cells in two columns."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"age": rng.integers(40, 90, rows), "creatinine": rng.gamma(4, 0.3, rows).round(2)})
    frame["sex"], frame["ward"] = rng.choice(["F", "M"], rows), rng.choice(["A", "B", "C"], rows)
    frame.loc[rng.random(rows) < 0.2, "creatinine"] = np.nan
    frame.loc[rng.random(rows) < 0.1, "ward"] = None
    frame["dead"] = (frame["age"] + 20 * (frame["sex"] == "M") > 75).astype(int)
    return frame


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("table") / "patients.csv"
    patients().to_csv(path, index=False)
    return path


def of_scikit_learn(train: pd.DataFrame) -> ColumnTransformer:
    numbers = make_pipeline(SimpleImputer(strategy="median"), StandardScaler())
    words = make_pipeline(SimpleImputer(strategy="most_frequent"), OneHotEncoder(handle_unknown="ignore"))
    made = ColumnTransformer([("numbers", numbers, ["age", "creatinine"]), ("words", words, ["sex", "ward"])])
    return made.fit(train.replace({None: np.nan}))


def trained(table: Path, folder: Path, **options):
    how = {"model": "auto", "clients": 3, "partition": "iid", "client_test_fraction": 0.3, "rounds": 1}
    return federate(folder, dataset=f"hf:{table}{OPTIONS}", **how | options)


def test_the_numbers_are_those_of_scikit_learn_for_the_clients_training_rows(table, tmp_path):
    result = trained(table, tmp_path)
    frame = patients()
    loaded = fixed_split(frame["dead"].to_numpy(), 0.2)[0]
    rows = torch.cat([*partition_of(result).train]).sort().values.numpy()
    assert len(rows) < len(loaded), "held-out rows say nothing"
    fitted = of_scikit_learn(frame.iloc[loaded[rows]])
    new = patients(50, seed=1)
    expected = fitted.transform(new.replace({None: np.nan}))
    found = result.inputs.prepare(new[["sex", "ward", "creatinine", "age", "dead"]]).numpy()
    np.testing.assert_allclose(found[:, : expected.shape[1]], expected, atol=1e-5)
    holes = np.column_stack([new["creatinine"].isna(), new["ward"].isna()])
    np.testing.assert_array_equal(found[:, expected.shape[1] :], holes)
    assert result.predict(new).shape == (50,)


@pytest.mark.parametrize("choice", ["as-loaded", "global", "none"])
def test_public_rows_of_another_table_are_made_by_the_runs_recipe(table, tmp_path, choice):
    """By their own mean the rows of older patients were as young as the others, and raw models saw scaled rows."""
    patients(90, seed=3).assign(age=lambda frame: frame["age"] + 30).to_csv(tmp_path / "older.csv", index=False)
    names = [f"hf:{file}{OPTIONS}" for file in (table, tmp_path / "older.csv")]
    options = {"normalize": choice, "clients": 3, "partition": "iid", "model": "mlp", "out": str(tmp_path / "run")}
    with Run.new(RunConfig(dataset=names[0], public=names[1], **options)) as run:
        made = run.dataset
    raw = load_dataset(names[1]).train.cells
    assert torch.equal(made.public.samples.inputs, made.train.made.apply(raw, "public"))
    apart = 30 if choice == "none" else 30 / made.train.std[0]
    ages = [samples.inputs[:, 0].mean() for samples in (made.public.samples, made.train)]
    assert ages[0] - ages[1] == pytest.approx(apart, rel=0.2)


def test_a_category_without_a_training_row_is_named_and_is_none_of_the_columns(table, tmp_path):
    result = trained(table, tmp_path)
    new = patients(4, seed=2).assign(ward="Z")
    with warns(UserWarning, "'ward'", "'Z'"):
        found = result.inputs.prepare(new)
    assert not found[:, 4:7].any()
    assert found[:, 2:4].sum(dim=1).tolist() == [1.0] * 4


def test_rare_categories_of_held_out_rows_are_named_when_the_run_begins(tmp_path):
    frame = patients()
    frame["ward"] = [f"w{k}" for k in range(len(frame))]
    frame.to_csv(tmp_path / "rare.csv", index=False)
    with warns(RuntimeWarning, "categories of 'ward'"):
        trained(tmp_path / "rare.csv", tmp_path)


def test_a_run_can_go_on_and_be_exported_with_its_recipe(table, tmp_path):
    from fedcore_export import export_run

    result = trained(table, tmp_path)
    again = fedcore.load_run(result.directory)
    assert again.inputs == result.inputs
    export_run(result.directory, "safetensors", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert '"creatinine": ' in card
    assert '"ward": ["A", "B", "C"]' in card
    longer = fedcore.resume(result.directory, changes={"rounds": 2})
    assert longer.inputs == result.inputs


def test_workers_have_the_same_bits(table, tmp_path):
    one, two = (trained(table, tmp_path, workers=workers) for workers in (0, 2))
    assert all(
        torch.equal(a, b) for a, b in zip(one.model.state_dict().values(), two.model.state_dict().values(), strict=True)
    )


def test_numbers_can_be_categories(table):
    with raises(ConfigError, "?categories=sex", "?columns=age"):  # it was left out
        load_dataset(f"hf:{table}?categories=sex&label=dead&columns=age")
    found = load_dataset(f"hf:{table}?categories=age&label=dead&columns=age,sex")
    assert {column.partition("=")[0] for column in found.train.columns} == {"age", "sex"}
    assert (found.train.inputs.sum(dim=1) == 2).all()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("?columns=age,creatinine&label=dead", ("'creatinine'", "?missing=median")),
        ("?columns=age,sex&label=dead&missing=mean", ("'missing'", "'most-frequent'")),
    ],
)
def test_what_is_refused(table, options, named):
    with raises(ConfigError, *named):
        load_dataset(f"hf:{table}{options}")


def loaded(folder: Path, frame: pd.DataFrame, options: str = OPTIONS):
    frame.to_csv(folder / "site.csv", index=False)
    return load_dataset(f"hf:{folder / 'site.csv'}{options}")


def test_blanks_around_words_make_no_other_category_class_or_patient(tmp_path):
    plain = patients().assign(dead=lambda frame: frame["dead"].map({0: "no", 1: "yes"}))
    plain["who"] = [f"p{k // 2}" for k in range(len(plain))]
    blank = plain.copy()
    blank.loc[::3, ["sex", "dead", "who"]] += " "
    blank.loc[::5, "ward"] = blank.loc[::5, "ward"].where(blank["ward"].isna(), "  " + blank["ward"].fillna(""))
    found = [loaded(tmp_path, frame, f"{OPTIONS}&groups=who&source=sex") for frame in (plain, blank)]
    for name in ("class_names", "source_names", "input_shape"):
        assert getattr(found[0], name) == getattr(found[1], name)
    assert torch.equal(found[0].train.inputs, found[1].train.inputs)
    assert torch.equal(found[0].groups, found[1].groups)


def test_words_that_differ_in_capitals_are_named_once_for_categories_and_classes(tmp_path):
    frame = patients().assign(dead=lambda frame: frame["dead"].map({0: "no", 1: "yes"}))
    frame.loc[:30, "sex"] = frame.loc[:30, "sex"].str.lower()
    frame.loc[:20, "dead"] = frame.loc[:20, "dead"].str.upper()
    assert any("'dead'" in note and "'NO', 'no'" in note for note in loaded(tmp_path, frame).notes)
    with warns(RuntimeWarning, "'sex'", "'F', 'f'"):
        trained(tmp_path / "site.csv", tmp_path)


def test_cells_that_pandas_reads_as_empty_are_empty(tmp_path):
    """A category 'None' of training would be an empty cell of the DataFrame that the model later gets."""
    frame = patients()
    expected = loaded(tmp_path, frame).train.inputs
    frame["ward"] = [
        ward if isinstance(ward, str) else ("NA", "None", "n/a", "")[k % 4] for k, ward in enumerate(frame["ward"])
    ]
    frame["creatinine"] = [
        cell if cell == cell else ("NA", "NULL")[k % 2] for k, cell in enumerate(frame["creatinine"])
    ]
    assert torch.equal(loaded(tmp_path, frame).train.inputs, expected)
    result = trained(tmp_path / "site.csv", tmp_path)
    again = result.inputs.prepare(pd.read_csv(tmp_path / "site.csv"))
    assert set(again[:, 4:].sum(dim=1).tolist()) <= {1.0, 2.0, 3.0}, "each row is of one ward"


@pytest.mark.parametrize(
    ("column", "cells", "words"),
    [
        ("age", lambda k: f"{40 + k % 30},5", ("'age'", "decimal=','", "?categories=age")),
        ("age", lambda k: f"{1000 + k:,}", ("'age'", "thousands=','")),
        ("age", lambda k: f"${1 + k % 30},000,000", ("'age'", "'$1,000,000'")),
        ("age", lambda k: f"{k % 30}%", ("'age'", "'0%'")),
        ("age", lambda k: f"{1 + k % 30}.12.2020", ("'age'", "'1.12.2020'", "days since")),
        ("age", lambda k: f"{1 + k % 12}/{1 + k % 30}/2020 8:15", ("'age'", "'1/1/2020 8:15'", "days since")),
        ("age", lambda k: "unknown" if k == 7 else 40 + k % 30, ("'age'", "'unknown'", "?categories=age")),
        ("age", lambda k: f"2020-01-{1 + k % 30:02}", ("'age'", "days since")),
    ],
)
def test_numbers_that_are_written_as_words_are_no_categories(tmp_path, column, cells, words):
    frame = patients()
    frame[column] = [cells(k) for k in range(len(frame))]
    with raises(ConfigError, *words):
        loaded(tmp_path, frame)
    assert loaded(tmp_path, frame, f"{OPTIONS}&categories={column}").train.columns


def test_numbers_that_a_parquet_file_holds_as_texts_are_no_categories(tmp_path):
    """In a CSV file the same cells are numbers."""
    patients().assign(age=[str(40 + k % 30) for k in range(120)]).to_parquet(tmp_path / "site.parquet")
    with raises(ConfigError, "'age'", "'40'", "?categories=age"):
        load_dataset(f"hf:{tmp_path / 'site.parquet'}{OPTIONS}")
    found = load_dataset(f"hf:{tmp_path / 'site.parquet'}{OPTIONS}&categories=age").train
    assert "age=40" in found.columns


def test_semicolons_and_decimal_commas_are_told_with_the_way_out(tmp_path):
    patients().to_csv(tmp_path / "site.csv", index=False, sep=";", decimal=",")
    with raises(ConfigError, "';'", "decimal=','"):
        load_dataset(f"hf:{tmp_path / 'site.csv'}{OPTIONS}")


def test_record_numbers_are_named(tmp_path):
    frame = patients().sort_values("dead").assign(record=range(1000, 1120))
    notes = loaded(tmp_path, frame, "?columns=age,record&label=dead").notes
    assert any("in each row" in note and "'record'" in note and "'age'" not in note for note in notes)
    assert not any("in each row" in note for note in loaded(tmp_path, frame).notes)


def test_numbers_of_a_column_with_gaps_are_the_categories_of_training(tmp_path):
    """pandas makes 3 to 3.0 where a cell is empty."""
    frame = patients().assign(stage=[k % 4 for k in range(120)])
    frame.to_csv(tmp_path / "site.csv", index=False)
    name = f"hf:{tmp_path / 'site.csv'}?columns=age,stage&categories=stage&missing=median&label=dead"
    result = federate(tmp_path, dataset=name, model="auto", clients=2, partition="iid", rounds=1)
    new = frame.iloc[:6].astype({"stage": float})
    assert torch.equal(result.inputs.prepare(new), result.inputs.prepare(frame.iloc[:6]))


@pytest.mark.parametrize("rows", [1, 9])
def test_a_clients_part_may_have_few_rows_of_one_class(tmp_path, rows):
    frame = patients().iloc[:rows].assign(dead=1, creatinine=np.nan)
    with raises(ConfigError, rows, "?part=yes"):
        loaded(tmp_path, frame)
    found = loaded(tmp_path, frame, "?missing=median&label=dead&part=yes&categories=sex")
    assert (len(found.train), len(found.test), found.num_classes) == (rows, 0, 1)
    assert found.train.cells.columns == ("age", "creatinine", "sex")


def test_a_table_of_words_and_empty_cells_has_other_tasks(table, tmp_path):
    pytest.importorskip("fedcore_tasks")
    result = trained(table, tmp_path, task="regression")
    assert np.isfinite(result.metrics["global"]["rmse"])


def test_new_rows_with_other_columns_are_refused(table, tmp_path):
    result = trained(table, tmp_path)
    with raises(DataError, "'ward'", 4):
        result.predict(patients().drop(columns="ward"))
    with raises(DataError, "'age'", "'old'"):
        result.predict(patients().assign(age="old"))
    wide = patients()[["age", "creatinine", "sex", "ward", "age"]]
    with raises(DataError, 2, "'age'"):
        result.predict(wide)
    for other in (wide.set_axis(range(5), axis=1), patients().iloc[0]):  # the first columns were taken
        with raises(DataError, "expected (n, 4)"):
            result.predict(other)


def test_a_patients_rows_are_on_one_side_of_every_split(tmp_path):
    frame = patients(300).assign(patient=[f"p{k // 3}" for k in range(300)])
    frame.to_csv(tmp_path / "visits.csv", index=False)
    name = f"hf:{tmp_path / 'visits.csv'}?columns=age,sex&label=dead&groups=patient"
    data = load_dataset(name)
    assert len(data.groups) == len(data.train)
    assert len(data.train) % 3 == len(data.test) % 3 == 0
    assert len(data.test) == pytest.approx(60, abs=60)
    split = make_partition(data, RunConfig(partition="iid", clients=3, client_test_fraction=0.3))
    sides = [{*data.groups[part].tolist()} for part in (*split.train, *split.test)]
    assert sum(map(len, sides)) == len(set.union(*sides)) == len(data.train) // 3
    frame.loc[5, "patient"] = None
    frame.to_csv(tmp_path / "visits.csv", index=False)
    with raises(ConfigError, "'patient'"):
        load_dataset(name)


def test_a_new_row_may_lack_a_category_as_pandas_writes_it(table, tmp_path):
    """One patient whose sex is not known; pandas' own types have a value of their own for empty cells."""
    result, new = trained(table, tmp_path), patients(6, seed=1)
    most_frequent = result.inputs.recipe["fill"]["sex"]
    filled = result.inputs.prepare(new.assign(sex=most_frequent))
    assert torch.equal(result.inputs.prepare(new.assign(sex=None)), filled)
    assert torch.equal(result.inputs.prepare(new.convert_dtypes()), result.inputs.prepare(new))
    assert result.predict(new.head(1).assign(sex=None)).shape == (1,)


def test_a_column_of_words_may_be_empty(tmp_path):
    frame = patients().assign(ward=pd.Series([None] * 120, dtype="string"))
    frame.to_parquet(tmp_path / "site.parquet")
    found = load_dataset(f"hf:{tmp_path / 'site.parquet'}{OPTIONS}").train
    assert "sex=F" in found.columns
    assert not any(column.startswith("ward=") for column in found.columns)


def test_an_option_that_stands_twice_is_refused_and_a_plus_is_no_blank(tmp_path):
    frame = patients().rename(columns={"age": "CD4+"})
    with raises(ConfigError, "'columns'"):
        loaded(tmp_path, frame, "?columns=CD4+&columns=sex&label=dead")
    assert loaded(tmp_path, frame, "?columns=CD4+,sex&label=dead").train.columns[0] == "CD4+"


def test_patients_that_each_site_numbers_itself_are_refused(tmp_path):
    """Patient 3 of A and patient 3 of B are two: as one group the rows of both would be at one client."""
    frame = patients(300).assign(patient=[k // 3 % 50 for k in range(300)], site=["AB"[k // 150] for k in range(300)])
    own = frame.assign(patient=frame["site"] + "-" + frame["patient"].astype(str))
    own.loc[0, "site"] = "B"  # a patient who went to another hospital
    options, how = "?columns=age,sex&label=dead&groups=patient&source=site", {"clients": 2, "partition": "natural"}
    for order in (frame.index, np.random.default_rng(0).permutation(300)):
        with raises(ConfigError, "--partition natural", "groups"):
            make_partition(loaded(tmp_path, frame.loc[order], options), RunConfig(**how))
        split = make_partition(loaded(tmp_path, own.loc[order], options), RunConfig(**how))
        assert abs(np.diff(split.train.sizes)) < 30
    assert make_partition(loaded(tmp_path, frame, options), RunConfig(clients=2, partition="iid")).num_clients == 2


@pytest.mark.parametrize("groups", ["", "&groups=patient"])
def test_a_site_of_one_patient_is_a_client(tmp_path, groups):
    """Of a table without a test part a fifth is split off, which may have all rows of a small site."""
    frame = patients(200).assign(patient=range(200))
    frame["site"] = [f"small {k}" if k < 20 else "large" for k in frame["patient"]]
    assert frame["site"].iloc[fixed_split(frame["dead"], 0.2)[0]].nunique() < 21
    found = loaded(tmp_path, frame, f"?columns=age,sex&label=dead&source=site{groups}")
    assert len(found.source_names) == 21
    assert len(found.test) > 0


def test_the_card_of_an_export_has_the_recipe(table, tmp_path):
    """Its line makes the same numbers of raw rows as the run does."""
    from fedcore_export import export_run

    result = trained(table, tmp_path, normalize="client")
    card = (export_run(result.directory, "safetensors", tmp_path / "out").directory / "README.md").read_text()
    recipe = Recipe.from_json(json.loads(re.search(r"`(\{\"by\".*\})`", card)[1]))
    new = patients(9, seed=1)
    found = recipe.apply(Cells.read(new, recipe.columns, recipe.words), "new")
    assert torch.equal(found, result.inputs.prepare(new))
