"""What a sweep is: options of every run, axes of the grid, seeds. Imports no torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator, model_validator

from fedcore import ConfigError, RunConfig, UnknownNameError
from fedcore.tools import (
    WITHOUT_EFFECT,
    Json,
    describe,
    digest,
    full_name,
    method,
    preset_options,
    safe_yaml,
    short_name,
    unknown_option,
)
from fedcore_study.words import without_module

MOST_RUNS = 100_000

_ELSEWHERE = {"seed": "write --seeds (in a file: seeds)", "out": "the sweep's own --out holds all runs"}


class SweepSpec(BaseModel):
    """A grid of runs: every case with every combination of the axes' values and every seed."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False, defer_build=True)

    base: dict[str, Json] = Field(
        default_factory=dict, description="Options of every run, as in a config file of train."
    )
    grid: dict[str, list[Json]] = Field(
        default_factory=dict,
        description="Axis -> values. An axis is plugin, another option of train, or PLUGIN.OPTION.",
    )
    cases: list[dict[str, Json]] = Field(
        default_factory=list,
        description="Options that go together, one mapping per case: as on the grid, by name; they override base.",
    )
    seeds: list[int] = Field(default=[0], min_length=1, description="Seeds; a number N means 0 to N-1.")
    settings: dict[str, Json] = Field(
        default_factory=dict, alias="set", description="PLUGIN.OPTION -> value, in each run that has the plugin."
    )
    _earlier: frozenset[str] = PrivateAttr(default=frozenset())
    """Each PLUGIN.OPTION that a folder's sweep had before. Its plugin may be in earlier runs only."""

    @field_validator("seeds", mode="before")
    @classmethod
    def _count_is_a_range(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            if value < 1:
                raise ValueError(f"{value} seeds are no sweep; write at least 1, or a list such as [0, 7]")
            if value > MOST_RUNS:
                raise ValueError(f"{value} seeds are too many; at most {MOST_RUNS:,} runs make a sweep")
            return list(range(value))
        return value

    @field_validator("grid", mode="before")
    @classmethod
    def _one_value_is_a_list(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: list(v) if isinstance(v, (list, tuple)) else [v] for name, v in value.items()}

    @model_validator(mode="after")
    def _check(self) -> SweepSpec:
        grid = {axis_name(name): values for name, values in self.grid.items()}
        base = {name.replace("-", "_"): value for name, value in self.base.items()}
        for name in base:
            if name in _ELSEWHERE:
                raise ConfigError(f"base: {name}: {_ELSEWHERE[name]}")
            if name not in RunConfig.model_fields:
                raise unknown_option(name, RunConfig.model_fields, "(in base)")
            if name in grid:
                flag = "plugin" if name == "plugins" else name
                raise ConfigError(f"{flag} is an axis of the grid and an option of every run; give it once")
        for name, values in grid.items():
            if not values:
                raise ConfigError(f"grid axis {name!r} has no values")
        cases = []
        for number, case in enumerate(self.cases, start=1):
            try:
                options = {axis_name(name): value for name, value in case.items()}
            except UnknownNameError as error:
                raise UnknownNameError(f"option of case {number}", error.name, error.known) from None
            both = sorted(options.keys() & grid.keys())
            if both:
                raise ConfigError(f"case {number}: {both[0]} is an axis of the grid, too; give it once")
            cases.append(options)
        runs = len(self.seeds) * math.prod(map(len, grid.values())) * max(1, len(cases))
        if runs > MOST_RUNS:
            raise ConfigError(f"the grid has {runs:,} runs; at most {MOST_RUNS:,} make a sweep. Give it fewer values")
        for name in self.settings:
            safe_yaml.parse_setting(f"{name}=0")
        object.__setattr__(self, "cases", cases)
        object.__setattr__(self, "grid", grid)
        object.__setattr__(self, "base", base)
        return self

    @classmethod
    def create(cls, values: Mapping[str, Any], *, source: str = "") -> SweepSpec:
        """Validate a mapping.

        :raises ConfigError: what was wrong, with the key's name.
        """
        known = [field.alias or name for name, field in cls.model_fields.items()]
        prefix = f"{source}: " if source else ""
        for name in values:
            if name not in known:
                hint = f"(in {source})" if source else ""
                if str(name).replace("-", "_") in RunConfig.model_fields:
                    raise ConfigError(f"{prefix}{name!r} is an option of a run: write it under base, or under grid")
                raise UnknownNameError("key of a sweep", str(name), known, hint)
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise ConfigError(describe(error, prefix, flags=False)) from None
        except UnknownNameError:
            raise
        except ConfigError as error:
            raise ConfigError(f"{prefix}{error}") from None

    def as_yaml(self) -> str:
        """Return the sweep as a file that ``fedcore sweep`` reads."""
        return safe_yaml.write_yaml(self.model_dump(mode="json", by_alias=True))

    def cells(self) -> Iterator[tuple[str, RunConfig]]:
        """Yield each run of the grid with a readable name, seed by seed; combinations that are equal once.

        :raises ConfigError: a run that cannot be configured, or an option of a plugin that no run has.
        """
        used: set[str] = set()
        names: set[str] = set()
        for seed in self.seeds:
            for case, values in itertools.product(self.cases or [{}], itertools.product(*self.grid.values())):
                config = self.run({**case, **dict(zip(self.grid, values, strict=True))}, seed)
                used.update(config.plugins, config.trackers)
                if digest(config) not in names:
                    names.add(digest(config))
                    yield self._name(config), config
        for target in self._targets():
            plugin = target.rpartition(".")[0]
            if target not in self._earlier and full_name(plugin, used) not in used:
                raise ConfigError(f"{target}: no run of this sweep has the plugin {plugin!r}")

    def run(self, choice: Mapping[str, Json], seed: int) -> RunConfig:
        """Return one run: the base with a choice of options, by their names on the grid.

        :raises ConfigError: a run that cannot be configured.
        """
        values = {**self.base, **{name: value for name, value in choice.items() if "." not in name}}
        where = ", ".join(f"{name}={value}" for name, value in choice.items())
        source = f"run {where}" if where else ""
        named = {"plugins": _combination(values.pop("plugins", {})), "trackers": values.pop("trackers", {})}
        chosen = RunConfig.create(named, source=source)
        plugins = {name: dict(options) for name, options in chosen.plugins.items()}
        trackers = {name: dict(options) for name, options in chosen.trackers.items()}
        options = {name: value for name, value in choice.items() if "." in name}
        for target, value in {**self.settings, **options}.items():
            name, _, option = target.rpartition(".")
            name = full_name(name, [*plugins, *trackers])
            if name in plugins or name in trackers:
                (plugins if name in plugins else trackers)[name][option] = value
        return RunConfig.create({**values, "plugins": plugins, "trackers": trackers, "seed": seed}, source=source)

    def _name(self, config: RunConfig) -> str:
        options = {(plugin, o): v for plugin, of_plugin in config.plugins.items() for o, v in of_plugin.items()}
        parts = [method({short_name(name): None for name in config.plugins})]
        fixed = {(full_name(p, config.plugins), o) for p, _, o in (t.rpartition(".") for t in self.settings)}
        parts += [f"{short_name(plugin)}.{o}={v}" for (plugin, o), v in options.items() if (plugin, o) not in fixed]
        axes = [axis for axis in self._axes() if "." not in axis and axis != "plugins"]
        parts += [f"{axis}={without_module(str(getattr(config, axis)))}" for axis in axes]
        return " ".join([*parts, f"seed={config.seed}"])

    def _targets(self) -> list[str]:
        """Return each PLUGIN.OPTION of the settings, the grid and the cases."""
        return [*self.settings, *(name for name in self._named() if "." in name)]

    def _named(self) -> Iterator[str]:
        """Yield every option of the grid and of the cases."""
        yield from self.grid
        for case in self.cases:
            yield from case

    def _axes(self) -> list[str]:
        """Return the options in which runs can differ, in order: the grid's, and those that the cases vary."""
        varied = [
            name for name in self._named() if any(case.get(name) != self.cases[0].get(name) for case in self.cases)
        ]
        return list(dict.fromkeys([*self.grid, *varied]))


def axis_name(name: str) -> str:
    """Return a grid axis as RunConfig (or ``plugin.option``) has it.

    :raises ConfigError: no such option, or one that makes no sense as an axis.
    """
    if "." in name:
        return name
    field = f"{name}s" if name in ("plugin", "tracker") else name.replace("-", "_")
    if field in _ELSEWHERE:
        raise ConfigError(f"grid axis {name!r}: {_ELSEWHERE[field]}")
    if field in WITHOUT_EFFECT:
        raise ConfigError(f"grid axis {name!r}: it does not change a run's results")
    if field not in RunConfig.model_fields:
        raise unknown_option(name, ["plugin", *RunConfig.model_fields], "(or write PLUGIN.OPTION)", kind="grid axis")
    return field


def parse_axis(text: str) -> tuple[str, list[Json]]:
    """Split ``alpha=0.1,0.5``. The values are read as a list in YAML.

    :raises ConfigError: the text has another form.
    """
    name, equals, values = text.partition("=")
    if not (equals and name.strip() and values.strip()):
        raise ConfigError(f"--grid {text!r}: write AXIS=VALUE,VALUE, for example --grid alpha=0.1,0.5")
    try:
        return name.strip(), read_values(values)
    except ValueError as error:
        raise ConfigError(f"--grid {text!r}: a value is not readable as YAML ({error})") from None


def read_values(text: str) -> list[Json]:
    """Read ``0.1,0.5`` or ``moon,{fedprox: {mu: 1}}`` as a list in YAML.

    PyYAML takes no ``?`` in such a list, which names of data sets can have. The text is then split at its commas.

    :raises ValueError: a value is not YAML.
    """
    try:
        values: list[Json] = safe_yaml.read_yaml(f"[{text}]")
        return values
    except ValueError:
        return [safe_yaml.read_yaml(part) for part in text.split(",") if part.strip()]


def parse_seeds(text: str) -> list[int]:
    """Read ``3`` as 0, 1, 2 and ``0,7`` as these two.

    :raises ConfigError: neither of them.
    """
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"--seeds {text!r}: write how many, or the seeds themselves: --seeds 0,7") from None
    return SweepSpec.create({"seeds": numbers if "," in text or not numbers else numbers[0]}, source="--seeds").seeds


