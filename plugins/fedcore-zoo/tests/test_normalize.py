"""--normalize: whose samples give mean and deviation, what the models see, new samples, and what is noted."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

import fedcore
from fedcore import ConfigError, DataError
from fedcore.data import Dataset, Partition, TensorSamples, as_dataset, load_dataset, load_partition
from fedcore_testing import federations, model_bytes, partition_of, small_config
from fedcore_zoo import as_client
from fedcore_zoo.preparation import check_finite, prepare, pretrained_numbers
from tests.sentences import raises

go = federations()
HELD = {"client_test_fraction": 0.3}


def scanners(clients=2, rows=60, seed=0):
    """Return arrays of two classes; each client's scanner has its own scale and offset, which hide the class."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, (clients, rows))
    x = rng.normal(size=(clients, rows, 4)) + 2 * labels[..., None]
    x = x * np.array([1.0, 30.0])[:clients, None, None] + np.array([0.0, 500.0])[:clients, None, None]
    return x.astype(np.float32).reshape(-1, 4), labels.reshape(-1)


def train(tmp_path, normalize, **options):
    x, y = scanners()
    lists = [np.arange(60), np.arange(60, 120)]
    how = {"clients": 2, "rounds": 8, "model": "mlp", **HELD, **options}
    config = small_config(tmp_path, normalize=normalize, **how)
    return fedcore.run(
        config, dataset=(x, y, x[::3], y[::3]), partition=lambda labels, num_clients, **_: lists, progress=False
    )


def test_each_scanner_by_its_own_numbers(tmp_path):
    """The same class means another number at each hospital: only numbers of each one's own tell the classes."""
    accuracy = {
        choice: train(tmp_path, choice).metrics["global_local"]["accuracy"] for choice in ("client", "global", "none")
    }
    assert accuracy["client"] > 0.9
    assert accuracy["client"] > max(accuracy["global"], accuracy["none"])


def test_a_clients_numbers_are_of_its_training_rows_and_prepare_its_new_rows(tmp_path):
    result = train(tmp_path, "client", rounds=1)
    x, y = scanners()
    parts = load_partition(result.directory / "partition.json", as_dataset((x, y, x[::3], y[::3]))).train
    for client, rows in enumerate(parts):
        own = as_client(result, client)
        expected = (x[:5] - x[rows].mean(axis=0)) / x[rows].std(axis=0)
        np.testing.assert_allclose(own.inputs.prepare(x[:5]).numpy(), expected, atol=1e-3)
        assert len(own.predict(x[:5])) == 5
    with raises(ConfigError, "client 2", "--normalize client"):
        as_client(result, 2)


@pytest.mark.parametrize("choice", ["global", "none", "client"])
def test_images_are_normalised_by_training_samples_alone(go, choice):
    result = go({}, normalize=choice, rounds=1, **HELD)
    loaded = load_dataset("digits").train
    pixels = loaded.images * torch.tensor(loaded.std).view(1, -1, 1, 1) + torch.tensor(loaded.mean).view(1, -1, 1, 1)
    parts = partition_of(result).train
    inputs = result.inputs if choice != "client" else as_client(result, 1).inputs
    rows = torch.cat([*parts]) if choice == "global" else parts[1]
    mean, std = (0.0, 1.0) if choice == "none" else (pixels[rows].mean().item(), pixels[rows].std(correction=0).item())
    assert inputs.mean == pytest.approx((mean,), abs=1e-5)
    assert inputs.std == pytest.approx((std,), abs=1e-5)


def test_an_unseen_client_decides_no_number_of_the_others(go):
    result = go({}, normalize="global", rounds=1, clients=4, unseen_clients=0.5, **HELD)
    loaded = load_dataset("digits").train
    pixels = loaded.images * torch.tensor(loaded.std).view(1, -1, 1, 1) + torch.tensor(loaded.mean).view(1, -1, 1, 1)
    parts = [*partition_of(result).train]
    trained, everyone = pixels[torch.cat(parts[:2])], pixels[torch.cat(parts)]
    assert result.inputs.mean == pytest.approx((trained.mean().item(),), abs=1e-5)
    assert result.inputs.std == pytest.approx((trained.std(correction=0).item(),), abs=1e-5)
    assert abs(trained.mean() - everyone.mean()) > 1e-4


def test_as_loaded_changes_nothing_and_workers_have_the_same_bits(go):
    assert model_bytes(go({}, normalize="as-loaded")) == model_bytes(go({}))
    options = {"normalize": "client", **HELD}
    assert model_bytes(go({}, **options, workers=2)) == model_bytes(go({}, **options))


