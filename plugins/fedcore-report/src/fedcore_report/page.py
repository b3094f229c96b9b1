"""The page: one HTML file that needs no network. Texts from files are escaped, and only our script can run in it."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined

from fedcore import ConfigError, __version__
from fedcore.tools import files
from fedcore_report import axes, svg
from fedcore_report.build import Report
from fedcore_report.charts import plain

CONFIGURATIONS = 100
"""The largest number of runs whose configuration is in the page, of some 3 KB each."""


def check_target(out: Path, figures: Path | None = None, *, force: bool = False) -> None:
    """Refuse to overwrite files.

    :param figures: the folder of the figures' files.
    :param force: allow to overwrite files.
    :raises ConfigError: ``out`` is a folder; or ``out`` exists, or the folder of figures is not empty, without force.
    """
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder; name a file such as {out / 'report.html'}")
    if out.exists() and not force:
        raise ConfigError(f"--out {out} exists already; choose another name, or replace it with --force")
    if figures is not None and not force and figures.is_dir() and any(figures.iterdir()):
        raise ConfigError(f"--figures {figures} is not empty; choose another folder, or write into it with --force")


def write_page(report: Report, out: Path) -> None:
    """Write the report as one HTML file.

    :raises StorageError: it cannot be written.
    """
    with files.storing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(out, page(report))


def page(report: Report) -> str:
    """Return the report as HTML."""
    sources = resources.files("fedcore_report") / "templates"
    style, script = ((sources / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    light, dark = (
        "".join(f"--{name}: {value}; " for name, value in palette.items()) for palette in (axes.LIGHT, axes.DARK)
    )
    colors = f":root {{ {light}}}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}\n"
    environment = Environment(
        loader=PackageLoader("fedcore_report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"plain": plain, "drawn": svg.draw, "link": _link}
    return environment.get_template("page.html").render(
        version=__version__,
        policy=_policy(script),
        report=report,
        most=CONFIGURATIONS,
        style=f"{colors}{axes.style()}\n{style}",
        script=script,
    )


def _link(text: str) -> str:
    """Return an address that contains a text, which a browser saves without a network."""
    return f"data:text/plain;charset=utf-8,{quote(text)}"


def _policy(script: str) -> str:
    """Return a content security policy that allows only this script, and nothing to be loaded."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'"
