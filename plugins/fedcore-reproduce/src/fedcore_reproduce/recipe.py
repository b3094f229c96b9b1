"""A recipe: one table or figure of a paper as runs, with the numbers that it prints. Imports no torch.

It is a YAML file in the package of the table's method. Columns and rows are as in the paper (or turned, where that is
shorter); where they cross there is a cell: its runs, and its figure.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from fedcore import ConfigError, RunConfig, UnknownNameError
from fedcore.tools import PROTOCOLS, Json, describe, registry, safe_yaml
from fedcore_study.tools import SweepSpec, axis_name

Kind = Literal["table", "figure"]
Scale = Literal["quick", "paper"]
SCALES: tuple[Scale, ...] = ("quick", "paper")

Options = dict[str, Json]
"""Options of runs by their names on a sweep's grid: an option of train, or PLUGIN.OPTION."""

_FIGURE = re.compile(r"(\d+(?:\.\d+)?)(?:\s*±\s*(\d+(?:\.\d+)?))?")
_NAMED = {"dataset": "dataset", "model": "model", "partition": "partitioner", "engine": "engine"}
_BY_PATH = ("module:", "npz:")


class Part(BaseModel):
    """A part of a recipe, or of a run's evidence."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


class Printed(Part):
    """A figure as the paper prints it, in percent: 66.3, "66.3 ± 0.5", "?" where unreadable, null for none."""

    text: str
    mean: float | None = Field(default=None, ge=0, le=100)
    std: float | None = Field(default=None, ge=0, le=100)


def _read_figure(value: Any) -> Any:
    if value is None:
        return {"text": "-"}
    if value == "?":
        return {"text": "unreadable"}
    parsed = None if isinstance(value, bool) else _FIGURE.fullmatch(str(value).strip())
    if parsed is None:
        raise ValueError('a figure is a number, "66.3 ± 0.5", "?" where the text is unreadable, or null for none')
    return {"text": parsed[0], "mean": float(parsed[1]), "std": None if parsed[2] is None else float(parsed[2])}


class Column(Part):
    """A column of the table, or a place on the x axis of a figure."""

    name: str = Field(min_length=1)
    x: float | None = Field(default=None, description="Where the column is on the x axis of a figure.")
    panel: str = Field(default="", description="The part of the figure that the column belongs to.")
    options: Options = Field(default_factory=dict, description="Options of the column's runs; PLUGIN.OPTION too.")
    not_run: str = Field(default="", description="Why its runs cannot be made, where they cannot.")


class Row(Part):
    """A row of the table, usually a method."""

    name: str = Field(min_length=1)
    plugins: Json = Field(description="As in a config file of train: moon, [moon, uscc], or {moon: {mu: 5}}.")
    options: Options = Field(default_factory=dict, description="Further options of the row's runs.")
    paper: list[Annotated[Printed, BeforeValidator(_read_figure)]] = Field(
        default_factory=list, description="A number for each column; none in a figure that prints none."
    )
    not_run: str | dict[str, str] = Field(default="", description="Why its runs cannot be made; or column -> why.")


class PublishedCurve(Part):
    """Accuracy over rounds that somebody else published for a column. It is drawn next to ours."""

    name: str = Field(min_length=1, description="What the curve is called in the picture.")
    column: str = Field(description="The column that it belongs to.")
    source: str = Field(min_length=1, description="Who published it, and with what settings.")
    round: list[int] = Field(min_length=1, description="Rounds.")
    accuracy: list[float] = Field(description="Accuracy after each of these rounds, in percent.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.round) != len(self.accuracy):
            raise ConfigError(f"curve {self.name!r} has {len(self.round)} rounds and {len(self.accuracy)} accuracies")
        return self


class Claim(Part):
    """What the paper reads from a figure: one row above others, or one column."""

    says: str = Field(min_length=1, description="The claim in a sentence.")
    better: str = Field(description="The row or column that is above the others.")
    worse: list[str] = Field(min_length=1, description="The others, of the same kind.")
    among: list[str] = Field(default_factory=list, description="Columns (or rows) of the claim; default all.")


class Quick(Part):
    """What ``--scale quick`` changes, so that the table ends in minutes on two cores."""

    says: str = Field(min_length=1, description="A sentence for readers: what is scaled down, and how far.")
    options: Options = Field(default_factory=dict, description="Options that override those of every run.")
    columns: dict[str, Options] = Field(default_factory=dict, description="Column -> options that override these.")
    leaves_out: dict[str, str] = Field(default_factory=dict, description="Column or row -> why quick leaves it out.")
    seeds: int = Field(default=1, ge=1, description="Number of seeds.")


@dataclass(frozen=True)
class Cell:
    """Where a row and a column cross.

    :param choice: options of its runs beyond the recipe's base; None where it has no runs, for ``reason``.
    """

    row: str
    column: str
    paper: Printed
    choice: Options | None
    reason: str = ""


class Recipe(Part):
    """One table or figure of a paper."""

    method: str = Field(description="The plugin whose paper this is.")
    table: int | None = Field(default=None, ge=1, description="The table's number.")
    figure: int | None = Field(default=None, ge=1, description="The figure's number, in place of a table's.")
    numeral: str = Field(default="", description="The number as the paper prints it, where it is Roman.")
    title: str = Field(min_length=1, description="What the table shows.")
    source: str = Field(min_length=1, description="Authors, title, where it appeared.")
    notes: list[str] = Field(default_factory=list, description="What the paper leaves open, and what is taken here.")
    protocols: dict[str, list[str]] = Field(
        default_factory=lambda: {"ours": ["global"]},
        min_length=1,
        description="Heading -> protocols. Of several, the first that a run has figures for is used.",
    )
    packages: dict[str, str] = Field(
        default_factory=dict, description="Plugin, data set or model -> its package, if fedcore does not know it."
    )
    base: Options = Field(default_factory=dict, description="Options of every run, as in a config file of train.")
    seeds: int = Field(default=3, ge=1, description="Number of seeds at the paper's scale.")
    columns: list[Column] = Field(min_length=1)
    rows: list[Row] = Field(min_length=1)
    curves: list[PublishedCurve] = Field(default_factory=list, description="Curves that others published.")
    axis: str = Field(default="", description="Title of the x axis of a figure; without one it shows rounds.")
    claims: list[Claim] = Field(default_factory=list, description="What the paper reads from a figure.")
    quick: Quick
    file: Path = Field(default=Path(), exclude=True)

    @property
    def kind(self) -> Kind:
        """Whether it is a table or a figure."""
        return "table" if self.figure is None else "figure"

    @property
    def prints_numbers(self) -> bool:
        """Whether the paper prints a number for some cell; most figures have none."""
        return any(printed.mean is not None for row in self.rows for printed in row.paper)

    @property
    def number(self) -> int:
        """The table's or figure's number."""
        return self.table or self.figure or 0

    @property
    def label(self) -> str:
        """The table's or figure's name, as the paper has it."""
        return f"{self.kind.capitalize()} {self.numeral or self.number}"

    @property
    def command(self) -> str:
        """The command that runs it at scale quick."""
        return f"fedcore reproduce {self.method} --{self.kind} {self.number}"

    def folder(self, scale: str) -> str:
        """Return the name of its folder, of evidence or of runs: ``fedproc-table-2-paper``."""
        return folder_name(self.method, self.kind, self.number, scale)

    @model_validator(mode="before")
    @classmethod
    def _no_numbers(cls, values: Any) -> Any:
        """A figure's row without numbers has none in each column."""
        if not isinstance(values, dict) or values.get("figure") is None:
            return values
        rows, columns = values.get("rows"), values.get("columns")
        if not isinstance(rows, list) or not isinstance(columns, list):
            return values
        none = {"paper": [None] * len(columns)}
        return {**values, "rows": [{**none, **row} if isinstance(row, dict) else row for row in rows]}

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if (self.table is None) == (self.figure is None):
            raise ConfigError("a recipe is of a table or of a figure; write table: N or figure: N")
        if self.figure is None and (self.axis or self.claims):
            raise ConfigError(f"{'axis' if self.axis else 'claims'} is of a figure; this recipe is of a table")
        places = [column.name for column in self.columns if (column.x is None) == bool(self.axis)]
        if places:
            needed = "write x, its place on the axis" if self.axis else "x needs the key axis, the axis's title"
            raise ConfigError(f"column {places[0]!r}: {needed}")
        rows, columns = ([part.name for part in parts] for parts in (self.rows, self.columns))
        for claim in self.claims:
            _all_known([claim.better], [*rows, *columns], "row or column in claims")
            own, crossing = (rows, columns) if claim.better in rows else (columns, rows)
            _all_known(claim.worse, own, f"{'row' if own is rows else 'column'} in claims")
            _all_known(claim.among, crossing, f"{'column' if own is rows else 'row'} in claims")
        return self

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        columns = [column.name for column in self.columns]
        everything = [*columns, *(row.name for row in self.rows)]
        for name in everything:
            if everything.count(name) > 1:
                raise ConfigError(f"{name!r} names {everything.count(name)} columns or rows; give each its own name")
        for row in self.rows:
            if len(row.paper) != len(columns):
                raise ConfigError(
                    f"row {row.name!r} has {len(row.paper)} figures for {len(columns)} columns; "
                    "write null where the paper has none"
                )
            if isinstance(row.not_run, dict):
                _all_known(row.not_run, columns, f"column in not_run of row {row.name!r}")
        _all_known([curve.column for curve in self.curves], columns, "column in curves")
        _all_known(self.quick.columns, columns, "column in quick")
        _all_known(self.quick.leaves_out, everything, "column or row in leaves_out of quick")
        for heading, protocols in self.protocols.items():
            if not protocols:
                raise ConfigError(f"protocols: {heading!r} names none")
            _all_known(protocols, PROTOCOLS, "protocol")
        return self

    @model_validator(mode="after")
    def _check_runs(self) -> Self:
        """Make every run's configuration once, so that a recipe that cannot work is refused when it is read."""
        for scale in SCALES:
            spec = self.spec(scale)
            for cell in self.cells(scale):
                try:
                    if cell.choice is not None:
                        spec.run(cell.choice, 0)
                except UnknownNameError:
                    raise
                except ConfigError as error:
                    raise ConfigError(f"{scale}, row {cell.row!r}, column {cell.column!r}: {error}") from None
        used = {plugin for row in self.rows for plugin in _plugins(row.plugins)}
        parts: list[Column | Row | Quick] = [*self.columns, *self.rows, self.quick]
        for name in itertools.chain(*(part.options for part in parts), *self.quick.columns.values()):
            plugin = axis_name(name).rpartition(".")[0]
            if plugin and plugin not in used:
                raise UnknownNameError("plugin in the option", name, [f"{p}.…" for p in used], "No row has it.")
        return self

    def spec(self, scale: Scale, changes: Mapping[str, Json] | None = None, seeds: int | None = None) -> SweepSpec:
        """Return the recipe's sweep at a scale, without its cases.

        :param changes: options of the machine it runs on, such as ``data_dir``.
        """
        number = seeds or (self.quick.seeds if scale == "quick" else self.seeds)
        return SweepSpec.create({"base": {**self.base, **(changes or {})}, "seeds": number})

    def cells(self, scale: Scale) -> Iterator[Cell]:
        """Yield the table's cells, column by column. A cell that cannot be run at this scale or here has a reason."""
        left_out = self.quick.leaves_out if scale == "quick" else {}
        for place, column in enumerate(self.columns):
            for row in self.rows:
                not_run = row.not_run if isinstance(row.not_run, str) else row.not_run.get(column.name, "")
                reason = column.not_run or not_run or left_out.get(column.name) or left_out.get(row.name) or ""
                choice = None
                if not reason:
                    choice = self._choice(column, row, scale)
                    reason = self._not_installed(choice)
                yield Cell(row.name, column.name, row.paper[place], None if reason else choice, reason)

    def _choice(self, column: Column, row: Row, scale: Scale) -> Options:
        layers = [column.options, {"plugins": row.plugins}, row.options]
        if scale == "quick":
            layers += [self.quick.options, self.quick.columns.get(column.name, {})]
        plugins = _plugins(row.plugins)
        named = {axis_name(name): value for layer in layers for name, value in layer.items()}
        # A column's option of a plugin is for the rows that have the plugin; a sweep of other rows would refuse it.
        return {name: v for name, v in named.items() if "." not in name or name.rpartition(".")[0] in plugins}

    def _not_installed(self, choice: Options) -> str:
        """Return which missing package a cell needs, or nothing. A name that no known package provides is an error."""
        values = {**self.base, **choice}
        needed = [("plugin", name) for name in _plugins(values["plugins"])]
        for option, kind in _NAMED.items():
            value = values.get(option)
            if isinstance(value, str) and value != "auto":  # RunConfig refuses other values
                needed.append((kind, value))
        for kind, name in needed:
            if name.startswith(_BY_PATH) or name.endswith(".json"):
                continue
            prefix, colon, _ = name.partition(":")
            by_prefix = colon and kind in registry.PREFIXED
            provided = (f"{kind} prefix", prefix) if by_prefix else (kind, name)
            if provided[1] in registry.available(provided[0]):
                continue
            package = self.packages.get(name) or registry.package_of(*provided)
            if package is None:
                raise UnknownNameError(kind, name, registry.available(kind))
            return f"{kind} {name} is in the package {package}, which is not installed here"
        return ""