def test_tables_that_are_normalised_already_are_normalised_anew(go):
    result = go({}, dataset="breast-cancer", normalize="global", rounds=1, **HELD)
    loaded = load_dataset("breast-cancer").train
    raw = loaded.inputs.double().numpy() * loaded.std + loaded.mean
    rows = torch.cat([*partition_of(result).train]).numpy()
    np.testing.assert_allclose(result.inputs.mean, raw[rows].mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(result.inputs.std, raw[rows].std(axis=0), rtol=1e-4)


def test_the_numbers_of_pretrained_weights(tmp_path, go):
    config = small_config(tmp_path, model="torchvision:shufflenet_v2_x0_5")
    assert pretrained_numbers(config) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({"image_mean": [0.5], "image_std": [0.25]}))
    (tmp_path / "vit").mkdir()
    (tmp_path / "vit" / "preprocessor_config.json").write_text(file.read_text())
    assert pretrained_numbers(config.model_copy(update={"model": f"hf:{tmp_path / 'vit'}"})) == ((0.5,), (0.25,))
    beside = config.model_copy(update={"weights": str(tmp_path / "a.safetensors")})
    assert pretrained_numbers(beside) == ((0.5,), (0.25,))
    result = go({}, model="torchvision:shufflenet_v2_x0_5", normalize="pretrained", rounds=1, clients=2, local_steps=1)
    assert result.inputs.mean == pytest.approx(((0.485 + 0.456 + 0.406) / 3,))
    file.write_text('{"image_mean": [0.5]}')
    with raises(ConfigError, "--normalize pretrained", "preprocessor_config.json", "'image_std'"):
        pretrained_numbers(beside)
    with raises(ConfigError, "--normalize pretrained", "'mlp'"):
        go({}, normalize="pretrained")


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ((1.0, 24_000.0), "values up to .* and columns whose deviations are from"),
        ((0.001, 5.0), "is trained on as it is, with columns whose deviations are from"),
        ((1.0, 5.0), None),
    ],
)
def test_raw_columns_of_other_orders_of_magnitude_are_noted(tmp_path, recwarn, columns, words):
    x, y = scanners(1)
    x = ((x - x.mean(axis=0)) / x.std(axis=0))[:, :2] * np.array(columns, dtype=np.float32)
    for choice in ("as-loaded", "none", "global"):
        recwarn.clear()
        config = small_config(tmp_path, clients=2, rounds=1, partition="iid", model="mlp", normalize=choice)
        fedcore.run(config, dataset=(x, y, x, y), progress=False)
        said = [str(w.message) for w in recwarn if "trained on as it is" in str(w.message)]
        assert bool(said) == (choice != "global" and words is not None)
        assert not said or re.search(str(words), said[0])


@pytest.mark.parametrize(
    ("train", "test", "noted"),
    [
        (slice(40), slice(40), "40 of 40 test"),
        (slice(60), slice(30, 80), "30 of 50 test"),
        (slice(40), slice(20, 60), ""),
        (slice(40), slice(40, 80), ""),
    ],
)
@pytest.mark.parametrize("shape", [(90,), (9, 10)])
def test_test_samples_that_are_training_samples_are_noted(tmp_path, recwarn, train, test, noted, shape):
    x, y = np.random.default_rng(0).random((80, *shape), dtype=np.float32), np.arange(80) % 2
    config = small_config(tmp_path, clients=2, rounds=1, local_steps=1, partition="iid", model="mlp")
    fedcore.run(config, dataset=(x[train], y[train], x[test], y[test]), progress=False)
    notes = [str(w.message) for w in recwarn if "are training samples, too" in str(w.message)]
    assert [note.partition(" samples")[0] for note in notes] == [noted] * bool(noted)


def test_samples_of_other_shapes_are_not_compared(tmp_path):
    """One test sample, none, as one client's part has, and series of other lengths."""
    x, y = torch.rand(20, 7, 10), torch.arange(20) % 2
    for test in (x[:1, :5], x[:0], x[:1]):
        dataset = Dataset(
            "series", TensorSamples(x, y), TensorSamples(test, y[: len(test)]), num_classes=2, input_shape=(7, 10)
        )
        partition = Partition([range(10), range(10, 20)], [[], []], {})
        notes = prepare(None, "as-loaded", dataset, partition).notes
        assert ["training samples" in note for note in notes] == [True] * (test.shape == (1, 7, 10))


@pytest.mark.parametrize(
    ("options", "noted"),
    [
        ({}, []),
        ({"patience": 1}, ["--patience would choose"]),
        ({"patience": 1, "keep": "best"}, ["--patience and --keep best would choose"]),
        ({"patience": 1, "validation_share": 0.5}, []),
    ],
)
def test_clients_test_samples_that_are_the_test_set(tmp_path, recwarn, options, noted):
    """They stand in the training set's arrays, as on the page of own data, but nobody trains on them."""
    x, y = np.random.default_rng(0).random((80, 30), dtype=np.float32), np.arange(80) % 2
    positions = Partition([range(30), range(30, 60)], [range(60, 70), range(70, 80)])
    config = small_config(tmp_path, clients=2, rounds=1, local_steps=1, model="mlp", **options)
    fedcore.run(config, dataset=(x, y, x[60:], y[60:]), partition=positions, progress=False)
    said = [str(w.message) for w in recwarn if "test samples are" in str(w.message)]
    assert len(said) == len(noted)
    assert all(words in note for note, words in zip(said, noted, strict=True))


