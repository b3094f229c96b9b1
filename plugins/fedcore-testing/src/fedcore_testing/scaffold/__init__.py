"""New plugin packages from templates: complete, installable, tested and ready to train."""

from __future__ import annotations

import ast
import keyword
import re
from pathlib import Path
from string import Template

from fedcore import ConfigError, UnknownNameError, __version__
from fedcore.tools import registry

KINDS = ("method", "dataset", "model", "partitioner", "tracker", "engine")
_REGISTRY_KIND = {"method": "plugin"}
_FLAGS = {"method": "plugin", "partitioner": "partition"}
_ALSO_NEEDED = {"method": ("fedcore-functional",), "tracker": ("fedcore-trackers",), "engine": ("fedcore-workers",)}
_TEMPLATES = Path(__file__).parent / "templates"
CORE = "fedcore-fl"
"""The distribution of fedcore."""

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_LONGEST = 50


def new_package(name: str, kind: str, parent: Path) -> Path:
    """Write the package ``fedcore-<name>`` into a folder and return its path.

    :raises UnknownNameError: no such kind.
    :raises ConfigError: an invalid or used name, a folder that exists or cannot be written.
    """
    if kind not in KINDS:
        raise UnknownNameError("kind", kind, KINDS)
    _check_name(name, kind)
    target = parent / f"fedcore-{name}"
    if target.exists():
        raise ConfigError(f"{target} exists already; choose another name, or move it away")
    values = _values(name, kind)
    files = {path: text for folder in ("common", kind) for path, text in _render(_TEMPLATES / folder, values)}
    try:
        for path, text in files.items():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}") from None
    return target


def train_command(name: str, kind: str) -> str:
    """Return the command that trains with a new package."""
    return f"fedcore train --{_FLAGS.get(kind, kind)} {name} --rounds 3"


def _values(name: str, kind: str) -> dict[str, str]:
    major, minor = __version__.split(".")[:2]
    ceiling = f"0.{int(minor) + 1}" if major == "0" else str(int(major) + 1)
    version = f">={major}.{minor},<{ceiling}"
    packages = (CORE, *_ALSO_NEEDED.get(kind, ()))
    cls = "".join(part.capitalize() for part in name.split("-"))
    return {
        "name": name,
        "distribution": f"fedcore-{name}",
        "module": f"fedcore_{name.replace('-', '_')}",
        "function": name.replace("-", "_"),
        "cls": cls,
        "group": registry.group_of(_REGISTRY_KIND.get(kind, kind)),
        "attribute": cls if kind in ("method", "tracker", "engine") else name.replace("-", "_"),
        "requires": '", "'.join(f"{package}{version}" for package in packages),
        "tests_require": f"fedcore-testing{version}",
        "train": train_command(name, kind),
    }


def _render(folder: Path, values: dict[str, str]) -> list[tuple[Path, str]]:
    files = []
    for path in sorted(folder.rglob("*.tmpl")):
        relative = Template(str(path.relative_to(folder)).removesuffix(".tmpl")).substitute(values)
        files.append((Path(relative), Template(path.read_text(encoding="utf-8")).substitute(values)))
    return files


def _check_name(name: str, kind: str) -> None:
    if not _NAME.fullmatch(name) or len(name) > _LONGEST:
        fixed = re.sub(r"[^a-z0-9]+", "-", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower())
        fixed = fixed.lstrip("-0123456789").rstrip("-")
        hint = f" Write {fixed[:_LONGEST]!r}." if _NAME.fullmatch(fixed[:_LONGEST]) else ""
        raise ConfigError(
            f"{name!r} cannot be a plugin's name: lower-case letters and digits, parts joined by single hyphens, "
            f"a letter first, at most {_LONGEST} characters.{hint}"
        )
    if name.startswith("fedcore-"):
        raise ConfigError(f"{name!r}: the package's name begins with fedcore- by itself; write {name[8:]!r}")
    registered = _REGISTRY_KIND.get(kind, kind)
    if name in registry.available(registered) or registry.package_of(registered, name):
        raise ConfigError(f"{kind} {name!r} exists already; choose another name, or two packages would provide it")
    others = {package for names in registry.packages().values() for package in names.values()}
    if f"fedcore-{name}" in {CORE, *others}:
        raise ConfigError(f"package 'fedcore-{name}' exists already; choose another name")
    values = _values(name, kind)
    attribute = values["attribute"]
    source = next(text for path, text in _render(_TEMPLATES / kind, values) if path.name == "__init__.py")
    if keyword.iskeyword(attribute) or _bound(source).count(attribute) > 1:
        raise ConfigError(f"{name!r} cannot be a {kind}'s name: {attribute!r} means something else in its code")


def _bound(source: str) -> list[str]:
    """Return the names that a module imports or defines, once for each time."""
    statements = ast.parse(source).body
    imports = (alias for each in statements if isinstance(each, (ast.Import, ast.ImportFrom)) for alias in each.names)
    defined = [each.name for each in statements if isinstance(each, (ast.ClassDef, ast.FunctionDef))]
    return [*(alias.asname or alias.name for alias in imports), *defined]
