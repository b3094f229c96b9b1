"""Sentences of errors: what a test names, and the text in tests/sentences.json."""

from __future__ import annotations

import json
import warnings

import pytest

from tests import sentences


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    """A file of its own for these tests, without the flag."""
    monkeypatch.setattr(sentences, "FILE", tmp_path / "sentences.json")
    monkeypatch.delenv(sentences.UPDATE, raising=False)
    return tmp_path / "sentences.json"


def test_another_sentence_is_refused_until_it_is_taken_over(file, monkeypatch):
    with pytest.raises(AssertionError, match="another sentence, which pytest --update-sentences takes over: # is one"):
        sentences.check("3 is one")
    monkeypatch.setattr(sentences, "_written", set())
    monkeypatch.setenv(sentences.UPDATE, "1")
    sentences.check("3 is one")
    monkeypatch.delenv(sentences.UPDATE)
    sentences.check("4 is one")  # the test names the number
    (tests,) = json.loads(file.read_text()).values()
    assert tests == ["tests/base/test_sentences.py::test_another_sentence_is_refused_until_it_is_taken_over"]


def test_a_new_sentence_takes_the_place_of_the_old_one(file, monkeypatch):
    monkeypatch.setenv(sentences.UPDATE, "1")
    for sentence in ("old", "new"):
        monkeypatch.setattr(sentences, "_written", set())  # as in another run
        sentences.check(sentence)
    assert [*json.loads(file.read_text())] == ["new"]


def test_what_is_named_has_to_be_there():
    with (
        pytest.raises(AssertionError, match="not in: --rounds 3"),
        sentences.raises(ValueError, "--rounds", 5),
    ):
        raise ValueError("--rounds 3")


@pytest.mark.filterwarnings("ignore:--")
def test_one_of_several_warnings_has_what_is_named(file, monkeypatch):
    def warn():
        for kind, text in (
            (RuntimeWarning, "--lr 3"),
            (RuntimeWarning, "use\n--rounds 3"),
            (UserWarning, "--rounds 5"),
        ):
            warnings.warn(text, kind, stacklevel=1)

    monkeypatch.setenv(sentences.UPDATE, "1")
    with pytest.warns(RuntimeWarning, match="--lr"), sentences.warns(RuntimeWarning, "--rounds", 3):
        warn()
    assert [*json.loads(file.read_text())] == ["use\n--rounds #"]
    with pytest.raises(pytest.fail.Exception), sentences.warns(RuntimeWarning, 5):
        warn()


def test_a_refused_command_has_exit_code_2_and_an_error(cli, file, monkeypatch):
    monkeypatch.setenv(sentences.UPDATE, "1")
    sentences.refused(cli("train", "--rounds", 0), "--rounds", 0)
    assert [*json.loads(file.read_text())] == ["--rounds: input should be greater than or equal to # (given: #)"]
    with pytest.raises(AssertionError, match="Commands"):
        sentences.refused(cli("--help"))


def test_numbers_quoted_names_and_folders_are_left_out():
    text = "client 3 of '/tmp/a' sends the client's 'w' to /tmp/pytest-of-me/run: 0.5 > -1e-3, fp16"
    assert sentences.plain(text) == "client # of '...' sends the client's '...' to ...: # > #, fp16"