def test_equal_rows_of_few_values_are_no_note(tmp_path, recwarn):
    x, y = np.random.default_rng(0).integers(0, 2, (200, 4)).astype(np.float32), np.arange(200) % 2
    config = small_config(tmp_path, clients=2, rounds=1, local_steps=1, partition="iid", model="mlp")
    fedcore.run(config, dataset=(x[:150], y[:150], x[150:], y[150:]), progress=False)
    assert not any("are training samples, too" in str(w.message) for w in recwarn)


def test_a_federations_client_looks_at_its_own_parts():
    x, y = torch.rand(6, 90), torch.tensor([0, 1] * 3)
    own = TensorSamples(torch.cat([x, x[:4]]), torch.cat([y, y[:4]]))
    dataset = Dataset("own", own, TensorSamples(x, y), num_classes=2, input_shape=(90,))
    for held_out, notes in (([6, 7, 8, 9], 1), ([4, 5], 0), ([], 0), ([6], 1)):
        partition = Partition(
            [[], [0, 1, 2, 3]], [[], held_out], {**Partition.declared([1], [0], "own").info, "own": 1}
        )
        found = prepare(None, "as-loaded", dataset, partition).notes
        assert [f"{len(held_out)} of {len(held_out)} held-out" in note for note in found] == [True] * notes


@pytest.mark.parametrize("shape", [(9,), (3, 3)])
@pytest.mark.parametrize(("train", "test", "noted"), [(255, 1, True), (1, 255, True), (3, 1, False), (0, 1, False)])
def test_test_samples_of_another_scale_are_noted(tmp_path, recwarn, shape, train, test, noted):
    """Of Fashion-MNIST with x_train alone in 0..255 a CNN had 9.6 % after two rounds, in silence; 55.0 % if alike."""
    x, y = np.random.default_rng(0).random((40, *shape), dtype=np.float32), np.arange(40) % 2
    config = small_config(tmp_path, clients=2, rounds=1, local_steps=1, partition="iid", model="mlp")
    fedcore.run(config, dataset=(x * train, y, x * test, y), progress=False)
    assert any("test samples have a deviation of" in str(w.message) for w in recwarn) == noted


@pytest.mark.parametrize("part", ["train", "test"])
def test_numbers_of_a_loader_that_are_not_finite_are_refused(tmp_path, part):
    """Training diverged, with the advice to try a smaller --lr; of the test set the loss was nan."""
    x, y = map(torch.from_numpy, scanners(1))
    data = {"train": x.clone(), "test": x.clone()}
    config = small_config(tmp_path, clients=2, rounds=1, partition="iid", model="mlp")

    def made():
        return Dataset("sites", *(TensorSamples(data[each], y) for each in ("train", "test")), 2, tuple(x.shape[1:]))

    data[part][3, 0], data[part][7, 1] = float("nan"), float("inf")
    with raises(DataError, "sites", 3, 2, len(x)):
        fedcore.run(config, dataset=made(), progress=False)
    data[part][[3, 7]] = torch.finfo(torch.float32).max / 2  # finite, but their sum is not
    check_finite(made().train, "")
    check_finite(made().test, "")


class Rows(TensorSamples):
    """Rows whose class has no ``to``, as one that is written from memory."""

    to = property()


@pytest.mark.parametrize(
    ("test", "named"),
    [
        (lambda x, y: TensorSamples(x[:, :3], y), ("sites", (4,), (3,))),
        (lambda x, y: TensorSamples(x.double(), y), ("sites", "torch.float32", "torch.float64")),
        (Rows, ("sites", "test", "'to'")),
    ],
)
def test_samples_of_a_loader_on_which_a_run_would_break_off_are_refused(tmp_path, test, named):
    """The run ended in the first evaluation, of the command with 'internal error: RuntimeError'."""
    x, y = map(torch.from_numpy, scanners(1))
    data = Dataset("sites", TensorSamples(x, y), test(x, y), 2, (4,))
    with raises(DataError, *named):
        fedcore.run(small_config(tmp_path, clients=2, rounds=1, partition="iid", model="mlp"), dataset=data)
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_normalised_is_refused(tmp_path, go):
    tokens, y = np.arange(40).reshape(20, 2), np.arange(20) % 2
    config = small_config(tmp_path, clients=2, partition="iid", normalize="global", model="mlp")
    with raises(ConfigError, "--normalize global", "torch.int64"):
        fedcore.run(config, dataset=(tokens, y, tokens, y), progress=False)
    with raises(ConfigError, "--normalize pretrained", "'breast-cancer'"):
        go({}, dataset="breast-cancer", normalize="pretrained")
    images = np.random.default_rng(0).uniform(0, 255, (20, 8, 8)).astype(np.float32)
    with raises(ConfigError, "--normalize pretrained", "uint8"):
        weighed = config.model_copy(update={"normalize": "pretrained", "model": "torchvision:shufflenet_v2_x0_5"})
        fedcore.run(weighed, dataset=(images, y, images, y), progress=False)
    loaded = load_dataset("digits")

    def shared(labels, num_clients, **_):
        return [np.arange(50)] * num_clients

    shared.shares_samples = True
    by_client = config.model_copy(update={"normalize": "client"})
    with raises(ConfigError, "--normalize client"):
        fedcore.run(by_client, dataset=loaded, partition=shared, progress=False)
