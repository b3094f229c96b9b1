"""Where recipes are: in a folder ``recipes`` of the packages that plugins come from. Imports no torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path

from fedcore import ConfigError, UnknownNameError
from fedcore.base import registry
from fedcore_study.reproduce.recipe import Recipe, read_recipe

FOLDER = "recipes"


@dataclass
class Found:
    """Recipes by method and table; and what is wrong with files that could not be read, which hides no others."""

    recipes: list[Recipe] = field(default_factory=list)
    broken: list[ConfigError] = field(default_factory=list)

    def refuse(self) -> None:
        """Raise what is wrong, if anything is."""
        if self.broken:
            raise ConfigError("\n".join(map(str, self.broken)))


def recipe_files() -> list[Path]:
    """Return the recipe files of all packages that plugins are installed from; imports none of the packages."""
    folders = {folder: None for point in registry.available("plugin").values() for folder in _folders(point)}
    return [file for folder in folders for file in sorted(folder.glob("*.yaml"))]


def find_recipes(method: str | None = None) -> Found:
    """Read all installed recipes, or those of a method.

    :raises ConfigError: a method without recipes, or an unknown one; names those that have some. Or what is wrong with
        a file, where that may be why nothing was found.
    """
    found = _read_all()
    if method is None or any(recipe.method == method for recipe in found.recipes):
        return Found([recipe for recipe in found.recipes if method in (None, recipe.method)], found.broken)
    found.refuse()
    methods = sorted({recipe.method for recipe in found.recipes})
    if method in registry.available("plugin"):
        raise ConfigError(f"there are no recipes for {method!r}; there are some for: {', '.join(methods) or 'none'}")
    package = registry.package_of("plugin", method)
    hint = f"{method!r} is in the package {package}: {registry.how_to_install(package)}" if package else ""
    raise UnknownNameError("method with recipes", method, methods, hint)


def find_recipe(method: str, table: str) -> tuple[Recipe, list[ConfigError]]:
    """Return the recipe of a method's table, named by its number (``2``) or as printed (``II``), and what is broken.

    :raises ConfigError: there is none; says which there are.
    """
    found = find_recipes(method)
    for recipe in found.recipes:
        if table.strip().upper() in (str(recipe.table), recipe.numeral.upper() or str(recipe.table)):
            return recipe, found.broken
    found.refuse()
    raise UnknownNameError(f"table of {method}", table, [str(recipe.table) for recipe in found.recipes])


def _read_all() -> Found:
    found = Found()
    tables: dict[tuple[str, int], Recipe] = {}
    for file in recipe_files():
        try:
            recipe = read_recipe(file)
            other = tables.setdefault((recipe.method, recipe.table), recipe)
            if other is not recipe:
                raise ConfigError(f"{file} is about table {recipe.table} of {recipe.method}, as is {other.file}")
        except ConfigError as error:
            found.broken.append(error)
    found.recipes += [tables[name] for name in sorted(tables)]
    return found


def _folders(point: EntryPoint) -> Iterator[Path]:
    """Yield the folders of recipes beside a plugin's module and above it, up to the package's root."""
    module = point.module
    while module:
        try:
            spec = importlib.util.find_spec(module)  # of a package of packages this imports the outer ones
        except (ImportError, ValueError):
            spec = None  # plugins list and plugins show tell what is broken
        for place in (spec and spec.submodule_search_locations) or ():
            if (Path(place) / FOLDER).is_dir():
                yield Path(place) / FOLDER
        module = module.rpartition(".")[0]
