"""The members of a federation. The run directory lists them in federation.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedcore import ConfigError, RunDirectoryError
from fedcore.tools import files
from fedcore_flower.agreement import RunId
from fedcore_flower.keys import PublicKey

FILE = "federation.json"


class Member(BaseModel):
    """One client of a federation."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str
    fingerprint: str
    """The fingerprint of the client's public key."""
    train: int = Field(ge=1)
    """The number of samples that the client trains on, as it reported when the run began."""
    test: int = Field(ge=0)
    """The number of samples that the client holds out, as it reported when the run began."""


class Members(BaseModel):
    """The clients of a federation. A client's number in the run is its position."""

    model_config = ConfigDict(strict=True, extra="forbid")

    run: RunId
    clients: list[Member] = Field(min_length=1)
    class_names: list[str] | None = None
    """The names by which the clients number their classes, if the server's data set has no names."""

    @property
    def names(self) -> list[str]:
        """The clients' names."""
        return [member.name for member in self.clients]

    def write(self, directory: Path) -> None:
        """Write federation.json."""
        files.write_json(directory / FILE, self.model_dump())

    @classmethod
    def read(cls, directory: Path) -> Members:
        """Read federation.json.

        :raises RunDirectoryError: it is missing or damaged.
        """
        path = directory / FILE
        try:
            return cls.model_validate(files.parse_json(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise RunDirectoryError(
                f"{directory} has no {FILE}: it is not the run of a federation. fedcore resume resumes other runs"
            ) from None
        except (OSError, ValueError, ValidationError) as error:
            raise RunDirectoryError(f"{path} is damaged: {error}") from error

    def select_keys(self, keys: Mapping[str, PublicKey]) -> list[PublicKey]:
        """Return the key of each member, out of the given ones.

        :raises ConfigError: a member's key is missing.
        """
        by_fingerprint = {key.fingerprint: key for key in keys.values()}
        for member in self.clients:
            if member.fingerprint not in by_fingerprint:
                raise ConfigError(
                    f"the public key of client {member.name!r} ({member.fingerprint}) is missing; give it with --client"
                )
        return [by_fingerprint[member.fingerprint] for member in self.clients]
