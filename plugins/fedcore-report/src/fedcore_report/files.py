"""Charts as files: SVG, and PNG or PDF for papers, converted by vl-convert."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from fedcore import ConfigError, UnknownNameError
from fedcore.tools import files

if TYPE_CHECKING:
    from fedcore_report.charts import Chart

FORMATS = ("png", "pdf", "svg")

SCALE = 2.5
"""The pixels of a PNG for each of the SVG: 1,200 in width, for 4 inches in print."""


def formats_of(texts: Iterable[str]) -> list[str]:
    """Return the formats that words of ``--figure-format`` name: ``svg``, ``svg,pdf``.

    :raises UnknownNameError: there is no such format.
    """
    forms = list(dict.fromkeys(form.strip() for text in texts for form in text.split(",")))
    for form in forms:
        if form not in FORMATS:
            raise UnknownNameError("figure format", form, FORMATS)
    return forms


def require_converter(form: str) -> None:
    """Check that charts can be written in a format, without importing what converts them.

    :raises ConfigError: vl-convert is not installed, and this is no SVG.
    """
    if form != "svg" and importlib.util.find_spec("vl_convert") is None:
        raise ConfigError(
            f"figures as {form} need vl-convert, which is not installed: pip install vl-convert-python. SVG needs none"
        )


def save(chart: Chart, *targets: Path) -> None:
    """Draw one chart into files, whose names say their formats."""
    from fedcore_report import svg  # here: it imports numpy

    text = svg.standalone(chart)
    for file in targets:
        if file.suffix == ".svg":
            content = text.encode()
        else:
            import vl_convert

            as_pdf = file.suffix == ".pdf"
            content = vl_convert.svg_to_pdf(text) if as_pdf else vl_convert.svg_to_png(text, scale=SCALE)
        with files.replacing(file, sync=False) as temporary:
            temporary.write_bytes(content)


def write(charts: Iterable[tuple[str, Chart]], folder: Path, forms: Iterable[str]) -> list[Path]:
    """Write charts as files of some formats, named by group and chart; return the files.

    :raises StorageError: the folder cannot be written.
    """
    written: list[Path] = []
    stems: list[str] = []
    with files.storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for group, chart in charts:
            stem = _file_name("-".join(part for part in (group, chart.name) if part))
            taken = sum(other == stem or other.startswith(f"{stem}.") for other in stems)
            stems.append(f"{stem}.{taken + 1}" if taken else stem)
            targets = [folder / f"{stems[-1]}.{form}" for form in forms]
            save(chart, *targets)
            written += targets
    return written


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.=+-]+", "_", text).strip("._-")[:100] or "figure"
