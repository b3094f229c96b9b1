"""Every parser, fed with what a stranger may send: it reads, or refuses with an error of its own."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import parsers

FEW = settings(max_examples=5, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
MANY = settings(FEW, max_examples=2000, derandomize=False)

targets = pytest.mark.parametrize("target", parsers.TARGETS, ids=lambda target: target.__name__)


def feed(target: parsers.Target, data: st.DataObject) -> None:
    """Fail if a target raises: each of them expects its parser's own errors."""
    with tempfile.TemporaryDirectory() as folder:
        target(data.draw, Path(folder))


@targets
@FEW
@given(data=st.data())
def test_a_few_inputs(target: parsers.Target, data: st.DataObject) -> None:
    feed(target, data)


@pytest.mark.slow
@targets
@MANY
@given(data=st.data())
def test_many_inputs(target: parsers.Target, data: st.DataObject) -> None:
    feed(target, data)
