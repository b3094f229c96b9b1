"""``result.predict``, ``predict_proba``, ``evaluate`` and ``network``: raw samples in, the run's own figures out."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import TensorDataset

import fedcore
from fedcore import ConfigError, DataError, RunConfig
from fedcore.base import registry
from fedcore.data import Dataset, TensorSamples, load_dataset
from fedcore_zoo import SequenceBatch, SequenceSamples
from tests.sentences import raises, warns


class Net(nn.Module):
    """A user's network, whose last layer is not the last attribute."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.head = nn.Linear(12, num_classes)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(input_shape)), 12), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def colours(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return uint8 images (n, 5, 4, 3) whose class is their brightest channel."""
    stream = np.random.default_rng(seed)
    y = np.arange(n) % 3
    x = stream.integers(0, 120, (n, 5, 4, 3))
    x[np.arange(n), :, :, y] += 90
    return x.astype(np.uint8), y


TRAIN, TEST = colours(150, 0), colours(60, 1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> fedcore.RunResult:
    out = tmp_path_factory.mktemp("trained") / "run"
    config = RunConfig(rounds=3, clients=3, batch_size=10, lr=0.05, workers=0, out=out)
    return fedcore.run(config, model=Net, dataset=(*TRAIN, *TEST))


def by_hand(result: fedcore.RunResult, x: np.ndarray) -> np.ndarray:
    """Return the logits of uint8 images (n, H, W, C), normalised in float64 by the training images' statistics."""
    scaled, seen = x.astype(np.float64) / 255, TRAIN[0].astype(np.float64) / 255
    scaled = (scaled - seen.mean(axis=(0, 1, 2))) / seen.std(axis=(0, 1, 2))
    network = result.network.double()
    return network(torch.from_numpy(scaled).permute(0, 3, 1, 2)).detach().numpy()


def test_raw_images_get_the_accuracy_of_the_run(trained: fedcore.RunResult) -> None:
    again = trained.evaluate(*TEST)
    assert again == trained.metrics["global"]
    assert again["accuracy"] == trained.accuracy > 0.8
    assert (trained.predict(TEST[0]) == TEST[1]).mean() == trained.accuracy


def test_probabilities_are_the_softmax_of_the_normalised_images(trained: fedcore.RunResult) -> None:
    logits = by_hand(trained, TEST[0])
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    found = trained.predict_proba(TEST[0])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)
    assert (trained.predict(TEST[0]) == logits.argmax(axis=1)).all()


def test_the_network_itself_gives_the_figures_of_the_run_and_keeps_its_mode(trained: fedcore.RunResult) -> None:
    network = trained.network.train()
    assert (trained.predict_proba(TEST[0], model=network) == trained.predict_proba(TEST[0])).all()
    assert trained.evaluate(*TEST, model=network) == trained.metrics["global"]
    assert all(module.training for module in network.modules())


@pytest.mark.parametrize(
    "same",
    [
        lambda x: torch.from_numpy(x),
        lambda x: torch.from_numpy(x).permute(0, 3, 1, 2),
        lambda x: list(x),
        lambda x: x.astype(np.float64) / 255,
        lambda x: torch.from_numpy(x).permute(0, 3, 1, 2).float() / 255,
    ],
    ids=["tensor", "channels first", "list", "float64", "ToTensor"],
)
def test_any_form_of_the_same_images_gives_the_same(trained: fedcore.RunResult, same) -> None:
    np.testing.assert_allclose(trained.predict_proba(same(TEST[0])), trained.predict_proba(TEST[0]), atol=1e-6)


@pytest.mark.parametrize(
    ("x", "named"),
    [
        (TEST[0].astype(np.float32), ("0", "1")),
        (TEST[0].astype(np.int64), ()),
        (TEST[0][:, :4], ("60", "4", "3", "5")),
        (TEST[0][0], ()),
        (TEST[0][0].transpose(2, 0, 1), ()),
        ([TEST[0][0], TEST[0][0][:2]], ()),
        (TensorDataset(*map(torch.from_numpy, TEST)), ("torch.stack",)),
    ],
)
def test_other_images_are_refused(trained: fedcore.RunResult, x: object, named: tuple[str, ...]) -> None:
    with raises(DataError, *named):
        trained.predict(x)


