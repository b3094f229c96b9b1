"""The hook reference, made from the specification: fedcore/hooks/hookspecs.py."""

from __future__ import annotations

import inspect
import re

from docstrings import escape, inline, split, to_markdown
from fedcore.hooks import hookspecs
from fedcore.hooks.checks import EXCLUSIVE, HOOKS
from links import method_page
from sources import implementers

SECTION = re.compile(r"^# -+\n# (?P<title>.+)\n# -+$|^def (?P<hook>\w+)\(", re.MULTILINE)
SEEN = {
    "Step": "fedcore.hooks.contexts.Step",
    "ClientContext": "fedcore.hooks.contexts.ClientContext",
    "ServerContext": "fedcore.hooks.contexts.ServerContext",
    "ClientUpdate": "fedcore.base.types.ClientUpdate",
    "Loss": "fedcore.base.types.Loss",
    "SplitModel": "fedcore.models.split.SplitModel",
    "ModelTask": "fedcore.models.split.ModelTask",
    "RunConfig": "options",
}
"""Types of the hooks' arguments and results -> where :doc:`reference/objects.md` describes them."""


def page() -> str:
    """Return the page: the hooks that serve most methods, then the order of calls and the others."""
    first, rows, second, tree, after = blocks(hookspecs.__doc__ or "")
    often = [tuple(re.split(r"  +", row)) for row in rows.splitlines()]
    table = ["| what do you want to do | hook |", "| --- | --- |"]
    table += [f"| {escape(what)} | [`{hook}`](#{hook}) |" for what, hook in often]
    parts = [
        "# Hooks",
        "This page is made from `fedcore/hooks/hookspecs.py` whenever the site is built; it cannot say anything else "
        "than the code. A plugin's method takes any of a hook's arguments, by name. "
        "[What hooks see](objects.md) describes the objects.",
        inline(first.partition("\n\n")[2].strip()) + ":",
        "\n".join(table),
        *(entry(hook) for _, hook in often),
        "## The order of calls",
        inline(second.strip()) + ":",
        f"```text\n{tree}\n```",
        inline(after.strip()),
    ]
    shown = {hook for _, hook in often}
    for found in SECTION.finditer(inspect.getsource(hookspecs)):
        if found["title"]:
            parts.append(f"## Rarely needed: {found['title'][0].lower()}{found['title'][1:]}")
        elif found["hook"] in HOOKS and found["hook"] not in shown:
            parts.append(entry(found["hook"]))
    return "\n\n".join(parts) + "\n"


def blocks(docstring: str) -> tuple[str, str, str, str, str]:
    """Return a docstring's text before, between and after its two blocks, with the blocks."""
    first, _, rest = docstring.partition("::\n")
    rows, _, rest = rest.lstrip("\n").partition("\n\n")
    second, _, rest = rest.partition("::\n")
    tree, _, after = inspect.cleandoc(rest).partition("\n\n")
    return first, inspect.cleandoc(rows), second, tree, after


def signature(hook: str) -> str:
    """Return a hook's signature as its specification has it."""
    return f"{hook}{inspect.signature(HOOKS[hook])}".replace("'", "")


def entry(hook: str) -> str:
    """Return one hook's part of the page."""
    types = [name for name in SEEN if re.search(rf"\b{name}\b", signature(hook))]
    targets = {name: "options.md" if SEEN[name] == "options" else f"objects.md#{SEEN[name]}" for name in types}
    parts = [
        f"### `{hook}` {{#{hook}}}",
        f"```python\n{signature(hook)}\n```",
        to_markdown(inspect.getdoc(HOOKS[hook]) or ""),
    ]
    if hook in EXCLUSIVE:
        parts.append("Two plugins of a run that implement it are refused at start-up.")
    if types:
        parts.append("Types: " + ", ".join(f"[`{name}`]({target})" for name, target in targets.items()) + ".")
    users = [f"[`{name}`](../{method_page(package)})" for name, package in implementers().get(hook, [])]
    if users:
        parts.append(f"Implemented by {', '.join(users)}.")
    return "\n\n".join(parts)


def described(hook: str) -> set[str]:
    """Return the kinds of fields that a hook's description has; for tests."""
    return {field.kind for field in split(inspect.getdoc(HOOKS[hook]) or "")[1]}
