"""The forms in which a configuration names plugins and trackers with their options, and public samples.

Imports no torch.
"""

from __future__ import annotations

from typing import Any


def read_choices(value: Any, kind: str) -> Any:
    """Return ``[moon, {uscc: {epochs: 5}}]`` as ``{moon: {}, uscc: {epochs: 5}}``; what is of another form as it is.

    :param kind: of what is chosen, for messages.
    :raises ValueError: a name is no text, or is listed twice.
    """
    if isinstance(value, str):
        value = [value]
    if isinstance(value, (list, tuple)):
        pairs: list[tuple[str, Any]] = []
        for item in value:
            pairs += item.items() if isinstance(item, dict) else [(item, {})]
        names = [name for name, _ in pairs]
        if not all(isinstance(name, str) for name in names):
            raise ValueError("write names, such as [moon, uscc], or a mapping of names to options")
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{kind} {name!r} is listed {names.count(name)} times; list it once")
        value = dict(pairs)
    if isinstance(value, dict):
        value = {name: {} if options is None else options for name, options in value.items()}
    return value


def public_share(public: str | None) -> float | None:
    """Return the share of the training set that ``--public`` names; None where it names a data set, or nothing.

    >>> public_share("0.1"), public_share("digits")
    (0.1, None)
    """
    try:
        return float(public or "")
    except ValueError:
        return None