@pytest.mark.filterwarnings("error")
def test_pixels_that_are_read_only_give_no_warning(trained: fedcore.RunResult) -> None:
    pixels = TEST[0].copy()
    pixels.flags.writeable = False  # as those of np.asarray(PIL.Image)
    assert trained.predict(pixels).tolist() == trained.predict(TEST[0]).tolist()


def test_labels_outside_of_the_classes_are_refused(trained: fedcore.RunResult) -> None:
    with raises(DataError, "0", "2"):
        trained.evaluate(TEST[0], TEST[1] + 1)
    with raises(DataError):
        trained.evaluate(TEST[0], TEST[1][:5])
    with raises(DataError, "result.evaluate"):
        trained.evaluate(TEST[0])


def test_no_samples_give_no_predictions_and_no_figures(trained: fedcore.RunResult) -> None:
    assert trained.predict(TEST[0][:0]).shape == (0,)
    assert trained.predict_proba(TEST[0][:0]).shape == (0, 3)
    with raises(DataError):
        trained.evaluate(TEST[0][:0], TEST[1][:0])


def test_a_run_of_another_process_predicts_the_same(trained: fedcore.RunResult) -> None:
    again = fedcore.load_run(trained.directory, model=Net, dataset=(*TRAIN, *TEST))
    assert again.inputs == trained.inputs
    assert (again.predict_proba(TEST[0]) == trained.predict_proba(TEST[0])).all()


def test_the_network_is_the_users_class_and_so_is_the_file(trained: fedcore.RunResult) -> None:
    network = trained.network
    assert type(network) is Net
    assert not network.training
    fresh = Net(3, (3, 5, 4))
    fresh.load_state_dict(load_file(trained.directory / "model.safetensors"))
    x = torch.randn(4, 3, 5, 4)
    assert torch.equal(fresh(x), network(x))
    assert torch.equal(trained.model(x).logits, network(x))
    with torch.no_grad():
        network.head.weight.zero_()
    assert trained.network.head.weight.any(), "a copy"


def test_weights_of_the_users_class_start_a_run_with_its_classifier(trained: fedcore.RunResult, tmp_path: Path) -> None:
    save_file(trained.network.state_dict(), tmp_path / "net.safetensors")
    config = RunConfig(
        rounds=1, lr=1e-12, clients=3, workers=0, weights=str(tmp_path / "net.safetensors"), out=tmp_path / "run"
    )
    again = fedcore.run(config, model=Net, dataset=(*TRAIN, *TEST))
    assert again.accuracy == trained.accuracy


def test_a_network_with_added_layers_is_not_the_users(tmp_path: Path) -> None:
    config = RunConfig(rounds=1, clients=3, workers=0, projection=True, out=tmp_path / "run")
    result = fedcore.run(config, model=Net, dataset=(*TRAIN, *TEST))
    with raises(ConfigError):
        _ = result.network
    assert result.evaluate(*TEST) == result.metrics["global"]
    again = fedcore.load_run(result.directory, model=Net, dataset=(*TRAIN, *TEST))
    assert (again.predict(TEST[0]) == result.predict(TEST[0])).all()


def test_a_model_of_encoder_and_classifier_is_its_own_network(tmp_path: Path) -> None:
    result = fedcore.run(RunConfig(rounds=1, clients=3, workers=0, out=tmp_path / "run"))
    assert type(result.network) is type(result.model)
    test = load_dataset("digits").test
    assert result.evaluate(test) == result.metrics["global"]


def test_rows_of_a_table_are_taken_as_they_are(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(120, 4))
    y = (x[:, 0] > 0).astype(int)
    config = RunConfig(rounds=3, clients=2, lr=0.05, batch_size=10, workers=0, out=tmp_path / "run")
    result = fedcore.run(config, dataset=(x[:80], y[:80], x[80:], y[80:]))
    assert result.evaluate(x[80:], y[80:]) == result.metrics["global"]
    assert result.predict(x[80:].tolist()).tolist() == result.predict(x[80:]).tolist()
    with raises(DataError, "40", "3", "4"):
        result.predict(x[80:, :3])
    x[[82, 90], 1] = np.nan
    with raises(DataError, "2", "40"):
        result.predict(x[80:])
    assert np.isnan(result.predict_proba(x[80:])).any(axis=1).nonzero()[0].tolist() == [2, 10]


