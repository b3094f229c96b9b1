"""A pydantic field as text: type, bounds, default."""

from __future__ import annotations

import types
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo


def base_type(annotation: Any) -> Any:
    """Return an annotation without its ``| None``."""
    if get_origin(annotation) in (Union, types.UnionType):
        rest = [part for part in get_args(annotation) if part is not type(None)]
        if len(rest) == 1:
            return rest[0]
    return annotation


def choices(annotation: Any) -> list[str]:
    """Return the values of a Literal, else an empty list."""
    inner = base_type(annotation)
    return [str(value) for value in get_args(inner)] if get_origin(inner) is Literal else []


def type_name(annotation: Any) -> str:
    """Return a short name: ``float``, ``int or none``, ``mean|sum``."""
    if choices(annotation):
        name = "|".join(choices(annotation))
    else:
        inner = base_type(annotation)
        plain = isinstance(inner, type) and get_origin(inner) is None
        name = inner.__name__ if plain else str(inner).replace("typing.", "")
    return name if base_type(annotation) is annotation else f"{name} or none"


def bounds(field: FieldInfo) -> str:
    """Return a field's bounds, as in ``0 < x <= 1`` or ``>= 1``; empty without bounds."""
    low = high = ""
    for item in field.metadata:
        for name, sign in (("gt", "<"), ("ge", "<=")):
            if getattr(item, name, None) is not None:
                low = f"{_number(getattr(item, name))} {sign}"
        for name, sign in (("lt", "<"), ("le", "<=")):
            if getattr(item, name, None) is not None:
                high = f"{sign} {_number(getattr(item, name))}"
    if low and high:
        return f"{low} x {high}"
    if low:
        number, sign = low.split()
        return f"{sign.replace('<', '>')} {number}"
    return high


def _number(value: Any) -> str:
    """Write a limit of machine integers as a power of two."""
    if isinstance(value, int) and value >= 2**31 and value & (value - 1) == 0:
        return f"2^{value.bit_length() - 1}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def default(field: FieldInfo) -> Any:
    """Return a field's default; the text ``required`` without one."""
    return "required" if field.is_required() else field.get_default(call_default_factory=True)
