"""The sentences of errors. A test names the class, the option and the number; the sentence stands in sentences.json.

A better sentence costs one line there: ``pytest --update-sentences``, without ``-n``, writes it. The file has each
sentence once, with the tests in which an error says it. Numbers, quoted names, folders and lists of what is known are
left out.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from typer.testing import Result

FILE = Path(__file__).with_name("sentences.json")
UPDATE = "FEDCORE_UPDATE_SENTENCES"


@contextmanager
def raises(kind: type[BaseException], *named: object) -> Iterator[pytest.ExceptionInfo[Any]]:
    """As ``pytest.raises``. The error's text has what is ``named``, and is a sentence of this test."""
    with pytest.raises(kind) as caught:
        yield caught
    check(str(caught.value), *named)


@contextmanager
def warns(kind: type[Warning], *named: object) -> Iterator[pytest.WarningsRecorder]:
    """As ``pytest.warns``. The first warning of this kind with all that is ``named`` is a sentence of this test."""
    every = "(?s)" + "".join(f"(?=.*{re.escape(str(name))})" for name in named)
    with pytest.warns(kind, match=every) as caught:
        yield caught
    texts = [str(warning.message) for warning in caught if isinstance(warning.message, kind)]
    check(next(text for text in texts if re.match(every, text)), *named)


def refused(result: Result, *named: object) -> None:
    """Check that a command ended with exit code 2 and an error, without a traceback, that has what is ``named``."""
    assert (result.exit_code, "Traceback" in result.output) == (2, False), result.output
    _, error, text = result.stderr.partition("error: ")
    assert error, result.output
    check(" ".join(text.split()), *named)


def check(text: str, *named: object) -> None:
    """Check the text of an error, or of a command's output."""
    absent = [name for name in map(str, named) if name not in text]
    assert not absent, f"{absent} not in: {text}"
    test, sentence = os.environ["PYTEST_CURRENT_TEST"].partition(" ")[0].partition("[")[0], plain(text)
    if UPDATE in os.environ:
        _write(test, sentence)
    known = [other for other, tests in _read().items() if test in tests]
    assert sentence in known, f"another sentence, which pytest --update-sentences takes over: {sentence}\nnow: {known}"


def plain(text: str) -> str:
    """Return a sentence without numbers, quoted names, folders and what is installed.

    >>> plain("client 3 of '/tmp/a' sends 'w' to /check/of-me/run: 0.5 > 1e-3")
    "client # of '...' sends '...' to ...: # > #"
    >>> plain("hf:/tmp/a/0x1g: see https://example.org/a/b, ../../tmp/a")
    'hf:...: see https://example.org/a/b, ...'
    >>> plain("unknown metric 'f2'. Known: auroc, fedcore.ece. Did you mean 'f1'?")
    "unknown metric '...'. Known: .... Did you mean '...'?"
    >>> plain("unknown dataset 'x'. Known: digits. Or hf:NAME, npz:NAME")
    "unknown dataset '...'. Known: .... Or ..."
    """
    text = re.sub(r"\bOr [\w-]+:NAME(, [\w-]+:NAME)*", "Or ...", text)
    text = re.sub(r"\bKnown: .+?(?=\.(?:\s|$))", "Known: ...", text)
    text = re.sub(r"(?<!\w)'[^'\n]*'(?!\w)", "'...'", text)
    text = re.sub(r"(?<![\w./])(?:/|(?:\.\./)+)[\w.-]+/[\w./-]*\w", "...", text)
    text = re.sub(r"0x[0-9a-f]+", "#", text)
    return re.sub(r"(?<![\w-])-?\d+(?:[.,]\d+)*(?:e[+-]?\d+)?\b", "#", text)


def _read() -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return found


def _write(test: str, sentence: str) -> None:
    """Add a sentence of a test; the first one takes the place of those that the file has."""
    sentences = _read()
    if test not in _written:
        _written.add(test)
        sentences = {text: [other for other in tests if other != test] for text, tests in sentences.items()}
    sentences[sentence] = sorted({*sentences.get(sentence, []), test})
    told = {text: sentences[text] for text in sorted(sentences) if sentences[text]}
    FILE.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


_written: set[str] = set()