def read_spec(file: Path) -> SweepSpec:
    """Read a sweep's YAML file.

    :raises ConfigError: missing, unreadable, or a key that a sweep does not have.
    """
    return SweepSpec.create(safe_yaml.read_config_file(file), source=str(file))


def read_earlier(file: Path) -> SweepSpec:
    """Read the file of a folder whose sweep goes on, as :func:`read_spec` does."""
    spec = SweepSpec.create(safe_yaml.read_mapping(file, plain=True), source=str(file))
    spec._earlier = frozenset(spec._targets())
    return spec


def override(
    spec: SweepSpec,
    base: Mapping[str, Json],
    grid: Sequence[str],
    seeds: str | None,
    settings: Sequence[str],
    *,
    preset: str | None = None,
) -> SweepSpec:
    """Return a sweep with the options and axes of the command line, as :func:`changed` does.

    :raises ConfigError: one of them is given twice.
    """
    options = _once("--set", ((f"{p}.{o}", value) for p, o, value in map(safe_yaml.parse_setting, settings)))
    axes = _once("--grid", ((axis_name(name), values) for name, values in map(parse_axis, grid)))
    numbers = None if seeds is None else parse_seeds(seeds)
    return changed(spec, base, axes, numbers, options, preset=preset)


def _once(flag: str, pairs: Iterable[tuple[str, Json]]) -> dict[str, Json]:
    """Return the pairs of a name and what a flag gives it; a name that is given twice is refused."""
    values: dict[str, Json] = {}
    for name, value in pairs:
        if name in values:
            raise ConfigError(f"{flag} {name} is given twice; give it once, or several values: --grid {name}=A,B")
        values[name] = value
    return values