def test_labels_are_positions_or_names_of_the_runs_classes(tmp_path: Path) -> None:
    """A file of other patients may lack a class: numbered by themselves, its labels would be other classes."""
    x = np.random.default_rng(0).normal(size=(120, 4))
    stage = np.digitize(x[:, 0], (-0.5, 0.5)) + 1
    rows, y = torch.from_numpy(x).float(), torch.from_numpy(stage - 1)
    train, test = (TensorSamples(rows[part], y[part]) for part in (slice(80), slice(80, None)))
    dataset = Dataset("table", train, test, 3, (4,), class_names=("1", "2", "3"), model="mlp")
    config = RunConfig(rounds=2, clients=2, lr=0.05, batch_size=10, workers=0, out=tmp_path / "run")
    result = fedcore.run(config, dataset=dataset)
    few = stage < 3
    with warns(UserWarning, "1, 2, 3"):
        expected = result.evaluate(x[few], stage[few] - 1)
    for words in (stage[few].astype(str), stage[few].astype(float), stage[few].astype(object)):
        assert result.evaluate(x[few], words) == expected
    with raises(DataError, "'IV'", "1, 2, 3"):
        result.evaluate(x[:2], ["IV", "1"])


def test_raw_rows_are_normalised_as_the_data_set_normalised_its_own(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(120, 2)) * (300, 0.01) + (5000, -0.2)
    y = torch.from_numpy(x[:, 0] > 5000).long()
    mean, std = x[:80].mean(axis=0), x[:80].std(axis=0)
    rows = torch.from_numpy((x - mean) / std).float()
    train, test = (TensorSamples(rows[part], y[part], mean=mean, std=std) for part in (slice(80), slice(80, None)))
    dataset = Dataset("table", train, test, 2, (2,), model="mlp")
    config = RunConfig(rounds=3, clients=2, lr=0.05, batch_size=10, workers=0, out=tmp_path / "run")
    result = fedcore.run(config, dataset=dataset)
    assert result.evaluate(x[80:], y[80:]) == result.evaluate(test) == result.metrics["global"]
    assert fedcore.load_run(result.directory, dataset=dataset).inputs == result.inputs


