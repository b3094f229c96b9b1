"""Evidence of a run: a small JSON file with all that its figures rest on, and nothing of its models. Imports no torch.

It holds no absolute path and no host name, so that it can be published as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AwareDatetime, Field, ValidationError, model_validator

from fedcore import ConfigError
from fedcore.tools import Json, describe, digest, files, method, registry, rounds, settings
from fedcore_reproduce.recipe import Kind, Part, Scale, folder_name
from fedcore_study.tools import RunRecord, Warn, mapping_in, number

DIGITS = 6
"""Decimals that accuracies and losses are kept with."""

_LIBRARIES = ("torch", "torchvision", "numpy", "fedcore")
_NUMBERS = re.compile(r"\[\s+((?:(?:-?[\d.]+(?:e[-+]?\d+)?|null),?\s+)+)\]")
_ABSOLUTE = re.compile(r"(?:[a-z]+:)?(?:/|~|[A-Za-z]:[\\/])")


class Place(Part):
    """The cell of a paper's table or figure that a run belongs to."""

    method: str = Field(min_length=1, description="The plugin whose paper it is.")
    table: int | None = Field(default=None, ge=1, description="Null for a figure.")
    figure: int | None = Field(default=None, ge=1, description="Null for a table.")
    scale: Scale
    row: str = Field(min_length=1)
    column: str = Field(min_length=1)

    @property
    def folder(self) -> str:
        """The table's or figure's folder: ``fedproc-table-2-paper``."""
        kind: Kind = "table" if self.figure is None else "figure"
        return folder_name(self.method, kind, self.table or self.figure or 0, self.scale)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.table is None) == (self.figure is None):
            raise ValueError("a run's place is in a table or in a figure")
        return self


class Curve(Part):
    """One protocol's figures over rounds: lists of the same length; ``loss`` is null where it is unknown."""

    round: list[int] = Field(description="Number of rounds after which the model was evaluated, ascending from 1.")
    accuracy: list[Annotated[float, Field(ge=0, le=1)]]
    loss: list[float | None]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not len(self.round) == len(self.accuracy) == len(self.loss):
            raise ValueError(
                f"{len(self.round)} rounds, {len(self.accuracy)} accuracies and {len(self.loss)} losses; "
                "each round has one of each"
            )
        return self


class Machine(Part):
    """What trained the run."""

    cpu: str | None = None
    cores: int | None = None
    gpu: str | None = None
    system: str | None = None


class Session(Part):
    """A process that trained the run, or a part of it."""

    started: AwareDatetime
    commit: str | None = Field(
        default=None, description="git describe of fedcore's checkout; null where it was installed."
    )
    versions: dict[str, str] = Field(default_factory=dict)
    machine: Machine = Machine()


class Evidence(Part):
    """A run's resolved configuration, partition, curves and final figures, with what produced them.

    :param rounds: the number of recorded rounds, of ``planned`` rounds.
    :param figures: the final figures by protocol, after corrections that follow the last round; null while the run is
        in progress.
    """

    format: Literal["fedcore-evidence-1"] = "fedcore-evidence-1"
    place: Place | None = Field(default=None, description="Null for a run that belongs to no table.")
    method: str = Field(description="The plugins, joined by +.")
    seed: int = Field(ge=0)
    identity: str = Field(description="Hash of the configuration with the seed; equal for runs of equal results.")
    config: dict[str, Json] = Field(description="Every option that can change the results, resolved.")
    partition: str = Field(description="SHA-256 of which client holds which samples.")
    parameters: int | None = Field(
        default=None, ge=1, description="Trainable ones of the model; null where not recorded."
    )
    projection: int | None = Field(default=None, ge=1, description="Width of the projection head; null without one.")
    rounds: int = Field(ge=1)
    planned: int = Field(ge=1)
    stopped_early: bool = Field(default=False, description="It ended before the planned rounds: --patience, on_round.")
    curves: dict[str, Curve]
    figures: dict[str, dict[str, float]] | None = None
    silhouette: float | None = Field(default=None, description="Of runs that recorded it.")
    bytes: dict[str, int] = Field(description="Traffic of all clients, down and up.")
    seconds: float = Field(ge=0, description="Of all rounds with their evaluations. Other work on the machine counts.")
    sessions: list[Session] = Field(default_factory=list, description="Empty for runs of before they were recorded.")
    finished: AwareDatetime | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rounds > self.planned:
            raise ValueError(f"{self.rounds} rounds are recorded of {self.planned} planned ones")
        if self.figures is not None and self.rounds < self.planned and not self.stopped_early:
            raise ValueError(f"it has final figures after {self.rounds} of {self.planned} rounds")
        for name, row in (self.figures or {}).items():
            if not 0 <= row.get("accuracy", 0.0) <= 1:
                raise ValueError(f"the accuracy of {name} is not between 0 and 1")
        return self

    @property
    def is_finished(self) -> bool:
        """Whether the run came to its end."""
        return self.figures is not None

    @property
    def file_name(self) -> str:
        """The file's name within its folder; the same for the same cell and seed, whatever was run."""
        if self.place is None:
            return f"{slug(self.method)}-{slug(str(self.config['dataset']))}-seed-{self.seed}-{self.identity}.json"
        return f"{slug(self.place.column)}_{slug(self.place.row)}_seed-{self.seed}.json"

    @property
    def folder(self) -> str:
        """The folder within ``results/``: the table's, or ``runs``."""
        return self.place.folder if self.place else "runs"

    def accuracy(self, protocol: str) -> float | None:
        """Return the final accuracy of a finished run, else the last one of the curve; None without any."""
        if self.figures is not None:
            return self.figures.get(protocol, {}).get("accuracy")
        curve = self.curves.get(protocol)
        return curve.accuracy[-1] if curve and curve.accuracy else None

    def as_json(self) -> str:
        """Return the file's text: a line for each list of numbers."""
        text = json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False)
        return _NUMBERS.sub(lambda numbers: f"[{' '.join(numbers[1].split())}]", text) + "\n"


