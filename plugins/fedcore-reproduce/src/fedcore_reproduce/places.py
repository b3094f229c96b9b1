"""Which cells of the papers' tables a run belongs to, by its configuration alone. Loads no data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fedcore import FedcoreError, RunConfig
from fedcore.tools import Json, key, registry, settings
from fedcore_reproduce.evidence import Place
from fedcore_reproduce.recipe import SCALES, Recipe
from fedcore_study.tools import resolved

EXECUTION = (
    "engine",
    "device",
    "memory_format",
    "autotune",
    "capture",
    "eval_every",
    "min_clients",
    "max_payload",
    "seed",
)
"""Options in which a run may differ from a recipe: how it was executed and how often it was evaluated."""


Cells = Mapping[Place, Mapping[str, Json]]
"""Cells of recipes with the settings of their runs, without the options of :data:`EXECUTION`."""


def cells(recipes: Iterable[Recipe]) -> Cells:
    """Return every cell that this installation can run, at both scales."""
    options = {}
    for recipe in recipes:
        for scale in SCALES:
            spec = recipe.spec(scale)
            for cell in recipe.cells(scale):
                if cell.choice is None:
                    continue
                place = Place(
                    method=recipe.method,
                    table=recipe.table,
                    figure=recipe.figure,
                    scale=scale,
                    row=cell.row,
                    column=cell.column,
                )
                try:
                    options[place] = _flat(resolved(spec.run(cell.choice, 0)))
                except FedcoreError:
                    continue  # fedcore reproduce names the defect of the recipe
    return options


def comparable(config: RunConfig) -> dict[str, Json]:
    """Return a run's settings as they are compared with a recipe's: one level deep, defaults included.

    Code that the run names is not imported: its plugins' options are those that the run has recorded.

    :raises ConfigError: or a subclass; a plugin is unknown or does not have an option.
    """
    code = any(map(registry.is_code, config.plugins))
    return _flat(config if code else resolved(config.model_copy(update={"trackers": {}})))


def _flat(config: RunConfig) -> dict[str, Json]:
    values = settings(config)
    plugins = values.pop("plugins")
    system = values.pop("system", None)  # an option of fedcore-simulation
    flat = {name: value for name, value in values.items() if name not in EXECUTION}
    flat["plugins"] = [name for name in plugins if name != "fedavg"]
    flat |= {f"{plugin}.{option}": value for plugin, options in plugins.items() for option, value in options.items()}
    return flat | {f"system.{option}": value for option, value in (system or {}).items()}


def differences(run: Mapping[str, Json], cell: Mapping[str, Json]) -> dict[str, tuple[Json, Json]]:
    """Return the options in which a run differs from a cell, with both values. ``auto`` in a recipe fits any value."""
    different = {}
    for name in [*cell, *(name for name in run if name not in cell)]:
        ours, wanted = run.get(name), cell.get(name)
        if wanted != "auto" and key(ours) != key(wanted):
            different[name] = (ours, wanted)
    return different


def places_of(config: RunConfig, among: Cells) -> list[Place]:
    """Return the cells that a run belongs to: it may differ from their settings in its execution alone."""
    own = comparable(config)
    return [place for place, wanted in among.items() if not differences(own, wanted)]


def nearest(config: RunConfig, among: Cells) -> tuple[Place, dict[str, tuple[Json, Json]]] | None:
    """Return the cell of the same plugins and data set that differs least from a run, and the differing options."""
    own = comparable(config)
    candidates = [
        (place, differences(own, wanted))
        for place, wanted in among.items()
        if all(own[name] == wanted[name] for name in ("plugins", "dataset"))
    ]
    return min(candidates, key=lambda each: len(each[1]), default=None)
