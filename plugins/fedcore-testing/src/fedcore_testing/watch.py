"""Watch a plugin's hooks in a run: the changes, random draws, host synchronisations and result of each call.

Sensors and inspectors report findings and do not raise, so that one run gives all of them, each with its
:class:`~fedcore_testing.findings.Rule`.
"""

from __future__ import annotations

import copy
import functools
import inspect
from contextlib import ExitStack
from typing import Any

from fedcore import Plugin
from fedcore.hooks import HOOKS, QUESTION
from fedcore_testing.findings import Call, Finding, Rule
from fedcore_testing.inspectors import INSPECTORS, repeated
from fedcore_testing.sensors import SENSORS


def watched(cls: type[Plugin], findings: list[Finding]) -> type[Plugin]:
    """Return a subclass that behaves the same and records the findings, each once."""
    idle: dict[str, float] = {}
    hooks = {hook: _around(hook, getattr(cls, hook), findings, idle) for hook in HOOKS if hasattr(cls, hook)}
    for name in dir(cls):
        if hasattr(getattr(cls, name), "fedcore_question"):
            hooks[name] = _around(QUESTION, getattr(cls, name), findings, idle)

    def init(plugin: Plugin, options: Any) -> None:
        cls.__init__(plugin, options)
        plugin.parts = tuple(map(copy.copy, plugin.parts))
        for part in plugin.parts:
            part.__class__ = watched(type(part), findings)

    namespace = {**hooks, "__init__": init, "__doc__": cls.__doc__, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), namespace)


def _around(hook: str, function: Any, findings: list[Finding], idle: dict[str, float]) -> Any:
    names = list(inspect.signature(function).parameters)[1:]

    @functools.wraps(function)
    def call(plugin: Plugin, *arguments: Any) -> Any:
        def report(rule: Rule, fault: str) -> None:
            finding = Finding(rule, hook, fault)
            if finding not in findings:
                findings.append(finding)

        observed = Call(hook, plugin, dict(zip(names, arguments, strict=True)), report, idle)
        with ExitStack() as stack:
            for sensor in SENSORS:
                stack.enter_context(sensor(observed))
            result = function(plugin, *arguments)
        for inspect_result in INSPECTORS:
            inspect_result(observed, result)
        if hook in ("broadcast", "broadcast_to"):
            if hook == "broadcast_to":  # another client's message in between must not change this one's
                function(
                    plugin, *(max(0, value - 1) if name == "client" else value for name, value in zip(names, arguments))
                )
            repeated(observed, result, function(plugin, *arguments))
        return result

    return call
