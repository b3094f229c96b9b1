"""JSON values: strict, without nan, and with a checksum that fits one run."""

from __future__ import annotations

import json

import pytest

from fedcore.storage import json_values


def test_json_is_strict():
    assert json_values.parse_json(r'["\ud83d\ude00", "\u00e9"]') == ["\U0001f600", "\u00e9"]
    for text in (r'"\ud83d"', r'{"\ude00": 1}', r'["a", "\ude00\ud83d"]'):
        with pytest.raises(ValueError, match="unpaired surrogate"):
            json_values.parse_json(text)
    with pytest.raises(ValueError, match="decode"):
        json_values.parse_json(b'"\xed\xa0\xbd"')
    with pytest.raises(ValueError, match="nested too deeply"):
        json_values.parse_json("[" * 100_000)


def test_records_hold_no_nan():
    record = json_values.finite({"a": 1.0, "b": {"c": [float("nan"), 2.0], "d": float("inf")}})
    assert record == {"a": 1.0, "b": {"c": [None, 2.0], "d": None}, "not_finite": ["b.c.0", "b.d"]}
    assert json_values.finite({"a": 1.0}) == {"a": 1.0}


def test_a_checksum_is_of_the_values_and_not_of_how_they_are_written():
    value = json_values.sealed({"a": [1.5, None, "\u00e9"], "b": {"c": 1e-300}})
    assert json_values.unsealed(json.loads(json.dumps(value, indent=2, ensure_ascii=False))) == {
        "a": [1.5, None, "\u00e9"],
        "b": {"c": 1e-300},
    }
    with pytest.raises(ValueError, match="checksum"):
        json_values.unsealed({**value, "a": [1.25, None, "\u00e9"]})


def test_a_record_of_another_run_does_not_fit():
    line = json_values.sealed({"round": 0}, mark="one run")
    assert json_values.unsealed(line, "one run") == {"round": 0}
    with pytest.raises(ValueError, match="another run's"):
        json_values.unsealed(line, "another")
    with pytest.raises(ValueError, match="checksum"):
        json_values.unsealed({"round": 0})
    with pytest.raises(ValueError, match="is no record"):
        json_values.unsealed([1])
