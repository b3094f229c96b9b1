"""What made a check fail, so that one error that stops many checks is printed once."""

from __future__ import annotations

import re

_END = r"(?=; (?:clients?|round) \d|; and \d+ more|\. Training diverged|\.?(?:\n|$))"
_CAUSES = (
    re.compile(rf"plugin '[^']+' hook (\w+)(?: \([^)]*\))? (.+?){_END}"),
    re.compile(rf"plugin '[^']+'(?: \([^)]*\))? (.+?\. Hint: .+?){_END}"),
    re.compile(rf"clients? [\d, .]+:? (\w+)[:,] (.+?){_END}"),
)


def cause_of(error: BaseException) -> str:
    """Return the hook and the error that ended a check's run, or how a client failed; empty where no run failed.

    An error that names no hook counts if it has a hint, as that of a plugin which changes its own object.
    Rounds, clients and other numbers are left out: the same error of another client is the same cause.
    """
    message = str(error.__cause__ or error)
    for pattern in _CAUSES:
        match = pattern.search(message)
        if match is not None:
            return re.sub(r"\d+", "#", " ".join(match.groups()))
    return ""