def changed(
    spec: SweepSpec,
    base: Mapping[str, Json],
    grid: Mapping[str, Sequence[Json] | Json],
    seeds: int | Sequence[int] | None,
    settings: Mapping[str, Json],
    *,
    preset: str | None = None,
) -> SweepSpec:
    """Return a sweep with other options; an axis that is named again is replaced.

    :param seeds: how many, or which; None leaves them as they are.
    :param preset: a known setting. The sweep's options and axes override it.
    """
    known = {} if preset is None else preset_options(preset)
    axes = {axis_name(name): values for name, values in spec.grid.items()}
    axes.update((axis_name(name), values) for name, values in grid.items())  # type: ignore[misc]
    kept = {name: value for name, value in {**known, **spec.base}.items() if name not in axes}
    new = SweepSpec.create(
        {
            "base": {**kept, **base},
            "grid": axes,
            "cases": [{name: value for name, value in case.items() if name not in axes} for case in spec.cases],
            "seeds": spec.seeds if seeds is None else seeds,
            "set": {**spec.settings, **settings},
        }
    )
    new._earlier = spec._earlier - {*grid, *settings}
    return new


def _combination(value: Json) -> Json:
    """Read ``moon+uscc`` as these two plugins; lists and mappings stay as they are."""
    if isinstance(value, str):
        return [name for name in value.split("+") if name]
    if isinstance(value, list):
        return [name for item in value for name in (_combination(item) if isinstance(item, str) else [item])]
    return value
