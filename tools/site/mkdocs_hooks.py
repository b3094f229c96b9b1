"""What mkdocs calls: pages made from the code join those in docs/, links and formulas are put right."""

from __future__ import annotations

import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import fedcore
import floors
import hook_reference
import mathml
import method_pages
import option_reference
from links import ROOT, method_page, relink
from methods import grouped

DESCRIBED = re.compile(
    r"^\[`(?P<name>fedcore\w*\.[\w.]+)`\]\([\w./-]+\.py\)(?: <!-- (?P<options>\{.*\}) -->)?$", re.MULTILINE
)
"""A line that is a link to an object's source: in its place the site has the object's description by mkdocstrings."""


def generated() -> dict[str, str]:
    """Return every page that is made from code or cards, by its place on the site."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/pictures/", "](pictures/")
    made = {"index.md": relink(readme, "README.md", "index.md")}
    made["reference/hooks.md"] = hook_reference.page()
    made["reference/options.md"] = option_reference.options_page()
    made["reference/commands.md"] = option_reference.commands_page()
    return {**made, **method_pages.pages()}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the navigation: the methods, and of the other entries those that have a page. The site names the version."""
    config.site_name = f"fedcore {fedcore.__version__}"
    pages = set(generated())
    pages |= {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    methods: list[Any] = ["methods.md"]
    for group, packages in grouped().items():
        methods.append({group: [{method_pages.title(package): method_page(package.name)} for package in packages]})
    entries = [{"Methods": methods} if "Methods" in entry else entry for entry in config.nav or []]
    config.nav = _present(entries, pages)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from code."""
    for page, text in generated().items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Put the links of pages in docs/ right: they are written for readers of the repository."""
    if page.file.generated_by:
        return markdown
    markdown = DESCRIBED.sub(lambda line: f"::: {line['name']}\n    options: {line['options'] or '{}'}", markdown)
    return relink(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)


def on_page_content(html: str, **kwargs: Any) -> str:
    """Typeset the formulas; draw the floors where a page asks for them."""
    if floors.MARK in html:
        html = html.replace(floors.MARK, floors.picture())
    return mathml.typeset(html)


def _present(entries: list[Any], pages: set[str]) -> list[Any]:
    """Return the entries of the navigation that lead to a page."""
    kept: list[Any] = []
    for entry in entries:
        if isinstance(entry, str):
            kept += [entry] if entry in pages else []
            continue
        ((title, target),) = entry.items()
        if isinstance(target, list):
            inner = _present(target, pages)
            kept += [{title: inner}] if inner else []
        elif target in pages:
            kept.append(entry)
    return kept