def folder_name(method: str, kind: Kind, number: int, scale: str) -> str:
    """Return the name of the folder of a table or figure: ``fedproc-table-2-paper``."""
    return f"{method}-{kind}-{number}-{scale}"


def read_recipe(file: Path) -> Recipe:
    """Read a recipe, and check the configuration of each of its runs at both scales.

    :raises ConfigError: names the file and its fault: keys, options, names, missing figures.
    """
    values = safe_yaml.read_config_file(file)
    unknown = [name for name in values if name not in Recipe.model_fields or name == "file"]
    if unknown:
        known = [name for name in Recipe.model_fields if name != "file"]
        raise UnknownNameError("key of a recipe", unknown[0], known, f"(in {file})")
    try:
        return Recipe.model_validate({**values, "file": file})
    except ValidationError as error:
        raise ConfigError(describe(error, f"{file}: ", flags=False)) from None
    except ConfigError as error:
        raise ConfigError(f"{file}: {str(error).replace('unknown grid axis', 'unknown option')}") from None


def _plugins(options: Json) -> list[str]:
    return list(RunConfig.create({"plugins": options}).plugins)


def _all_known(names: Any, known: Any, kind: str) -> None:
    for name in names:
        if name not in known:
            raise UnknownNameError(kind, name, known)
