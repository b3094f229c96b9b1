"""A number for each client: as an array, but in memory for the clients that have one only."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcore.storage.client_row import BLOCK, ClientRow

NUMBERS = st.dictionaries(st.integers(0, 5 * BLOCK), st.integers(-3, 3), max_size=20)


def dense(row: ClientRow) -> list[int]:
    return [row[client] for client in range(6 * BLOCK)]


@settings(deadline=None)
@given(NUMBERS, NUMBERS)
def test_it_is_as_an_array(first, second):
    array = np.full(6 * BLOCK, -1)
    for client, number in first.items():
        array[client] = number
    row = ClientRow(-1, np.int32).updated(first)
    assert dense(row) == array.tolist()
    clients, numbers = row.filled()
    assert clients.tolist() == np.flatnonzero(array != -1).tolist()
    assert numbers.tolist() == array[clients].tolist()
    assert numbers.dtype == np.int32
    asked = np.array(sorted({*first, *second}), np.int32)
    assert row.of(asked).tolist() == array[asked].tolist()
    again = ClientRow(-1, np.int32).filled_with(np.array([*first], np.int64), np.array([*first.values()], np.int32))
    assert dense(again) == array.tolist()
    after = row.updated(second)
    assert dense(row) == array.tolist(), "a row does not change"
    for client, number in second.items():
        array[client] = number
    assert dense(after) == array.tolist()
    differing = [client for client in range(6 * BLOCK) if row[client] != after[client]]
    assert row.changed(after) == after.changed(row) == again.changed(after) == differing


def test_the_last_number_of_a_client_counts():
    row = ClientRow(0, np.int64).filled_with(np.array([7, 3, 7]), np.array([1, 2, 5]))
    assert (row[7], row[3]) == (5, 2)


@pytest.mark.parametrize("outside", [-1, -BLOCK, BLOCK, 10**12])
def test_clients_outside_are_empty(outside):
    assert ClientRow(-2, np.int32).updated({5: 1})[outside] == -2


def test_rows_share_what_does_not_change():
    """Fifty rounds of fifty of a million clients, all rows kept: 200 MB as arrays."""
    stream = np.random.default_rng(0)
    tracemalloc.start()
    try:
        rows = [ClientRow(-2, np.int32)]
        for number in range(50):
            rows.append(rows[-1].updated(dict.fromkeys(stream.integers(0, 1_000_000, 50).tolist(), number)))
        assert tracemalloc.get_traced_memory()[0] < 10e6
    finally:
        tracemalloc.stop()
    assert len(rows[-1].changed(rows[-2])) == 50


def test_the_same_numbers_again_take_no_memory():
    row = ClientRow(0, np.int64).updated({5: 1, 1_000_000: 2})
    tracemalloc.start()
    try:
        again = row.updated(dict.fromkeys(range(10, 1_000_000, BLOCK), 0) | {5: 1})
        assert tracemalloc.get_traced_memory()[0] < 1e6
    finally:
        tracemalloc.stop()
    assert again.changed(row) == []
