"""A pytest fixture that runs small federations, and a short way to call the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from fedcore import RunResult
from fedcore_testing.federation import Choice, federate

Run = Callable[..., RunResult]


def runner(folder: Path, **defaults: Any) -> Run:
    """Return ``go(*plugins, **options)``, which runs a small federation in a new directory below ``folder``.

    A plugin is one of :func:`federate`'s, or a mapping from plugins to their options.

    :param defaults: options of :func:`federate`; the options of a call override them.
    """

    def go(*plugins: Choice | Mapping[Any, Mapping[str, Any]], **options: Any) -> RunResult:
        choices: list[Choice] = []
        for plugin in plugins:
            choices += plugin.items() if isinstance(plugin, Mapping) else [plugin]
        return federate(folder, *choices, **{**defaults, **options})

    return go


def federations(scope: Literal["function", "module", "session"] = "module", **defaults: Any) -> Any:
    """Return a pytest fixture: :func:`runner` on a temporary folder.

    >>> go = federations(clients=4)  # doctest: +SKIP
    >>> def test_it_learns(go):  # doctest: +SKIP
    ...     assert go({"moon": {"mu": 1.0}}, rounds=3).metrics["global"]["accuracy"] > 0.5
    """
    import pytest

    @pytest.fixture(scope=scope)
    def go(tmp_path_factory: pytest.TempPathFactory) -> Run:
        return runner(tmp_path_factory.mktemp("runs"), **defaults)

    return go
