"""A fitted transformer of scikit-learn that a user saved with skops: in runs, predictions, exports and federations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, PowerTransformer, StandardScaler

import fedcore
from fedcore import ConfigError, DataError
from fedcore.data import load_dataset
from fedcore_export import export_run
from fedcore_testing import federate
from fedcore_zoo import TableSamples
from tests.sentences import raises

from .conftest import Later

Later("datasets")
io = Later("skops.io")


def patients(rows: int = 90, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"age": rng.integers(40, 90, rows), "creatinine": rng.gamma(4, 0.3, rows).round(2)})
    frame["sex"] = rng.choice(["F", "M"], rows)
    frame.loc[rng.random(rows) < 0.2, ["creatinine"]] = np.nan
    frame.loc[rng.random(rows) < 0.1, "sex"] = np.nan
    frame["dead"] = (frame["age"] > 65).astype(int)
    return frame


def transformer() -> ColumnTransformer:
    numbers = make_pipeline(SimpleImputer(strategy="mean", add_indicator=True), PowerTransformer())
    words = make_pipeline(SimpleImputer(strategy="most_frequent"), OneHotEncoder(handle_unknown="ignore"))
    return ColumnTransformer([("words", words, ["sex"]), ("numbers", numbers, ["creatinine", "age"])])


@pytest.fixture
def fitted():
    """A transformer of other patients than the run's."""
    return transformer().fit(patients(200, seed=9)[["creatinine", "sex", "age"]])


def name_of(folder: Path, fitted, frame: pd.DataFrame | None = None) -> str:
    io.dump(fitted, folder / "prep.skops")
    (patients() if frame is None else frame).to_csv(folder / "site.csv", index=False)
    return f"hf:{folder / 'site.csv'}?pipeline={folder / 'prep.skops'}&label=dead"


def test_a_run_trains_on_what_the_transformer_gives_and_predict_and_export_have_it(tmp_path, fitted):
    name = name_of(tmp_path, fitted)
    result = federate(tmp_path, dataset=name, model="auto", clients=2, partition="iid", rounds=1)
    new = patients(30, seed=1)
    expected = fitted.transform(new)
    np.testing.assert_allclose(result.inputs.prepare(new[["sex", "dead", "age", "creatinine"]]), expected, atol=1e-6)
    assert tuple(result.inputs.columns) == tuple(fitted.get_feature_names_out())
    again = fedcore.load_run(result.directory)
    (tmp_path / "prep.skops").rename(tmp_path / "moved.skops")  # it is stored with the model
    np.testing.assert_array_equal(again.predict(new), result.predict(new))
    (tmp_path / "moved.skops").rename(tmp_path / "prep.skops")
    export_run(result.directory, "safetensors", tmp_path / "out")
    exported = io.load(tmp_path / "out" / "pipeline.skops", trusted=["numpy.dtype"])
    np.testing.assert_array_equal(exported.transform(new), expected)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "pipeline.skops" in card
    assert '["creatinine", "sex", "age"]' in card
    assert len(card) < 12_000, "the file itself is no text of the card"


def test_a_resume_refuses_another_transformer(tmp_path, fitted):
    name = name_of(tmp_path, fitted)
    result = federate(tmp_path, dataset=name, model="auto", clients=2, partition="iid", rounds=1)
    io.dump(transformer().fit(patients(50, seed=4)[["creatinine", "sex", "age"]]), tmp_path / "prep.skops")
    with pytest.raises(fedcore.FedcoreError):
        fedcore.resume(result.directory, changes={"rounds": 2})


def test_a_client_of_a_federation_takes_the_server_s_transformer(tmp_path, fitted):
    server = load_dataset(name_of(tmp_path, fitted)).train
    patients(40, seed=3).to_csv(tmp_path / "own.csv", index=False)
    own = load_dataset(f"hf:{tmp_path / 'own.csv'}?columns=age,sex,creatinine&missing=median&label=dead&part=yes").train
    assert isinstance(own, TableSamples)
    made = own.by_recipe(server.recipe)
    expected = fitted.transform(patients(40, seed=3))
    np.testing.assert_allclose(made.inputs, expected, atol=1e-6)
    with pytest.raises(DataError, match="the run's recipe does not fit"):
        own.by_recipe({**server.recipe, "skops": "no base 64"})


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: FunctionTransformer(torch.nn.functional.relu), ("torch",)),
        (lambda: LogisticRegression().fit(np.arange(4)[:, None], [0, 0, 1, 1]), ("transform",)),
        (lambda: StandardScaler(), ("fitted",)),
        (lambda: StandardScaler().fit(np.ones((3, 2))), ("DataFrame",)),
    ],
)
def test_what_is_no_fitted_transformer_is_refused(tmp_path, made, words):
    with pytest.raises(ConfigError) as refused:
        load_dataset(name_of(tmp_path, made()))
    assert all(word in str(refused.value) for word in words)


def test_files_that_are_none_and_rows_that_do_not_fit_are_told(tmp_path, fitted):
    name = name_of(tmp_path, fitted)
    with raises(ConfigError, "leave out"):
        load_dataset(f"{name}&missing=median")
    strict = ColumnTransformer([("words", OneHotEncoder(), ["sex"])]).fit(patients().fillna("F")[["sex"]])
    strange = patients().assign(sex="X")
    with raises(DataError, "'X'"):
        load_dataset(name_of(tmp_path, strict, strange))
    with raises(ConfigError, "--normalize global"):
        federate(
            tmp_path, dataset=name_of(tmp_path, fitted), model="auto", clients=2, partition="iid", normalize="global"
        )
    (tmp_path / "prep.skops").write_bytes(b"\x80\x04pickle")
    with raises(ConfigError, "skops"):
        load_dataset(name)
