"""Where recipes are: in a folder ``recipes`` of the packages that plugins come from. Imports no torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

from fedcore import ConfigError, UnknownNameError
from fedcore.tools import registry
from fedcore_reproduce.recipe import Kind, Recipe, read_recipe

FOLDER = "recipes"


def recipe_files() -> list[Path]:
    """Return the recipe files of all packages that plugins are installed from; imports none of the packages."""
    folders = {folder: None for point in registry.available("plugin").values() for folder in _folders(point)}
    return [file for folder in folders for file in sorted(folder.glob("*.yaml"))]


def find_recipes(warn: Callable[[str], object], method: str | None = None) -> list[Recipe]:
    """Read all installed recipes, or the recipes of a method, in the order of methods, tables and figures.

    :param warn: takes a sentence on each file that cannot be read. Such a file hides no other recipe.
    :raises ConfigError: the method is unknown or has no recipes. The message names the methods that have some.
    """
    known: dict[tuple[str, bool, int], Recipe] = {}
    for file in recipe_files():
        try:
            recipe = read_recipe(file)
        except ConfigError as error:
            warn(str(error))
            continue
        other = known.setdefault((recipe.method, recipe.kind == "figure", recipe.number), recipe)
        if other is not recipe:
            warn(f"{file} is about {recipe.kind} {recipe.number} of {recipe.method}, as is {other.file}")
    recipes = [known[name] for name in sorted(known)]
    matches = [recipe for recipe in recipes if method in (None, recipe.method)]
    if matches or method is None:
        return matches
    methods = sorted({recipe.method for recipe in recipes})
    if method in registry.available("plugin"):
        raise ConfigError(f"there are no recipes for {method!r}; there are some for: {', '.join(methods) or 'none'}")
    package = registry.package_of("plugin", method)
    hint = f"{method!r} is in the package {package}: {registry.how_to_install(package)}" if package else ""
    raise UnknownNameError("method with recipes", method, methods, hint)


def find_recipe(warn: Callable[[str], object], method: str, number: str, kind: Kind = "table") -> Recipe:
    """Return the recipe of a method's table or figure, named by its number (``2``) or as printed (``II``).

    :raises ConfigError: there is no such recipe; the message lists those that exist.
    """
    recipes = [recipe for recipe in find_recipes(warn, method) if recipe.kind == kind]
    for recipe in recipes:
        if number.strip().upper() in (str(recipe.number), recipe.numeral.upper() or str(recipe.number)):
            return recipe
    raise UnknownNameError(f"{kind} of {method}", number, [str(recipe.number) for recipe in recipes])


def _folders(point: EntryPoint) -> Iterator[Path]:
    """Yield the folders of recipes next to a plugin's module and in the packages above it."""
    module = point.module
    while module:
        try:
            spec = importlib.util.find_spec(module)  # of a package of packages this imports the outer ones
        except (ImportError, ValueError):
            spec = None  # plugins list and plugins show report a broken package
        for place in (spec and spec.submodule_search_locations) or ():
            if (Path(place) / FOLDER).is_dir():
                yield Path(place) / FOLDER
        module = module.rpartition(".")[0]