def evidence_of(run: RunRecord, place: Place | None, warn: Warn) -> Evidence:
    """Return a run's evidence. A run in progress has evidence of its rounds so far.

    :raises ConfigError: the records contradict each other.
    """
    summary = run.summary
    if not run.sessions:
        warn(f"{run.path}: its sessions.jsonl, with commit and machine, is missing")
    packages = [*_LIBRARIES, *_packages(run.config.plugins)]
    spent = run.rounds if summary is None else [summary]
    values = {
        "place": place,
        "method": method({name: None for name in run.config.plugins if name != "fedavg"}),
        "seed": run.config.seed,
        "identity": digest(run.config),
        "config": _without_paths(settings(run.config)),
        "partition": run.partition,
        "parameters": run.model.parameters if run.model else None,
        "projection": run.model.projection if run.model else None,
        "rounds": len(run.rounds),
        "planned": run.config.rounds,
        "stopped_early": "stopped_early" in (summary or {}),
        "curves": _curves(run),
        "figures": None if summary is None else _figures(summary["metrics"]),
        "bytes": {way: sum(record["bytes"][way] for record in spent) for way in ("down", "up")},
        "seconds": round(sum(rounds.seconds(line) for line in run.rounds if line.get("time")), 3),
        "sessions": [_session(record, packages) for record in run.sessions],
        "finished": (summary or {}).get("finished"),
    }
    try:
        return Evidence.model_validate(values)
    except ValidationError as error:
        raise ConfigError(describe(error, flags=False)) from None


def read_evidence(file: Path) -> Evidence:
    """Read a file back.

    :raises ConfigError: the file's name, and its fault.
    """
    try:
        evidence = Evidence.model_validate(files.parse_json(file.read_text(encoding="utf-8")))
    except ValidationError as error:
        raise ConfigError(describe(error, f"{file}: ", flags=False)) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as a run's evidence: {error}") from None
    expected = f"{evidence.folder}/{evidence.file_name}"
    if f"{file.parent.name}/{file.name}" != expected:
        raise ConfigError(f"{file} is evidence of another run than its name says: {expected}")
    return evidence


def read_all(root: Path) -> list[Evidence]:
    """Read every file of a folder that :func:`write_evidence` wrote, by folder and name.

    :raises ConfigError: a file is damaged or has the name of another run's file, or there is no such folder.
    """
    if not root.is_dir():
        raise ConfigError(f"{root} is no folder; fedcore results add RUN_OR_SWEEP --to {root} makes it")
    return [read_evidence(file) for file in sorted(root.glob("*/*.json"))]


def write_evidence(evidence: Evidence, root: Path) -> Path:
    """Write the file of a run into its table's folder and return its path. An earlier file is replaced."""
    file = root / evidence.folder / evidence.file_name
    file.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(file, evidence.as_json())
    return file


def slug(text: str) -> str:
    """Return a text as a part of a file's name."""
    return re.sub(r"[^a-z0-9.+]+", "-", text.lower()).strip("-.") or "none"


def _curves(run: RunRecord) -> dict[str, Any]:
    """Return the values of a :class:`Curve` by protocol."""
    curves = {}
    for protocol in run.protocols:
        evaluated = [(line["round"] + 1, mapping_in(line["metrics"] or {}, protocol)) for line in run.rounds]
        if rows := [(number, row) for number, row in evaluated if "accuracy" in row]:
            curves[protocol] = {
                "round": [number for number, _ in rows],
                "accuracy": [round(row["accuracy"], DIGITS) for _, row in rows],
                "loss": [_rounded(row.get("loss")) for _, row in rows],
            }
    return curves


def _figures(metrics: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    return {
        protocol: {name: rounded for name, value in row.items() if (rounded := _rounded(value)) is not None}
        for protocol, row in metrics.items()
        if isinstance(row, dict) and {"accuracy", "loss"} & row.keys()
    }


def _rounded(value: Any) -> float | None:
    finite = number(value)
    return None if finite is None else round(finite, DIGITS)


def _session(record: Mapping[str, Any], packages: Collection[str]) -> dict[str, Any]:
    """Return the fields of a line of sessions.jsonl that are kept, with the versions of these packages only."""
    versions = mapping_in(record, "versions")
    kept = {name: record[name] for name in Session.model_fields if name in record}
    return kept | {"versions": {name: version for name, version in versions.items() if name in packages}}


def _packages(plugins: Mapping[str, Any]) -> list[str]:
    points = registry.available("plugin")
    return [points[name].dist.name for name in plugins if name in points and points[name].dist]  # type: ignore[union-attr]


def _without_paths(value: Any) -> Any:
    """Cut the paths of this machine in plain values to their last part: ``npz:/data/x.npz`` becomes ``npz:x.npz``."""
    if isinstance(value, dict):
        return {name: _without_paths(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    place, mark, query = value.partition("?")  # as in hf:FOLDER?tokenizer=FOLDER
    options = ("=".join(map(_last_part, option.split("="))) for option in query.split("&"))
    return f"{_last_part(place)}{mark}{'&'.join(options)}"


def _last_part(text: str) -> str:
    absolute = _ABSOLUTE.match(text)
    if absolute is None:
        return text
    prefix = re.match(r"[a-z]{2,}:", text)
    return (prefix[0] if prefix else "") + Path(text[absolute.end() :]).name