def test_columns_of_a_table_are_taken_by_name(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    stream = np.random.default_rng(0)
    table = pandas.DataFrame(stream.normal(size=(120, 3)), columns=["age", "dose", "weight"])
    classes, turned = (table["dose"] > 0).to_numpy().astype(int), ["weight", "age", "dose"]
    table["dose"] += 8 * classes  # far apart, so that any processor learns to part them
    train, test = table[:90], table[90:]
    data = (train, classes[:90], test[turned], classes[90:])
    options = {"partition": "iid", "rounds": 5, "clients": 2, "lr": 0.3, "batch_size": 10, "workers": 0}
    result = fedcore.run(dataset=data, **options, out=tmp_path / "run")
    result = fedcore.load_run(result.directory, dataset=data)
    expected = result.predict(test.to_numpy())
    assert result.class_names == ()
    assert result.metrics["global"]["accuracy"] == (expected == classes[90:]).mean() > 0.8
    further = test[turned].assign(diagnosis="none")
    assert np.array_equal(result.predict(further), expected)
    unnamed = pandas.DataFrame(test.to_numpy())
    assert np.array_equal(result.predict(unnamed), expected)
    numbered = test[turned].assign(more=1.0).rename(columns={"more": 0})  # one name that is a number
    assert np.array_equal(result.predict(numbered), expected)
    again = fedcore.run(dataset=(train, classes[:90], numbered, classes[90:]), **options, out=tmp_path / "numbered")
    assert again.metrics == result.metrics
    with raises(DataError, 2, "'dose'"):
        result.predict(pandas.concat([test, test["dose"] * 0], axis=1))
    with raises(DataError, "'dose'", "3"):
        result.predict(test[["age", "weight"]])
    with raises(DataError, "'age'"):
        fedcore.run(dataset=(train, classes[:90], test[["dose"]], classes[90:]), out=tmp_path / "other")


@pytest.fixture(scope="module")
def of_a_table(tmp_path_factory: pytest.TempPathFactory) -> fedcore.RunResult:
    """A run on a table of numbers and of true and false, normalised as hf: does, whose class is whether ``drug``."""
    x = np.random.default_rng(0).normal(size=(120, 2)) * (10, 1) + (50, 0)
    x[:, 1] = np.arange(120) % 2
    mean, std = x.mean(axis=0), x.std(axis=0)
    rows, y = torch.from_numpy((x - mean) / std).float(), torch.arange(120) % 2
    samples = TensorSamples(rows, y, mean=mean, std=std, columns=["age", "drug"])
    config = RunConfig(rounds=3, clients=2, lr=0.3, batch_size=10, workers=0, partition="iid")
    out = tmp_path_factory.mktemp("table") / "run"
    return fedcore.run(config, dataset=Dataset("table", samples, samples, 2, (2,), model="mlp"), out=out)


@pytest.mark.parametrize(
    "columns",
    [
        {"age": [50.0, 60.0], "drug": [True, False]},
        {"drug": [True, False], "age": [50, 60]},
        {"age": ("Int64", [50, 60]), "drug": ("boolean", [True, False])},
        {"age": ("Float64", [50.0, 60.0]), "drug": [1, 0]},
        {"age": ["50", "60"], "drug": [True, False], "name": ["Ann", "Bob"]},
    ],
    ids=["bool", "turned", "nullable", "nullable floats", "words"],
)
def test_true_false_and_nullable_columns_of_a_frame_are_numbers(of_a_table: fedcore.RunResult, columns) -> None:
    pandas = pytest.importorskip("pandas")
    made = {name: pandas.array(of[1], of[0]) if isinstance(of, tuple) else of for name, of in columns.items()}
    expected = of_a_table.predict_proba(np.array([[50.0, 1.0], [60.0, 0.0]]))
    assert np.array_equal(of_a_table.predict_proba(pandas.DataFrame(made)), expected)


def test_a_default_device_of_the_program_changes_no_prediction(of_a_table: fedcore.RunResult) -> None:
    x, y = np.array([[50.0, 1.0], [60.0, 0.0]]), np.array([1, 0])
    expected = of_a_table.predict_proba(x), of_a_table.evaluate(x, y)
    with torch.device("meta"):  # on cuda the positions and the logits were on two devices
        assert np.array_equal(of_a_table.predict_proba(x), expected[0])
        assert of_a_table.evaluate(x, y) == expected[1]


def test_cells_of_a_frame_that_are_empty_or_no_numbers_are_named(of_a_table: fedcore.RunResult) -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"age": pandas.array([50, None], "Int64"), "drug": pandas.array([True, False], "boolean")})
    assert np.isnan(of_a_table.predict_proba(table)).any(axis=1).tolist() == [False, True]
    with raises(DataError, "1"):
        of_a_table.predict(table)
    for cells in (["old", "young"], pandas.to_datetime(["2020", "2021"]), [1j, 2j]):
        with raises(DataError, "'age'"):
            of_a_table.predict(table.assign(age=cells, drug=["1", "0"]))
    assert of_a_table.predict(np.array([[True, True], [False, False]])).shape == (2,)


@pytest.mark.parametrize(
    ("x", "named"),
    [
        (None, ()),
        (5, ()),
        (np.float64(5), ()),
        (torch.tensor(5.0), ()),
        ((row for row in [[50, 1]]), ()),
        (torch.eye(2).to_sparse(), ("x.to_dense",)),
        (SimpleNamespace(toarray=None), ("x.toarray",)),  # as those of SciPy
        (np.ma.masked_equal([[50.0, 1.0]], 50), ()),
        ([np.ma.masked_equal([50.0, 1.0], 50)], ()),
        (np.array([[50 + 1j, 1]]), ()),
        (torch.tensor([[50 + 1j, 1]]), ()),
    ],
)
def test_what_is_no_array_or_would_lose_a_part_is_refused(
    of_a_table: fedcore.RunResult, x, named: tuple[str, ...]
) -> None:
    for call in (of_a_table.predict, of_a_table.predict_proba, lambda x: of_a_table.evaluate(x, [0, 1])):
        with raises(DataError, *named):
            call(x)
    with raises(DataError):
        of_a_table.evaluate(np.eye(2), np.ma.masked_equal([0, 1], 1))


