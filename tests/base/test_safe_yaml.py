"""YAML gives the values that JSON has and no others, and what is written is read back."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcore import ConfigError, RunConfig
from fedcore.base.safe_yaml import read_yaml, write_yaml
from tests.sentences import raises

TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=60) | st.text(" é:#'a\n", max_size=200)
"""Characters of all kinds, and lines that are longer than those of a file."""
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60)
@given(VALUES)
def test_what_is_written_is_read_back(value):
    """As JSON would give it back: that is how a run takes its options before it writes them."""
    assert read_yaml(write_yaml({"value": value})) == {"value": json.loads(json.dumps(value))}


def test_a_text_that_is_not_utf_8_is_refused_with_its_option():
    with raises(ConfigError, "--data-dir", "udcff"):
        write_yaml({"rounds": 1, "data_dir": "/data/\udcff"})


def test_a_configuration_is_written_as_pyyaml_itself_writes_it():
    """libyaml, where it is there, and PyYAML's own code give the same file, in the order of the options."""
    options = RunConfig(plugins={"moon": {}}, data_dir="2001-01-01", lr=1e-5).model_dump(mode="json")
    assert write_yaml(options) == yaml.safe_dump(options, sort_keys=False)
    assert [*read_yaml(write_yaml(options))] == [*options]


def test_yaml_holds_what_json_holds() -> None:
    assert read_yaml("{a: 2001-01-01, b: [1, 1.5, yes, null]}") == {"a": "2001-01-01", "b": [1, 1.5, True, None]}
    assert read_yaml("{a: &x {mu: 1}, b: *x}") == {"a": {"mu": 1}, "b": {"mu": 1}}
    assert read_yaml(json.dumps({"note": "\N{DANGO} at night"})) == {"note": "\N{DANGO} at night"}  # two escapes
    for text in ("!!set {a}", "!!python/name:os.system", "!!binary aaaa", "!!int x", "[" * 2000, r'"\ud83d"'):
        with pytest.raises(ValueError, match=r"\w"):
            read_yaml(text)


def test_a_key_that_stands_twice_is_refused_with_its_line() -> None:
    with raises(ValueError, "'rounds'", "line 3"):
        read_yaml("rounds: 1\nlr: 0.1\n'rounds': 2\n")
    assert read_yaml('{1: a, "1": b}') == {1: "a", "1": "b"}
    merged = "a: {b: &b {<<: &c {mu: 1, nu: 1}, mu: 2}}\nd: {<<: *b, nu: 3}\ne: {<<: *b}"
    assert read_yaml(merged) == {"a": {"b": {"mu": 2, "nu": 1}}, "d": {"mu": 2, "nu": 3}, "e": {"mu": 2, "nu": 1}}
    assert read_yaml("a: &a {mu: 1}\nb: {<<: *a, <<: *a}") == {"a": {"mu": 1}, "b": {"mu": 1}}


def test_a_file_that_fedcore_wrote_has_no_aliases() -> None:
    """Ten lines of aliases can stand for more values than there is time to read."""
    shared = ["macro-f1"]
    text = write_yaml({"metrics": shared, "changes": [{"metrics": [[], shared]}]})
    assert read_yaml(text, plain=True) == {"metrics": shared, "changes": [{"metrics": [[], shared]}]}
    for text in ("a: &a [1]\nb: *a", "a: &a {b: 1}\nc: {<<: *a}"):
        read_yaml(text)
        with raises(ValueError, "line 2"):
            read_yaml(text, plain=True)
    assert read_yaml("a: {b: 1, <<: {c: 2}}", plain=True) == {"a": {"b": 1, "c": 2}}, "nothing is repeated"
