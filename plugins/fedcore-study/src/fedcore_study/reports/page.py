"""The page: one HTML file that needs no network. Everything from files is escaped; no script but ours may run in it."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from plotly.io import to_json
from plotly.offline import get_plotlyjs

from fedcore import ConfigError, __version__
from fedcore.base.files import storing, write_text
from fedcore_study.reports.build import Report, Section
from fedcore_study.reports.charts import Chart, Heatmap, Omitted, plain
from fedcore_study.reports.figures import figure, themes


@dataclass(frozen=True)
class _Drawn:
    """A figure as the template wants it: ``json`` is safe inside a script element."""

    id: str
    kind: str
    title: str
    about: str
    json: str


@dataclass(frozen=True)
class _Section:
    title: str
    settings: str
    findings: list[str]
    tables: Sequence[Any]
    drawn: list[_Drawn]
    omitted: list[Omitted]


def check_target(out: Path, figures: Path | None = None, *, force: bool = False) -> None:
    """Refuse to write over what is there.

    :param figures: the folder of the figures' files. ``force``: all but a folder in the page's place may be replaced.
    :raises ConfigError: ``out`` is a folder; or it exists, or the folder of figures holds something.
    """
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder; name a file such as {out / 'report.html'}")
    if out.exists() and not force:
        raise ConfigError(f"--out {out} exists already; choose another name, or replace it with --force")
    if figures is not None and not force and figures.is_dir() and any(figures.iterdir()):
        raise ConfigError(f"--figures {figures} is not empty; choose another folder, or write into it with --force")


def write_page(report: Report, out: Path) -> None:
    """Write the report as one HTML file; it is complete or not there.

    :raises StorageError: it cannot be written.
    """
    with storing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, page(report))


def page(report: Report) -> str:
    """Return the report as HTML."""
    sources = files("fedcore_study.reports") / "templates"
    style, script = ((sources / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    plotly = _inside_script(get_plotlyjs())
    environment = Environment(
        loader=PackageLoader("fedcore_study.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["plain"] = plain
    sections = [_section(section, number) for number, section in enumerate(report.sections, start=1)]
    return environment.get_template("page.html").render(
        generator="fedcore report",
        version=__version__,
        policy=_policy([plotly, script]),
        report={**vars(report), "sections": sections},
        style=style,
        script=script,
        plotly=plotly,
        themes=_json(themes()),
    )


def _section(section: Section, number: int) -> _Section:
    drawn = [
        _Drawn(f"plot-{number}-{place}", _kind(chart), chart.title, chart.about, _json(figure(chart)))
        for place, chart in enumerate(section.charts, start=1)
    ]
    return _Section(section.title, section.settings, section.findings, section.tables, drawn, section.omitted)


def _kind(chart: Chart) -> str:
    """Say whether a figure takes the page's whole width."""
    return "wide" if isinstance(chart, Heatmap) and len(chart.columns) > 16 else "half"


def _json(value: Any) -> str:
    """Return JSON in which nothing can end the script element that it stands in."""
    text: str = to_json(value, validate=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _inside_script(code: str) -> str:
    """Return JavaScript that an HTML parser reads to its end: these words can only stand in its texts."""
    return re.sub(r"<(?=/script|script|!--)", r"\\x3c", code, flags=re.IGNORECASE)


def _policy(scripts: Sequence[str]) -> str:
    """Return a content security policy by which only these scripts run, and nothing is loaded from anywhere."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
