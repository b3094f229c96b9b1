"""The versions of a client's state that the server could still go back to. Older versions are deleted.

The server holds two checkpoints while it writes a third, so a resumed run may go back by three times the rounds between
checkpoints. A task names the version of the state that it starts from. A client keeps the versions that the tasks of
these rounds named, and all versions that were written in these rounds.
"""

from __future__ import annotations

from pathlib import Path

from fedcore.tools import files


class History:
    """The versions that the tasks of a run named, in ``named.json`` next to the states of the run.

    :param states: the folder of the client's states of the run.
    :param reach: the number of rounds that the server may go back.
    """

    def __init__(self, states: Path, reach: int) -> None:
        self._states, self._reach = states, reach
        self._file = states.parent / "named.json"
        content = files.parse_json(self._file.read_text(encoding="utf-8")) if self._file.exists() else []
        self._named: list[tuple[int, int | None]] = [(round, version) for round, version in content]

    def note(self, round: int, version: int | None) -> None:
        """Record the version that a task of a round starts from.

        Records of later rounds are dropped: if there are any, the server went back.
        """
        past = [pair for pair in self._named if pair[0] < round]
        outdated = sum(earlier < round - self._reach for earlier, _ in past)
        # The last outdated record tells the version of the oldest round, which may have no task of its own.
        named = [*past[max(outdated - 1, 0) :], (round, version)]
        if named != self._named:
            self._named = named
            self._file.parent.mkdir(parents=True, exist_ok=True)
            files.write_json(self._file, named)

    def prune(self, round: int) -> None:
        """Delete the versions that the server can no longer name after a round."""
        kept = {version for _, version in self._named}
        for path in self._states.glob("*.safetensors"):
            version = int(path.stem)
            if version < round - self._reach and version not in kept:
                path.unlink()
