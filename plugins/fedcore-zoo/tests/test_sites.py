"""Statistics of sites from their counts and sums: those of all rows in one place."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from fedcore import ConfigError, DataError
from fedcore.data import Dataset, ResidentSamples, TensorSamples
from fedcore_zoo import Cells, Recipe, TableSamples
from fedcore_zoo.sites import answer, statistics_of_sites
from tests.sentences import raises

COLUMNS = ("a", "word", "b", "empty")


def table(rows, missing: str | None = "median", words=("word",)) -> Dataset:
    cells = Cells.read(rows, COLUMNS, words)
    recipe = Recipe.of(cells, missing=missing, indicators=True)
    samples = TableSamples(cells, torch.zeros(len(rows), dtype=torch.int64), recipe, "t", missing, True)
    return Dataset("t", samples, samples, 2, (len(recipe.outputs),))


def rows_of(rng: np.random.Generator, n: int, whole: bool) -> list[list]:
    a = rng.normal(0, 10.0 ** rng.integers(-9, 9), n)
    a = np.round(a, 1) if not whole else rng.integers(-3, 3, n).astype(float)
    a[rng.random(n) < 0.2] = np.nan
    b = rng.choice([0.0, -0.0, 5e-324, -1e300, 1.0, 2.5], n) if whole else rng.normal(1e6, 1e-3, n)
    return [[x, w, y, np.nan] for x, w, y in zip(a, rng.choice(["u", "v", " v", None], n), b, strict=True)]


def asked(parts: list[Dataset]):
    """Return the function that asks these sites, whose questions and answers pass through JSON."""

    def ask(question):
        question = json.loads(json.dumps(question))
        found = {
            f"site {k}": answer(part.train, torch.arange(len(part.train)), question) for k, part in enumerate(parts)
        }
        return json.loads(json.dumps(found))

    return ask


@pytest.mark.parametrize("seed", range(8))
def test_a_recipe_from_sums_is_that_of_all_rows(seed):
    rng = np.random.default_rng(seed)
    frames = [rows_of(rng, int(rng.integers(5, 40)), whole=False) for _ in range(4)]
    whole = table([row for rows in frames for row in rows])
    found = statistics_of_sites(table(rows_of(rng, 9, whole=False)), asked([table(rows) for rows in frames]))["recipe"]
    expected = whole.train.made
    made = Recipe.from_json(found)
    assert (made.columns, made.words, made.fill, made.indicators) == (
        expected.columns,
        expected.words,
        expected.fill,
        expected.indicators,
    )
    np.testing.assert_allclose(made.mean, expected.mean, rtol=1e-12, atol=1e-20)
    np.testing.assert_allclose(made.std, expected.std, rtol=1e-6)


@pytest.mark.parametrize("missing", ["median", "most-frequent"])
@pytest.mark.parametrize("seed", range(4))
def test_ties_zeros_and_the_edges_of_float64_have_the_same_median_and_mode(seed, missing):
    rng = np.random.default_rng(seed)
    frames = [
        [[*row[:2], row[2] if abs(row[2]) < 10 else -3.0, row[3]] for row in rows_of(rng, 12, whole=True)]
        for _ in range(3)
    ]
    parts = [table(rows, missing) for rows in frames]
    found = statistics_of_sites(parts[0], asked(parts))["recipe"]
    assert found["fill"] == dict(table([row for rows in frames for row in rows], missing).train.made.fill)


def test_a_mode_among_many_numbers_would_take_rows():
    rows = [[float(k), "u", 1.0, None] for k in range(101)]
    with raises(ConfigError, "'a'", "100", "'site 0'"):
        statistics_of_sites(table(rows, "most-frequent"), asked([table(rows, "most-frequent")]))


def test_images_and_rows_have_the_mean_and_deviation_of_all():
    draw = np.random.default_rng(0)
    pixels = torch.from_numpy(draw.integers(0, 256, (30, 2, 4, 4), dtype=np.uint8))
    labels = torch.zeros(30, dtype=torch.int64)
    images = ResidentSamples.from_pixels(pixels, labels, (0.1, 0.2), (0.3, 0.4))
    rows = TensorSamples(torch.from_numpy(draw.normal(1e5, 0.1, (30, 2))), labels, columns=("x", "y"))
    swapped = TensorSamples(rows.inputs.flip(1), labels, columns=("y", "x"))
    for samples, other, values in (
        (images, images, pixels.double().transpose(0, 1).flatten(1) / 255),
        (rows, swapped, rows.inputs.T),
    ):
        parts = {"one": (samples, torch.arange(12)), "two": (other, torch.arange(12, 30))}
        found = statistics_of_sites(
            Dataset("d", samples, samples, 2, tuple(samples.gather(torch.arange(1)).shape[1:])),
            lambda question, parts=parts: {name: answer(*part, question) for name, part in parts.items()},
        )
        np.testing.assert_allclose(found["mean"], values.mean(dim=1), rtol=1e-14)
        np.testing.assert_allclose(found["std"], values.std(dim=1, correction=0), rtol=1e-9)


@pytest.mark.parametrize(
    ("kind", "lie"),
    [
        ("cells", lambda found: {**found, "known": {}}),
        ("cells", lambda found: {**found, "rows": -1}),
        ("cells", lambda found: {**found, "words": {"word": {"u" * 2000: 1}}}),
        ("bins", lambda found: {"bins": {"a": [[1] * 3]}}),
        ("bins", lambda found: {"bins": {name: [[-1] * 256] for name in ("a", "b", "empty")}}),
        ("bins", lambda found: {"bins": {name: [[0] * 256 for _ in each] for name, each in found["bins"].items()}}),
        ("sums", lambda found: {**found, "sum": [1.0]}),
        ("sums", lambda found: {**found, "count": 0}),
        ("squares", lambda found: {**found, "sum": [float("inf")] * 3}),
        ("squares", lambda found: {**found, "sum": [-1.0] * 3}),
        ("squares", lambda found: None),
    ],
)
def test_answers_that_are_not_plausible_are_refused(kind, lie):
    site = table(rows_of(np.random.default_rng(0), 20, whole=False))
    honest = asked([site])
    with raises(ConfigError, "client"):
        statistics_of_sites(
            site,
            lambda question: (
                {name: lie(found) for name, found in honest(question).items()}
                if question["ask"] == kind
                else honest(question)
            ),
        )


def test_sites_whose_columns_are_of_another_kind_fit_or_are_told():
    """A column of empty cells is no column of numbers, codes are categories where the run has categories."""
    plain = [[1.0, "1", 2.0, 3.0], [2.0, "2", 4.0, 5.0], [3.0, "7", 4.0, 5.0], *[[4.0, "2", 6.0, None]] * 4]
    server = table(plain)
    codes = table([[row[0], float(row[1]), *row[2:]] for row in plain], words=())
    empty = table([[row[0], None, *row[2:]] for row in plain], words=())
    texts = table([[str(row[0]), row[1], *row[2:]] for row in plain], words=("a", "word"))
    found = statistics_of_sites(server, asked([codes, empty, texts]))["recipe"]
    assert found["words"] == {"word": ("1", "2", "7")}
    assert found["fill"]["word"] == "2"
    np.testing.assert_allclose(found["mean"][0], np.mean([row[0] for row in plain]))
    comma = table([[f"{row[0]}".replace(".", ","), *row[1:]] for row in plain], words=("a", "word"))
    with raises(DataError, "'1,0'", "'a'"):
        statistics_of_sites(server, asked([comma]))
