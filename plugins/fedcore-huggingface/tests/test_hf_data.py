"""Folders that datasets saved, as data sets of fedcore: against the values that were saved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedcore import ConfigError, DataError, RunConfig
from fedcore.data import make_partition
from fedcore_huggingface import dataset
from fedcore_testing import check_dataset
from tests.sentences import raises

from .conftest import WORDS, Later, encoded, pictures, save, table_of, texts

Later("datasets")
Later("transformers")


def test_texts_are_tokens_and_writers_are_sources(text_set: str, load) -> None:
    found = load(text_set)
    assert (found.kind, found.input_shape, found.class_names) == ("sequences", (len(WORDS),), ("neg", "pos"))
    assert (len(found.train), len(found.test)) == (60, 20)
    batch = found.train.gather(torch.tensor([0, 1]))
    said = [[WORDS[token] for token in part] for part in np.split(batch.values.numpy(), batch.offsets[1:-1])]
    assert said == [["[CLS]", "good", "film", "[SEP]"], ["[CLS]", "bad", "[SEP]"]]
    assert found.train.labels[:2].tolist() == [1, 0]
    assert found.sources.tolist() == [k // 3 % 5 for k in range(60)]
    partition = make_partition(found, RunConfig(partition="natural", clients=5))
    assert [set(found.sources[part].tolist()) for part in partition.train] == [{0}, {1}, {2}, {3}, {4}]
    assert partition.names == [f"writer {k}" for k in range(5)]
    check_dataset(dataset(text_set))


def test_long_texts_are_cut_and_noted(text_set: str, load) -> None:
    found = load(f"{text_set}&max_length=3")
    assert found.train.offsets.diff().tolist() == [3] * 60
    assert "80 of 80 texts fill all 3 tokens" in found.notes[0]
    assert load(text_set).notes == ()


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1), ("RGBA", 3)])
def test_images(tmp_path: Path, load, mode: str, channels: int) -> None:
    given = pictures(mode=mode)
    found = load(save(tmp_path / "set", train=given, validation=pictures(12, mode)))
    assert (found.input_shape, found.num_classes, len(found.test)) == ((channels, 8, 8), 2, 12)
    expected = np.stack([np.asarray(image.convert("L" if channels == 1 else "RGB")) for image in given["image"]]) / 255
    expected = expected.reshape(40, 8, 8, channels)
    expected = (expected - expected.mean(axis=(0, 1, 2))) / expected.std(axis=(0, 1, 2))
    batch = found.train.gather(torch.arange(40))
    np.testing.assert_allclose(batch.numpy(), expected.transpose(0, 3, 1, 2), atol=1e-5)


def test_grey_images_among_others_have_three_equal_channels(tmp_path: Path, load) -> None:
    mixed, coloured = pictures(), pictures()
    for k in range(0, 40, 3):
        mixed["image"][k] = mixed["image"][k].convert("1" if k % 2 else "L")
        coloured["image"][k] = mixed["image"][k].convert("RGB")
    for size in ("", "?size=5"):
        sets = [load(f"{save(tmp_path / name, train=part)}{size}") for name, part in (("a", mixed), ("b", coloured))]
        for one, other in zip(*((found.train, found.test) for found in sets), strict=True):
            assert torch.equal(one.gather(torch.arange(len(one))), other.gather(torch.arange(len(other))))


def test_images_of_16_bits_are_refused(tmp_path: Path, load) -> None:
    deep = pictures(mode="L")
    deep["image"] = [Image.fromarray(np.asarray(image).astype(np.uint16) * 100) for image in deep["image"]]
    with raises(ConfigError, "8"):
        load(save(tmp_path / "set", train=deep))


def test_one_split_has_a_stratified_fifth_for_testing(image_set: str, load) -> None:
    found = load(image_set)
    assert (len(found.train), len(found.test)) == (32, 8)
    assert found.test.labels.bincount().tolist() == [4, 4]
    check_dataset(dataset(image_set))


def test_images_are_resized_if_asked(image_set: str, load) -> None:
    assert load(f"{image_set}?size=5").input_shape == (3, 5, 5)


def test_a_table_is_normalised_by_its_training_rows(tmp_path: Path, load) -> None:
    table = {"age": list(range(30)), "dose": [0.5, 1.5, 1.5] * 10, "site": ["a", "b", "c"] * 10, "target": [0, 1] * 15}
    folder = save(tmp_path / "set", train=table, test=table)
    found = load(f"{folder}?columns=age,dose&source=site")
    assert (found.kind, found.input_shape, found.model, found.sources[:4].tolist()) == (
        "tensor",
        (2,),
        "mlp",
        [0, 1, 2, 0],
    )
    ages = np.arange(30)
    expected = (ages - ages.mean()) / ages.std()
    rows = found.train.gather(torch.arange(30))
    np.testing.assert_allclose(rows[:, 0].numpy(), expected, atol=1e-6)
    raw = np.column_stack([table["age"], table["dose"]])
    np.testing.assert_allclose((raw - found.train.mean) / found.train.std, rows.numpy(), atol=1e-6)
    assert found.train.columns == found.test.columns == ("age", "dose")
    found = load(f"{folder}?source=site")  # all numbers but the classes
    assert found.train.columns == ("age", "dose")
    assert found.notes == (f"hf:{folder}?source=site: columns used: 'age', 'dose'; not used: none",)
    moved = dataset(f"elsewhere/{folder.name}?source=site")(folder.parent)
    assert moved.train.columns == ("age", "dose")
    with raises(ConfigError, "'target'"):
        load(f"{folder}?columns=age,target")


@pytest.mark.parametrize("index", ["", "Unnamed: 0", "__index_level_0__"])
def test_a_saved_row_index_is_no_input_unless_it_is_named(tmp_path: Path, load, index: str) -> None:
    folder = save(tmp_path / "set", only={index: list(range(30)), "dose": [0.5, 1.5, 1.5] * 10, "label": [0, 1] * 15})
    found = load(folder)
    assert found.train.columns == ("dose",)
    assert found.notes == (f"hf:{folder}: columns used: 'dose'; not used: {index!r}",)
    assert load(f"{folder}?columns={index},dose").train.columns == (index, "dose")


def test_a_test_split_without_labels_is_left_out(tmp_path: Path, load) -> None:
    from datasets import ClassLabel, DatasetDict, load_from_disk

    given = {"train": (30, 0), "validation": (10, 0), "test": (20, -1), "extra": (12, 0)}
    columns = {split: {"x": [0.5, 1.5] * (n // 2), "label": [label] * n} for split, (n, label) in given.items()}
    plain = load_from_disk(str(save(tmp_path / "plain", **columns)))
    classes = {split: of.cast_column("label", ClassLabel(names=["neg"])) for split, of in plain.items()}
    DatasetDict(classes).save_to_disk(str(tmp_path / "set"))
    found = load(f"{tmp_path / 'set'}?columns=x")
    assert (len(found.test), found.notes) == (
        10,
        (f"hf:{tmp_path / 'set'}?columns=x: split 'test' has no labels and is not used",),
    )
    assert len(load(f"{tmp_path / 'set'}?test=extra").test) == 12
    with raises(ConfigError, "'tst'"):
        load(f"{tmp_path / 'set'}?test=tst")


def test_what_is_not_said_or_not_there_is_asked_for(tmp_path: Path, text_set: str, tokenizer: Path, load) -> None:
    two = save(tmp_path / "two", train=texts() | {"title": ["x"] * 60})
    mixed = save(
        tmp_path / "mixed", only={"age": [1, 2] * 10, "sex": ["m"] * 20, "city": ["x"] * 20, "label": [0, 1] * 10}
    )
    nothing = save(tmp_path / "nothing", train={"sentence": ["a"] * 20, "kind": ["x", "y"] * 10})
    holes = save(
        tmp_path / "holes",
        train={"age": [1.0, None] * 10, "bmi": [None, 2.0] * 10, "n": [1] * 20, "label": [0, 1] * 10},
    )
    odd = save(tmp_path / "odd", train=pictures(20), test={**pictures(2), "label": [0, 7]})
    tests = save(tmp_path / "tests", test=texts())
    (tmp_path / "empty").mkdir()
    folder = text_set.partition("?")[0]
    for rest, named in (
        (tmp_path / "none", (".csv", ".parquet", "OWNER/NAME")),
        (tmp_path / "none.csv", (".csv", ".parquet", "OWNER/NAME")),
        (tests, ("train", "there are: test")),
        (two, ("?text=COLUMN", "sentence, label, writer, title")),
        (mixed, ("?text=COLUMN", "?columns=...", "age, sex, city")),
        (nothing, ("?label=COLUMN", "sentence, kind")),
        (f"{folder}?text=sentnce", ("'sentnce'", "sentence, label, writer")),
        (f"{folder}?text=sentence", ("'sentence'", "?tokenizer=FOLDER")),
        (f"{folder}?txt=sentence", ("option 'txt'", "label, target, image, text")),
        (f"{folder}?max_length=0", ("option 'max_length'", 1)),
        (holes, ("'age', 'bmi'", "?missing=", "?columns=")),
        (odd, ("'label'", "'7'", "0, 7", "0, 1")),
    ):
        with raises(DataError if rest == odd else ConfigError, *named):
            load(rest)
    for rest, says in (  # with more, which transformers and datasets say
        (tmp_path / "empty", "is no data set that datasets' save_to_disk wrote.*Name one CSV file, or save several"),
        (f"{folder}?text=sentence&tokenizer={tmp_path / 'empty'}", "holds no tokenizer"),
    ):
        with pytest.raises(ConfigError, match=says):
            load(rest)


def test_one_clients_part_of_images_or_texts_has_no_test_samples(load, image_set, tmp_path, tokenizer) -> None:
    sentences = save(tmp_path / "set", only=texts())
    for rest, count in ((f"{image_set}?", 40), (f"{sentences}?text=sentence&tokenizer={tokenizer}&", 60)):
        whole, own = load(rest), load(f"{rest}part=yes")
        assert (len(own.train), len(own.test), own.input_shape) == (count, 0, whole.input_shape)


def of_classes(names: list[str] | None, labels: list) -> object:
    """Return a table whose input is 1 for a dog and 0 for a cat, with a ClassLabel or plain labels."""
    from datasets import ClassLabel

    words = [names[label] for label in labels] if names else labels
    table = table_of({"x": [float(word == "dog") for word in words], "label": labels})
    return table.cast_column("label", ClassLabel(names=names)) if names else table


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ((["cat", "dog"], [0, 1] * 15), (["dog", "cat"], [0, 1, 1, 0])),
        ((["cat", "dog"], [0, 1] * 15), (["cow", "dog", "cat"], [1, 2, 2, 1])),  # no sample is a cow
        ((["cat", "dog"], [0, 1] * 15), (None, ["dog", "cat", "cat", "dog"])),
        ((None, ["cat", "dog"] * 15), (["dog", "cat"], [0, 1, 1, 0])),
        ((None, ["cat", "dog"] * 15), (None, ["dog", "dog"])),
    ],
)
def test_classes_of_splits_are_matched_by_name(tmp_path: Path, load, train, test) -> None:
    from datasets import DatasetDict

    splits = DatasetDict({"train": of_classes(*train), "test": of_classes(*test)})
    splits.save_to_disk(str(tmp_path / "set"))
    found = load(f"{tmp_path / 'set'}?columns=x")
    assert found.class_names == ("cat", "dog")
    for samples in (found.train, found.test):
        dogs = samples.gather(torch.arange(len(samples)))[:, 0] > 0
        assert samples.labels.tolist() == dogs.int().tolist()


@pytest.mark.parametrize(
    ("test", "named"),
    [
        ((["dog", "cow"], [0, 1]), ("'cow'",)),
        ((None, [0, 1]), ("'0'", "1")),
    ],
)
def test_classes_that_no_name_matches_are_refused_with_both_lists(
    tmp_path: Path, load, test, named: tuple[str, ...]
) -> None:
    from datasets import DatasetDict

    splits = DatasetDict({"train": of_classes(["cat", "dog"], [0, 1] * 15), "test": of_classes(*test)})
    splits.save_to_disk(str(tmp_path / "set"))
    with raises(DataError, "'label'", *named):
        load(f"{tmp_path / 'set'}?columns=x")


def test_classes_of_test_samples_alone_are_noted(tmp_path: Path, load) -> None:
    """A training split that was filtered, next to a whole test split: the best accuracy is below 100 %."""
    from datasets import DatasetDict

    names = ["cat", "cow", "dog"]
    train = of_classes(names, [0, 2] * 15)
    for labels, noted in (([0, 1, 2], ["cow"]), ([0, 2, 2], [])):
        folder = str(tmp_path / "".join(map(str, labels)))
        DatasetDict({"train": train, "test": of_classes(names, labels)}).save_to_disk(folder)
        notes = [note for note in load(f"{folder}?columns=x").notes if "without a training sample" in note]
        assert [note.rpartition(": ")[2] for note in notes] == noted


@pytest.mark.parametrize("sites", [(1.0, float("nan")), (1, None), ("a", "")])
def test_a_sample_without_a_source_is_refused(tmp_path: Path, load, sites) -> None:
    folder = save(tmp_path / "set", train={"age": [1, 2] * 10, "label": [0, 1] * 10, "site": [*sites] * 10})
    with raises(ConfigError, "'site'"):
        load(f"{folder}?source=site&columns=age")


@pytest.mark.parametrize(
    ("labels", "named"),
    [
        (["a", "b"] * 10 + ["only"], ("21", "3", "'only'")),
        ([0, 1, 2, 3, 4, 5, 6, 7] * 2 + [8] * 3, ("19", "2", "'0'")),  # a fifth is 4 samples
    ],
)
def test_classes_that_cannot_be_in_both_parts_are_named(tmp_path: Path, load, labels, named: tuple[str, ...]) -> None:
    folder = save(tmp_path / "set", train={"age": list(range(len(labels))), "label": labels})
    with raises(ConfigError, *named):
        load(folder)


def test_whole_numbers_that_are_stored_as_floats_are_classes(tmp_path: Path, load) -> None:
    given = {"x": [0.5, 1.5, 2.5, 3.5] * 5, "label": [0.0, 2.0] * 10}
    found = load(save(tmp_path / "set", train=given, test=given))
    assert (found.class_names, found.train.labels[:3].tolist()) == (("0", "2"), [0, 1, 0])
    with raises(ConfigError):
        load(save(tmp_path / "other", only=given | {"label": [0.0, 0.5] * 10}))


@pytest.mark.parametrize(("encoding", "header"), [("latin-1", "x"), ("latin-1", "größe"), ("utf-16", "x")])
def test_a_csv_file_in_another_encoding_than_utf_8_is_named(tmp_path: Path, load, encoding: str, header: str) -> None:
    """Its words would be bytes: names of sources such as b'K\\xf6ln'."""
    (tmp_path / "set.csv").write_text(f"{header},city,label\n" + "1,Köln,0\n2,Bonn,1\n" * 20, encoding=encoding)
    with raises(ConfigError, "set.csv", "pandas.read_csv"):
        load(f"{tmp_path}/set.csv?columns={header}&source=city")


@pytest.mark.parametrize("separator", [";", "\t"])
def test_another_separator_than_the_comma_is_named(tmp_path: Path, load, separator: str) -> None:
    (tmp_path / "set.csv").write_text(separator.join(("x", "label")) + f"\n1{separator}0" * 20)
    with raises(ConfigError, repr(separator), "pandas.read_csv"):
        load(tmp_path / "set.csv")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_file_is_a_table(tmp_path: Path, load, suffix: str) -> None:
    import pyarrow
    from pyarrow import csv, parquet

    columns = {"age": list(range(30)), "dose": [0.5, 1.5] * 15, "site": ["a", "b", "c"] * 10, "target": [0, 1] * 15}
    file = tmp_path / f"patients{suffix}"
    (csv.write_csv if suffix == ".csv" else parquet.write_table)(pyarrow.table(columns), str(file))
    found = load(f"{file}?columns=age,dose&source=site")
    assert (found.kind, found.input_shape, found.num_classes) == ("tensor", (2,), 2)
    assert (len(found.train), len(found.test)) == (24, 6)
    assert sorted(set(found.sources.tolist())) == [0, 1, 2]
    rows = found.train.gather(torch.arange(24))
    assert rows[:, 0].mean().item() == pytest.approx(0, abs=1e-6)
    file.write_bytes(b"\x00\x01")
    with pytest.raises(ConfigError, match=r"cannot be read|which column holds the classes"):
        load(f"{file}")


def table_with(**columns: list) -> dict[str, list]:
    """Return a table of 30 rows and two classes, whose ages do not tell the class."""
    return {"age": list(range(30)), **columns, "label": ["ill", "well"] * 15}


def test_further_columns_of_classes_are_no_inputs_unless_they_are_named(tmp_path: Path, load) -> None:
    numbers = {"Target": [k % 3 for k in range(30)], "code": [7.5, -1.0] * 15, "sick": [True, False] * 15}
    numbers["age"] = [k % 20 for k in range(30)]
    folder = save(tmp_path / "set", only=table_with(**numbers, words=["yes", "no"] * 15))
    found = load(folder)
    assert found.train.columns == ("age",)
    assert found.notes == (
        f"hf:{folder}: a value is a class, one to one, in: 'code', 'sick'. Name ?columns=... if these are inputs; they "
        "are not used",
        f"hf:{folder}: columns used: 'age'; not used: 'Target', 'code', 'sick', 'words'",
    )
    found = load(f"{folder}?columns=age,Target,code")
    assert found.train.columns == ("age", "Target", "code")
    assert found.notes == (f"hf:{folder}?columns=age,Target,code: a value is a class, one to one, in: 'code'",)
    alone = save(tmp_path / "alone", only={"code": [7, -1] * 15, "label": ["ill", "well"] * 15})
    with raises(ConfigError, "'code'"):
        load(alone)


@pytest.mark.parametrize("changed", [{"code": [5, 5, 6] * 10}, {"code": [5, 6] * 14 + [5, 5]}])
def test_a_column_that_is_no_second_label_is_an_input(tmp_path: Path, load, changed) -> None:
    found = load(save(tmp_path / "set", only=table_with(**changed)))
    assert found.train.columns == ("age", "code")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_the_time_to_read_a_table_is_linear_in_its_columns(tmp_path: Path, load, suffix: str, monkeypatch) -> None:
    """The library copies the description of all columns at each access; a table is read once."""
    import pyarrow
    from datasets import Features
    from pyarrow import csv, parquet

    copies = []
    copy = Features.copy
    monkeypatch.setattr(Features, "copy", lambda self: copies.append(len(self)) or copy(self))
    seen = []
    for count in (20, 400):
        rows = np.random.default_rng(0).integers(0, 9, (30, count))
        rows[:, 0] = np.arange(30)
        table = pyarrow.table({**{f"gene {k}": rows[:, k] for k in range(count)}, "label": [0, 1] * 15})
        file = tmp_path / f"{count}{suffix}"
        (csv.write_csv if suffix == ".csv" else parquet.write_table)(table, str(file))
        copies.clear()
        found = load(file)
        seen.append(len(copies))
        assert found.input_shape == (count,)
        raw = found.train.inputs.double() * torch.tensor(found.train.std) + torch.tensor(found.train.mean)
        expected = rows[raw[:, 0].round().long().numpy()]
        np.testing.assert_allclose(raw.numpy(), expected, atol=1e-5)
        assert len(found.notes[0]) < 400
    assert seen[0] == seen[1]
    with raises(ConfigError, "'x'", "0", "9", "391"):
        load(f"{file}?label=x")


def test_a_text_may_have_lines(tmp_path: Path, load, monkeypatch) -> None:
    """Lines of a quoted text are no rows, also where a block of the file ends between them."""
    monkeypatch.setattr("fedcore_huggingface.places.CSV_BLOCK", 1 << 10)
    rows = [f'"first of {k}\n{k},1\nthe last, {k}",{k % 5},{k % 2}' for k in range(200)]
    (tmp_path / "lines.csv").write_text("\n".join(["note,age,label", *rows]))
    found = load(f"{tmp_path / 'lines.csv'}?columns=age")
    assert len(found.train) + len(found.test) == 200


def test_a_row_of_a_csv_file_may_be_long(tmp_path: Path, load) -> None:
    """A row has to fit into a block, by default a megabyte, which 100,000 columns of fractions exceed."""
    rows = [f"{k % 5},{'long ' * (1 << 20) if k in (7, 8, 9) else 'short'},{k % 2}" for k in range(30)]
    (tmp_path / "long.csv").write_text("\n".join(["age,note,label", *rows]))
    assert load(f"{tmp_path / 'long.csv'}?columns=age").input_shape == (1,)


def test_constant_and_extreme_columns_are_normalised_to_finite_numbers(tmp_path: Path, load) -> None:
    ids = [2**60 + 1000 * k for k in range(30)]
    noise = [0.3 if k % 3 else 0.1 + 0.2 for k in range(30)]
    given = table_with(fixed=[0.1] * 30, noise=noise, id=ids, huge=[k % 7 * 1e200 for k in range(30)])
    given["tiny"] = [k % 5 * 1e-200 for k in range(30)]
    folder = save(tmp_path / "set", train=given, test=given)
    found = load(folder)
    mean, std = (dict(zip(found.train.columns, of, strict=True)) for of in (found.train.mean, found.train.std))
    assert (mean["fixed"], std["fixed"], std["noise"]) == (0.1, 1.0, 1.0)
    for column in ("huge", "tiny"):
        scaled = np.array(given[column]) / max(given[column])
        assert std[column] == pytest.approx(scaled.std() * max(given[column]), rel=1e-12)
    rows = found.train.inputs.numpy()
    np.testing.assert_allclose(rows[:, [0, 3, 4, 5]].std(axis=0), 1, rtol=1e-3)
    assert found.notes[1:] == (
        f"hf:{folder}: one value in all training rows, which tells nothing, in: 'fixed', 'noise'. Name other "
        "?columns=... to leave them out",
        f"hf:{folder}: whole numbers above 2^53, which lose their last digits, in: 'id'. Name other ?columns=... to "
        "leave them out",
    )
    far = save(tmp_path / "far", train=given, test={**given, "age": [1e200] * 30})
    with raises(DataError, "'age'"):
        load(far)


@pytest.mark.parametrize("cell", [[1], {"a": 1}])
@pytest.mark.parametrize("option", ["label", "source"])
def test_lists_and_structs_are_neither_classes_nor_sources(tmp_path: Path, load, cell, option: str) -> None:
    folder = save(tmp_path / "set", train=table_with(odd=[cell] * 30))
    with pytest.raises(ConfigError, match="cells of column 'odd' have to be single words or numbers"):
        load(f"{folder}?{option}=odd")


def cells_of_images(folder: Path, cells: list[object]) -> Path:
    """Return a file of datasets whose column of images has these cells."""
    import pyarrow
    from datasets import Features, Image, Value
    from pyarrow import parquet

    schema = Features({"image": Image(), "label": Value("int64")}).arrow_schema
    columns = {"image": cells, "label": [k % 2 for k in range(len(cells))]}
    folder.mkdir(exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pydict(columns, schema=schema), str(folder / "set.parquet"))
    return folder / "set.parquet"


def paths_instead_of_images(folder: Path, path: str) -> Path:
    return cells_of_images(folder, [{"bytes": None, "path": path}] * 20)


def test_an_image_cell_opens_files_of_the_data_set_s_own_folder_alone(tmp_path: Path, load, monkeypatch) -> None:
    def opened(*given: object, **named: object) -> None:
        raise AssertionError("an address was opened")

    monkeypatch.setattr("datasets.features.image.xopen", opened)
    outside = tmp_path / "outside.png"
    pictures(2)["image"][0].save(outside)
    own = paths_instead_of_images(tmp_path / "own", "a.png")
    pictures(2)["image"][0].save(own.parent / "a.png")
    assert load(own).input_shape == (3, 8, 8)
    (own.parent / "a.png").unlink()
    (own.parent / "a.png").symlink_to(outside)
    with raises(ConfigError, "'image'", "'a.png'"):
        load(own)
    for number, path in enumerate(
        (str(outside), "../outside.png", "http://127.0.0.1:9/a.png", "zip://a.png::http://127.0.0.1:9/a.zip", ".", "\0")
    ):
        with raises(ConfigError):
            load(paths_instead_of_images(tmp_path / str(number), path))


@pytest.mark.parametrize("cell", [None, {"bytes": b"GIF", "path": None}])
def test_a_cell_that_is_no_image_is_named(tmp_path: Path, load, cell: object) -> None:
    cells = [encoded(image) for image in pictures(20)["image"]]
    cells[3] = cell
    file = cells_of_images(tmp_path, cells)
    with pytest.raises(ConfigError, match="row 3 of column 'image' is no image that can be read"):
        load(file)
    with raises(ConfigError, "'age'", "cast_column"):
        load(f"{save(tmp_path / 'set', only=table_with())}?image=age")


def test_pages_of_one_file_are_not_left_out_in_silence(tmp_path: Path, load) -> None:
    images = pictures(20)["image"]
    images[3].save(tmp_path / "pages.tif", save_all=True, append_images=images[4:6])
    cells = [encoded(image) for image in images]
    cells[3] = {"bytes": (tmp_path / "pages.tif").read_bytes(), "path": None}
    with raises(ConfigError, "'image'", "TIFF"):
        load(cells_of_images(tmp_path, cells))


def test_a_repository_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, load) -> None:
    """This machine has no network: that the library finds a repository or its cache is the library's own.

    The folder of data sets has one of this name, as MNIST's own files are, which no save_to_disk wrote.
    """
    import datasets

    (tmp_path / "some-set" / "raw").mkdir(parents=True)
    monkeypatch.setenv("FEDCORE_DATA", str(tmp_path))

    asked = []

    def load_dataset(*given: object, **named: object) -> object:
        asked.append((given, named))
        table = table_of({"x": [0.5, 1.5, 1.5] * 10, "label": [0, 1] * 15})
        return datasets.DatasetDict({"train": table, "test": table})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = load("owner/some-set?subset=plain&revision=v1.0")
    assert asked == [(("owner/some-set", "plain"), {"revision": "v1.0"})]
    assert (found.input_shape, len(found.train), len(found.test)) == ((1,), 30, 30)


def test_without_a_network_and_without_a_cache_the_message_says_so(monkeypatch: pytest.MonkeyPatch, load) -> None:
    import datasets

    def load_dataset(*given: object, **named: object) -> object:
        raise ConnectionError("Couldn't reach 'owner/some-set' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with raises(ConfigError, "owner/some-set", "ConnectionError", "save_to_disk"):
        load("owner/some-set")
