"""Which versions of its state a client keeps: all that the server could still go back to.

The server holds two checkpoints while it writes a third, so it may go back by three times the rounds between them.
Which version counted at a time is what the next task after it starts from. Those are kept, with everything that is as
young; the rest is deleted.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fedcore.base.files import parse_json, write_json
from fedcore.client.store import ClientStore

Named = list[tuple[int, int | None]]


class History:
    """What a client's tasks of one run named, in ``named.json`` beside the states.

    :param reach: rounds that the server may go back by.
    """

    def __init__(self, store: ClientStore, client: int, reach: int) -> None:
        self._store, self._client, self._reach = store, client, reach
        self._file = store.root / "named.json"
        self._named = _read(self._file)

    def note(self, round: int, version: int | None) -> None:
        """Take down from which version a task of a round starts; what was to come after it never was."""
        before = [(r, v) for r, v in self._named if r < round]
        found = _within([*before, (round, version)], round - self._reach)
        if found != self._named:
            self._named = found
            self._store.root.mkdir(parents=True, exist_ok=True)
            write_json(self._file, [list(pair) for pair in found])

    def prune(self, round: int) -> None:
        """Delete the versions that can no longer be asked for, in a round whose own version is written."""
        oldest = round - self._reach
        kept = {version for _, version in self._named}
        for path in _versions(self._store, self._client):
            if int(path.stem) < oldest and int(path.stem) not in kept:
                path.unlink(missing_ok=True)


def _within(named: Named, oldest: int) -> Named:
    """Return what was named from a round on, and the last before it."""
    earlier = [pair for pair in named if pair[0] < oldest]
    return [*earlier[-1:], *(pair for pair in named if pair[0] >= oldest)]


def _versions(store: ClientStore, client: int) -> Iterable[Path]:
    folder = store.path(client, 0).parent
    found = list(folder.iterdir()) if folder.is_dir() else []
    return [path for path in found if path.suffix == ".safetensors" and path.stem.isdecimal()]


def _read(file: Path) -> Named:
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
        return [(int(round), None if version is None else int(version)) for round, version in content]
    except (OSError, ValueError, TypeError):
        return []  # nothing is deleted for want of it
