"""Who takes part in a federation, as its run directory records it: federation.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedcore import ConfigError, RunDirectoryError
from fedcore.base.files import parse_json, write_json
from fedcore_flower.agreement import RUN_ID
from fedcore_flower.keys import PublicKey

FILE = "federation.json"


class _Member(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    name: str
    fingerprint: str
    train: int = Field(ge=1)
    test: int = Field(ge=0)


class _Content(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    run: str = Field(pattern=RUN_ID.pattern, min_length=32, max_length=32)
    clients: list[_Member] = Field(min_length=1)


@dataclass(frozen=True)
class Roll:
    """The members of a federation, numbered in this order.

    :param run: the run's id.
    :param names: the clients' names; ``fingerprints`` of their keys.
    :param sizes: training and held-out samples of each, as the client said when the run began.
    """

    run: str
    names: list[str]
    fingerprints: list[str]
    sizes: list[tuple[int, int]]

    def write(self, directory: Path) -> None:
        """Write federation.json."""
        members: list[dict[str, Any]] = [
            {"name": name, "fingerprint": fingerprint, "train": train, "test": test}
            for name, fingerprint, (train, test) in zip(self.names, self.fingerprints, self.sizes, strict=True)
        ]
        write_json(directory / FILE, {"run": self.run, "clients": members})

    @classmethod
    def read(cls, directory: Path) -> Roll:
        """Read federation.json.

        :raises RunDirectoryError: it is missing or damaged.
        """
        path = directory / FILE
        try:
            content = _Content.model_validate(parse_json(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise RunDirectoryError(
                f"{directory} has no {FILE}: it is no run of a federation. fedcore resume goes on with other runs"
            ) from None
        except (OSError, ValueError, ValidationError) as error:
            raise RunDirectoryError(f"{path} is damaged: {error}") from error
        members = content.clients
        return cls(
            content.run,
            [member.name for member in members],
            [member.fingerprint for member in members],
            [(member.train, member.test) for member in members],
        )

    def keys(self, given: Mapping[str, PublicKey]) -> list[PublicKey]:
        """Return the members' keys out of those given.

        :raises ConfigError: one is missing.
        """
        by_fingerprint = {key.fingerprint: key for key in given.values()}
        for name, fingerprint in zip(self.names, self.fingerprints, strict=True):
            if fingerprint not in by_fingerprint:
                raise ConfigError(
                    f"the public key of client {name!r} ({fingerprint}) is missing; name it with --client"
                )
        return [by_fingerprint[fingerprint] for fingerprint in self.fingerprints]
