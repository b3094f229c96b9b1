"""The examples in the docstrings of every installed method give what they show."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from importlib.metadata import entry_points

from tests.support import in_one_test

PACKAGES = sorted({point.module.partition(".")[0] for point in entry_points(group="fedcore.plugins")} - {"fedcore"})


@in_one_test(name=PACKAGES)
def test_the_examples_in_docstrings(name):
    package = importlib.import_module(name)
    names = [name, *(f"{name}.{module.name}" for module in pkgutil.iter_modules(package.__path__))]
    for found in map(importlib.import_module, names):
        assert doctest.testmod(found).failed == 0, found.__name__


def test_they_are_looked_for():
    assert doctest.testmod(importlib.import_module("fedcore_fedopt.equations")).attempted == 5