def test_without_a_global_model_a_clients_model_predicts(tmp_path: Path) -> None:
    config = RunConfig(
        plugins={"fedper": {}}, rounds=2, clients=3, workers=0, client_test_fraction=0.2, out=tmp_path / "run"
    )
    result = fedcore.run(config)
    test = load_dataset("digits").test
    assert result.class_names == tuple("0123456789")
    with raises(ConfigError):
        result.predict(test)
    with raises(ConfigError):
        _ = result.network
    own = [result.evaluate(test, model=fedcore.client_model(result.directory, k))["accuracy"] for k in range(3)]
    assert np.mean(own) == pytest.approx(result.metrics["personal_global"]["accuracy"])
    assert result.accuracy == result.metrics["personal"]["accuracy"]


class FromDisk:
    """Samples of the user's own class, whose batches are tensors."""

    kind = "tensor"


def test_other_samples_come_as_a_class(trained: fedcore.RunResult) -> None:
    from fedcore.data.inputs import Inputs

    texts = SequenceSamples.of([[1, 2], [3]], [0, 1])
    inputs = Inputs.of(Dataset("texts", texts, texts, 2, (5,), class_names=("no", "yes")))
    assert Inputs.from_json(asdict(inputs)) == inputs
    with raises(DataError):
        inputs.prepare([[1, 2]])
    with raises(DataError):
        Inputs.of(Dataset("disk", FromDisk(), FromDisk(), 2, (5,))).prepare(np.zeros((2, 5)))


class Bag(fedcore.SplitModel):
    """Classes by the mean of a text's words."""

    takes = ("sequences",)

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__(Mean(input_shape[0]), 4, num_classes)


class Mean(nn.EmbeddingBag):
    def __init__(self, words: int) -> None:
        super().__init__(words, 4, mode="mean")

    def forward(self, batch: SequenceBatch) -> torch.Tensor:
        return super().forward(batch.values, batch.offsets[:-1])


def test_texts_are_predicted_in_chunks_as_they_are_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = SequenceSamples.of([[k % 3] * (1 + k % 2) for k in range(30)], [k % 3 for k in range(30)])
    dataset = Dataset("texts", texts, texts, 3, (3,))
    options = {"rounds": 3, "clients": 2, "batch_size": 4, "lr": 0.5, "workers": 0, "partition": "iid"}
    result = fedcore.run(model=Bag, dataset=dataset, **options, out=tmp_path / "run", progress=False)
    for module in ("fedcore_zoo.predictions", "fedcore.client.evaluation"):
        monkeypatch.setattr(f"{module}.forward_chunk", lambda *of: 7)
    assert (result.predict(texts) == texts.labels.numpy()).mean() == result.evaluate(texts)["accuracy"] > 0.5
    assert result.predict(SequenceSamples.of([], [])).shape == (0,)


@pytest.mark.parametrize(("form", "file"), [("safetensors", "model.safetensors"), ("torch", "model.pt")])
def test_an_exported_network_loads_into_the_users_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, file: str
) -> None:
    export = pytest.importorskip("fedcore_export.export").export_run
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "colours.npz", x_train=TRAIN[0], y_train=TRAIN[1], x_test=TEST[0], y_test=TEST[1])
    result = fedcore.run(model=Net, dataset=f"npz:{tmp_path / 'colours.npz'}", rounds=1, clients=3, workers=0)
    export(result.directory, form, tmp_path / "exported", allow_code=True)
    weights = tmp_path / "exported" / file
    fresh = Net(3, (3, 5, 4))
    fresh.load_state_dict(load_file(weights) if form == "safetensors" else torch.load(weights, weights_only=True))
    x = torch.randn(4, 3, 5, 4)
    assert torch.equal(fresh(x), result.network(x))
    assert "`network` is a `Net`" in (tmp_path / "exported" / "README.md").read_text()


def test_without_the_package_predictions_are_answered_with_it(trained: fedcore.RunResult, monkeypatch) -> None:
    installed = registry._scan
    monkeypatch.setattr(registry, "_scan", lambda kind, path: {} if kind == "feature" else installed(kind, path))
    for method in (trained.predict, trained.predict_proba, trained.evaluate, trained.inputs.prepare):
        with raises(ConfigError, method.__name__, "fedcore-zoo"):
            method(TEST[0])
