"""Statistics of samples that stay at their sites. A site answers with counts and sums, never with rows.

The server asks questions, mappings of plain values: ``cells``, which categories a table has and how many cells are
empty; ``bins``, how many numbers are in each of 256 intervals, eight times until the median is known to the last bit;
``sums`` of numbers; ``squares``, sums of their squared distances from the mean of all sites.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from fedcore import ConfigError
from fedcore.data import Dataset, ResidentSamples, Samples, TensorSamples
from fedcore_zoo.cells import Array, Cells
from fedcore_zoo.preparation import pixels_of, raw_rows, refuse_fitted
from fedcore_zoo.tables import Recipe, TableSamples, divisors

Plain: TypeAlias = dict[str, Any]
"""A question or an answer, as JSON keeps it."""

FEWEST = 5
"""Training samples that a site needs: sums of fewer tell its samples."""

MOST_VALUES = 100
"""Different numbers of a column that a site counts one by one, for the most frequent one."""

BITS = 8
"""Binary digits of a median that one question gives."""


def answer(samples: Samples, rows: Tensor, question: Mapping[str, Any]) -> Plain:
    """Return a site's answer to a question on its training samples.

    :param rows: the positions of the training samples, (n,) int64.
    :raises ConfigError: the samples have no such sums, or are too few.
    :raises DataError: a column of the run is missing, or its cells are of another kind.
    """
    if len(rows) < FEWEST:
        raise ConfigError(
            f"sums of {len(rows)} training samples would tell them: at least {FEWEST} are needed for --normalize "
            "global or client. With as-loaded or none no statistics travel"
        )
    kind = question.get("ask")
    if kind in ("cells", "bins"):
        if not isinstance(samples, TableSamples):
            raise ConfigError("the run's data is a table with raw cells: name this client's as hf:FILE.csv, too")
        cells = samples.fitted(question["columns"], question["words"]).rows(rows.numpy())
        return _cells(cells, question) if kind == "cells" else _bins(cells, question)
    numbers = _numbers(samples, rows, question)
    with np.errstate(over="ignore", invalid="ignore"):
        if kind == "squares":
            numbers = (numbers - np.asarray(question["mean"], dtype=np.float64)) ** 2
        return {"count": len(numbers), "sum": numbers.sum(axis=0).tolist()}


def _cells(cells: Cells, question: Mapping[str, Any]) -> Plain:
    """Return how many cells of each column are not empty, and how often each category or number is there."""
    counted: Plain = {"rows": len(cells), "known": {}, "words": {}, "values": {}}
    for name in cells.columns:
        known = cells[name][~np.isnan(cells[name])]
        counted["known"][name] = len(known)
        if name not in cells.words and not question.get("values"):
            continue
        values, counts = np.unique(known, return_counts=True)
        if name in cells.words:
            words = [cells.words[name][code] for code in values.astype(np.int64)]
            counted["words"][name] = dict(zip(words, counts.tolist(), strict=True))
        elif len(values) <= MOST_VALUES:
            counted["values"][name] = [values.tolist(), counts.tolist()]
    return counted


def _bins(cells: Cells, question: Mapping[str, Any]) -> Plain:
    """Return, for each column and prefix, how many numbers whose first bits these are have which next eight."""
    shift, bins = int(question["shift"]), {}
    for name, prefixes in question["prefixes"].items():
        keys = _ordered(cells[name][~np.isnan(cells[name])])
        next_bits, first = keys >> np.uint64(shift), np.zeros_like(keys)
        if shift + BITS < 64:  # NumPy shifts by less than all bits
            first = keys >> np.uint64(shift + BITS)
        parts = [next_bits[first == np.uint64(prefix)] & np.uint64(255) for prefix in prefixes[:2]]
        bins[name] = [np.bincount(part.astype(np.int64), minlength=256).tolist() for part in parts]
    return {"bins": bins}


def _ordered(numbers: Array) -> Array:
    """Return numbers (n,) float64 as whole ones of 64 bits, uint64, in the same order."""
    bits = (numbers + 0.0).view(np.uint64)  # -0.0 is 0.0
    sign = np.uint64(1 << 63)
    keys: Array = np.where(bits & sign, ~bits, bits | sign)
    return keys


def _number(key: int) -> float:
    """Return the number of which :func:`_ordered` makes ``key``."""
    bits = key ^ (1 << 63) if key >> 63 else key ^ ((1 << 64) - 1)
    return float(np.array([bits], dtype=np.uint64).view(np.float64)[0])


def _numbers(samples: Samples, rows: Tensor, question: Mapping[str, Any]) -> Array:
    """Return the numbers of each channel or column as they were before normalisation, (n, channels) float64."""
    columns = question.get("columns", ())
    if isinstance(samples, TableSamples):
        cells = samples.fitted(columns or samples.cells.columns, question.get("words", ())).rows(rows.numpy())
        return cells.numbers(question.get("fill", {}), samples.where)
    if isinstance(samples, ResidentSamples):
        pixels = pixels_of(samples)[rows].double() / (255.0 if samples.from_bytes else 1.0)
        return pixels.transpose(0, 1).flatten(1).T.numpy()
    if isinstance(samples, TensorSamples) and samples.inputs.ndim == 2 and samples.inputs.is_floating_point():
        return raw_rows(samples.with_columns(columns, "the client's table"))[rows].numpy()
    raise ConfigError("--normalize global or client is for images and rows of numbers")


def statistics_of_sites(dataset: Dataset, ask: Callable[[Plain], Mapping[str, Mapping[str, Any]]]) -> Plain:
    """Return the statistics of the training samples of all sites: ``mean`` and ``std``, or the ``recipe`` of a table.

    They equal the statistics of the samples in one place: categories, medians and most frequent values exactly, means
    and deviations up to the rounding of sums.

    :param dataset: the server's own data set, whose kind and columns are the run's.
    :param ask: sends a question to all sites, and returns their answers by name, as they came.
    :raises ConfigError: an answer is not plausible. The message names the site.
    """
    train = dataset.train
    if isinstance(train, TableSamples):
        refuse_fitted(train, "global or client")
        return {"recipe": _recipe(train, ask).to_json()}
    width = len(getattr(train, "mean", ())) or dataset.input_shape[0]
    mean, std = _moments(ask, {"columns": list(getattr(train, "columns", ()))}, width, table=False)
    return {"mean": mean.tolist(), "std": std.tolist()}


def _recipe(train: TableSamples, ask: Callable[[Plain], Mapping[str, Mapping[str, Any]]]) -> Recipe:
    columns, missing = train.cells.columns, train.missing
    numbers = [name for name in columns if name not in train.cells.words]
    table: Plain = {"columns": list(columns), "words": [name for name in columns if name in train.cells.words]}
    rows, known = 0, dict.fromkeys(columns, 0)
    counts: dict[str, dict[Any, int]] = {name: {} for name in columns}
    question = {"ask": "cells", **table, "values": missing == "most-frequent"}
    for site, cells in _usable(ask(question), partial(_read_cells, table=table)):
        rows += cells["rows"]
        for name in columns:
            known[name] += cells["known"][name]
            if missing == "most-frequent" and name in numbers and name not in cells["values"]:
                raise ConfigError(
                    f"column {name!r} has more than {MOST_VALUES} different numbers at client {site!r}, so the most "
                    "frequent one would take rows: name the data with ?missing=median"
                )
            of_site = cells["words"][name].items() if name in table["words"] else cells["values"].get(name, ())
            for value, count in of_site:
                counts[name][value] = counts[name].get(value, 0) + count
    words = {name: tuple(sorted(counts[name])) for name in table["words"]}
    fill: dict[str, float | str] = {}
    if missing == "median":
        fill |= _medians(ask, table, {name: known[name] for name in numbers})
    if missing:
        for name in columns:
            if counts[name]:
                fill[name] = min(counts[name], key=lambda value: (-counts[name][value], value))
            elif name in numbers:
                fill.setdefault(name, 0.0)
    mean, std = _moments(ask, {**table, "fill": {name: fill[name] for name in numbers if name in fill}}, len(numbers))
    marked = tuple(name for name in columns if known[name] < rows) if train.indicators else ()
    return Recipe(columns, words, fill, marked, tuple(mean.tolist()), tuple(std.tolist()))


def _medians(
    ask: Callable[[Plain], Mapping[str, Mapping[str, Any]]], table: Plain, known: Mapping[str, int]
) -> dict[str, float]:
    """Return the median of each column of numbers that has some, by the counts of the sites.

    :param known: how many cells of the column are not empty, over all sites.
    """
    # The two numbers in the middle, in an odd count twice the same: rank among the numbers whose first bits are known.
    places = {name: [((count - 1) // 2, 0), (count // 2, 0)] for name, count in known.items() if count}
    for shift in range(64 - BITS, -1, -BITS) if places else ():
        prefixes = {name: sorted({prefix for _, prefix in middle}) for name, middle in places.items()}
        total = {name: np.zeros((len(each), 256), dtype=np.int64) for name, each in prefixes.items()}

        def read(reply: Mapping[str, Any], total: Mapping[str, Array] = total) -> dict[str, Array]:
            bins = {name: np.array(reply["bins"][name]) for name in total}
            if any(bins[name].shape != total[name].shape or bins[name].dtype.kind != "i" for name in total):
                raise ValueError("counts of 256 intervals are expected")
            if any((each < 0).any() for each in bins.values()):
                raise ValueError("a count is negative")
            return bins

        for _, bins in _usable(ask({"ask": "bins", **table, "shift": shift, "prefixes": prefixes}), read):
            for name, counts in bins.items():
                total[name] += counts
        for name, middle in places.items():
            for number, (rank, prefix) in enumerate(middle):
                below = np.cumsum(total[name][prefixes[name].index(prefix)])
                if rank >= below[-1]:
                    raise ConfigError(f"the clients' counts of column {name!r} do not add up; ask them to start again")
                place = int(np.searchsorted(below, rank, side="right"))
                middle[number] = rank - int(below[place - 1] if place else 0), prefix << BITS | place
    return {name: float(np.median([_number(key) for _, key in middle])) for name, middle in places.items()}


def _moments(
    ask: Callable[[Plain], Mapping[str, Mapping[str, Any]]], asked: Plain, width: int, *, table: bool = True
) -> tuple[Array, Array]:
    """Return mean and deviation of each channel or column over all sites; the deviation of a constant one is 1."""

    def read(reply: Mapping[str, Any], least: float) -> tuple[int, Array]:
        count, total = reply["count"], np.array(reply["sum"], dtype=np.float64)
        if type(count) is not int or count < 1 or total.shape != (width,) or not np.isfinite(total).all():
            raise ValueError(f"count {count!r}, sums of shape {total.shape}; {width} finite ones are expected")
        if (total < least).any():
            raise ValueError("a sum of squares is negative")
        return count, total

    def over_all(question: Plain, least: float = -np.inf) -> Array:
        parts = [part for _, part in _usable(ask(question), partial(read, least=least))]
        means: Array = np.sum([total for _, total in parts], axis=0) / sum(count for count, _ in parts)
        return means

    mean = over_all({"ask": "sums", **asked})
    std = np.sqrt(over_all({"ask": "squares", **asked, "mean": mean.tolist()}, least=0.0))
    return mean, divisors(mean, std, table=table)


def _read_cells(reply: Mapping[str, Any], table: Plain) -> Plain:
    """Return a site's counts of cells.

    :param table: the ``columns`` of the run, and which of them have ``words``.
    :raises ValueError: or KeyError, TypeError. The answer holds no such counts.
    """
    words = {name: dict(counts) for name, counts in reply["words"].items()}
    values = {name: list(zip(*pair, strict=True)) for name, pair in reply["values"].items()}
    texts = [word for counts in words.values() for word in counts]
    counts = [reply["rows"], *reply["known"].values(), *(n for each in words.values() for n in each.values())]
    counts += [n for pairs in values.values() for _, n in pairs]
    if any(type(count) is not int or count < 0 for count in counts):
        raise ValueError("a count is no whole number")
    if any(len(each) > Cells.most_words for each in words.values()) or any(
        len(word) > Cells.most_words for word in texts
    ):
        raise ValueError(f"a column has more than {Cells.most_words:,} categories, or a longer name of one")
    if not all(type(value) is float and np.isfinite(value) for pairs in values.values() for value, _ in pairs):
        raise ValueError("a value is no finite number")
    if {*reply["known"]} != {*table["columns"]} or {*words} != {*table["words"]}:
        raise ValueError("it has other columns than the run")
    return {"rows": reply["rows"], "known": dict(reply["known"]), "words": words, "values": values}


def _usable(answers: Mapping[str, Mapping[str, Any]], read: Callable[[Mapping[str, Any]], Any]) -> Iterator[Any]:
    """Yield each site's name and what ``read`` makes of its answer.

    :raises ConfigError: an answer is not plausible.
    """
    for site, reply in answers.items():
        try:
            usable = read(reply)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError(f"client {site!r} gives no usable sums: {type(error).__name__}: {error!s:.200}") from None
        yield site, usable
