"""What pydantic found wrong with options, in words."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

_MOST_PROBLEMS, _LONGEST = 20, 200


def describe(error: ValidationError, prefix: str = "", *, flags: bool = True) -> str:
    """Render a pydantic error as one line per problem: option, problem, the value given."""
    lines = []
    for problem in error.errors(include_url=False)[:_MOST_PROBLEMS]:
        path = [str(part) for part in problem["loc"]]
        name = "--" + path[0].replace("_", "-") if flags and path else ".".join(path)
        if flags and path[:1] == ["system"]:
            name = " ".join([name, *path[1:]])
        message = problem["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        if problem["type"] in ("tuple_type", "list_type", "set_type", "frozen_set_type"):
            written = f", written [{problem['input']}]" if isinstance(problem["input"], (str, int, float)) else ""
            message = f"input should be a list{written}"
        says_what = problem["type"] == "value_error" and message  # with the value, where that helps
        message = lower_first(message) or "a validator refuses it and gives no reason"
        given = "" if says_what or isinstance(problem["input"], dict) else f" (given: {_short(problem['input'])})"
        lines.append(f"{prefix}{name + ': ' if name else ''}{message}{given}{_as_fraction(problem)}")
    return "\n".join(lines)


def lower_first(text: str) -> str:
    """Return a sentence as it stands after a colon."""
    return text[:1].lower() + text[1:]


def _as_fraction(problem: ErrorDetails) -> str:
    """Return how a percentage is written where a number of at most 1 is asked for, as ``; 50 % is 0.5``."""
    value, context = problem["input"], problem.get("ctx", {})
    if context.get("le", context.get("lt")) != 1 or not isinstance(value, (int, float)) or not 5 <= value <= 100:
        return ""
    return f"; {value:g} % is {value / 100:g}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
