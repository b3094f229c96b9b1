"""The documentation's pages: made from the code, whole, and without anything from the network.

``make docs`` runs the tests of the built site on the one that it has built.
"""

from __future__ import annotations

import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html import unescape
from pathlib import Path

import pytest

from fedcore.base.registry import available
from fedcore.hooks.checks import HOOKS
from tests.support import in_one_test, run_code

sys.path.insert(0, str(Path(__file__).parent))
import documented

ROOT = documented.ROOT
TUTORIAL = ROOT / "docs" / "published-method.md"
PACKAGE = ROOT / "plugins" / "fedcore-fedproto"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site that ``make docs`` has built, or one built here; any warning of mkdocs is an error."""
    if "FEDCORE_SITE" in os.environ:
        return ROOT / os.environ["FEDCORE_SITE"]
    folder = tmp_path_factory.mktemp("site")
    command = ["mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    code = f"import os, sys; os.chdir({str(ROOT)!r}); sys.argv = {command!r}; from mkdocs.__main__ import cli; cli()"
    done = run_code(code, NO_MKDOCS_2_WARNING="1", NO_COLOR="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def text_of(page: Path) -> str:
    article = re.search(r"<article.*?</article>", page.read_text(encoding="utf-8"), re.DOTALL)
    assert article, page
    return " ".join(unescape(re.sub(r"<[^>]+>", "", article[0])).split())


PAGES = sorted(path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md"))
DESCRIBED = {
    page: re.findall(
        r"^\[`(fedcore[\w.]+)`\]\(\S+\.py\)(?: <!-- .* -->)?$",
        (ROOT / "docs" / page).read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    for page in PAGES
}
"""For each page, the objects whose links stand alone on a line."""


@pytest.mark.slow
@in_one_test(page=PAGES)
def test_every_example_that_a_page_includes_stands_on_it(site, page):
    """Line by line; a marker that is not replaced, such as one that a formatter has split, would be shown as text."""
    text = text_of(site / page.replace(".md", ".html"))
    assert not re.search(r"-- ?8 ?< ?--", text)
    for example in set(
        re.findall(r"include: (examples/[\w/]+\.py) -->", (ROOT / "docs" / page).read_text(encoding="utf-8"))
    ):
        missing = [line for line in lines_of(ROOT / example) if " ".join(line.split()) not in text]
        assert not missing, f"{page} includes {example} without these lines: {missing}"


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, names in DESCRIBED.items() if names])
def test_a_page_of_descriptions_has_each_of_them(site, page):
    """In the place of the link to its source; of a module, those of its functions and classes."""
    text = text_of(site / page.replace(".md", ".html"))
    for name in DESCRIBED[page]:
        described = pkgutil.resolve_name(name)
        parts = [value for key, value in vars(described).items() if not key.startswith("_")]
        own = [part for part in parts if callable(part) and getattr(part, "__module__", None) == name]
        without = [part for part in (described, *own) if beginning(part) not in text]
        assert not without, name


def beginning(thing) -> str:
    """Return the first paragraph of a docstring, up to its first role or formula."""
    paragraph = (thing.__doc__ or "").partition("\n\n")[0]
    return re.split("[`:<$]", " ".join(paragraph.split()))[0].strip()


@pytest.mark.slow
@in_one_test(hook=HOOKS)
def test_every_hook_is_documented_with_its_exact_signature(site, hook):
    page = site / "reference" / "hooks.html"
    text = text_of(page)
    signature = inspect.signature(HOOKS[hook])
    arguments = ", ".join(f"{name}: {parameter.annotation}" for name, parameter in signature.parameters.items())
    assert f"{hook}({arguments}) -> {signature.return_annotation}" in text
    assert f'id="{hook}"' in page.read_text(encoding="utf-8")
    part = text.partition(f"{hook}({arguments})")[2]
    for name in signature.parameters:
        documented_argument = re.search(rf":param {name}:", HOOKS[hook].__doc__)
        assert not documented_argument or f"{name}: " in part.partition("Types:")[0]
    assert "When: " in part


@pytest.mark.slow
def test_every_method_has_a_page_with_the_code_of_its_equations(site):
    for name, point in available("plugin").items():
        if point.dist.name == "fedcore-fl" or not (ROOT / "plugins" / point.dist.name).is_dir():
            continue
        page = site / "methods" / f"{point.dist.name.removeprefix('fedcore-')}.html"
        text = text_of(page)
        assert f"--plugin {name}" in text
        assert f"class {point.value.partition(':')[2]}(" in text or "@hookimpl" in text, page
    prox = text_of(site / "methods" / "fedprox.html")
    assert "The code of the equations" in prox
    assert "return _apply(_HalfSquaredDistance, parameters, reference)" in prox
    assert "<c - c_i, w>" in text_of(site / "methods" / "scaffold.html")  # no tag


@pytest.mark.slow
def test_every_card_names_functions_that_the_page_shows(site):
    without = []
    for card in sorted((ROOT / "plugins").glob("*/README.md")):
        page = site / "methods" / f"{card.parent.name.removeprefix('fedcore-')}.html"
        if page.exists() and 'id="the-code-of-the-equations"' not in page.read_text(encoding="utf-8"):
            without.append(card.parent.name)
    assert set(without) <= {"fedcore-centralised", "fedcore-fedrep", "fedcore-solo"}  # which compute nothing


@pytest.mark.slow
def test_formulas_are_typeset_and_spoken(site):
    page = (site / "methods" / "moon.html").read_text(encoding="utf-8")
    formulas = re.findall(r"<math .*?</math>", page, re.DOTALL)
    assert formulas
    for formula in formulas:
        element = ElementTree.fromstring(formula)  # noqa: S314 - made a moment ago, by us
        assert element.get("alttext")
        assert list(element)
    pages = [path.read_text(encoding="utf-8") for path in site.rglob("*.html")]
    assert not any('class="arithmatex"' in page for page in pages)


@pytest.mark.slow
def test_nothing_is_loaded_from_another_machine(site):
    for page in site.rglob("*.html"):
        html = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"([^\"]+)\"", html)
        loaded += [tag for tag in re.findall(r"<link[^>]+>", html) if "stylesheet" in tag or "preconnect" in tag]
        assert not [address for address in loaded if "//" in address], page


@pytest.mark.slow
def test_pages_from_the_disk_can_be_searched(site):
    """There, browsers load the index as a script, and start no worker: a script of the site takes its place."""
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8").removeprefix("var __index = ")
    assert len(json.loads(index)["docs"]) > len(PAGES)
    for page in PAGES:
        html = (site / page.replace(".md", ".html")).read_text(encoding="utf-8")
        (script,) = re.findall(r'<script src="([^"]*iframe-worker\.js)"', html)
        assert (site / page).parent.joinpath(script).resolve() == site / "iframe-worker.js"


@pytest.mark.slow
def test_the_navigation_leads_to_every_page_in_docs(site):
    """A page that nobody finds is no documentation; entries without a page are left out."""
    linked = set(re.findall(r'href="([\w/-]+\.html)"', (site / "index.html").read_text(encoding="utf-8")))
    written = {path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert written <= linked
    assert all((site / page).exists() for page in linked)


@pytest.mark.slow
def test_the_picture_shows_the_floors_and_no_import_that_leads_up(site):
    page = (site / "architecture.html").read_text(encoding="utf-8")
    (drawn,) = re.findall(r"<figure><svg.*?</svg>", page, re.DOTALL)
    picture = ElementTree.fromstring(drawn.removeprefix("<figure>"))  # noqa: S314 - ours
    texts = {element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert {f"{path.parent.name}/" for path in ROOT.glob("fedcore/*/__init__.py")} <= texts
    arcs = list(picture.iter("{http://www.w3.org/2000/svg}path"))
    assert len(arcs) > 20
    assert {arc.get("class") for arc in arcs} == {"downward"}
    assert "0 of them upward" in text_of(site / "architecture.html")


def test_an_import_that_leads_up_is_seen(tmp_path):
    """Those inside of functions, too, but not those for types alone."""
    sys.path.insert(0, str(ROOT / "tools" / "site"))
    import floors

    package = tmp_path / "house"
    for floor, source in {
        "roof": "from house.ground import stone\n",
        "ground": "if TYPE_CHECKING:\n    from house.side import tile\nfrom house.roof import tile\n",
        "side": "def late():\n    import house.ground.stone\n",
    }.items():
        (package / floor).mkdir(parents=True)
        (package / floor / "__init__.py").write_text(source)
    imports = floors.read(package, ["roof", "ground", "side"])
    assert imports.counts == {("roof", "ground"): 1, ("ground", "roof"): 1, ("side", "ground"): 1}
    assert set(floors.upward(imports, [["roof"], ["ground", "side"]])) == {("ground", "roof"), ("side", "ground")}


@pytest.mark.slow
def test_options_and_commands_are_those_of_the_code(site):
    from fedcore.base.config import RunConfig

    options = text_of(site / "reference" / "options.html")
    assert [name for name in RunConfig.model_fields if f"{name} --" not in options] == []
    commands = text_of(site / "reference" / "commands.html")
    for command in ("fedcore train", "fedcore plugins new", "fedcore data split", "fedcore sweep", "--config"):
        assert command in commands


def test_the_tutorial_is_the_package():
    """Its blocks in order are the files, line by line: who follows it has written the package."""
    assert source_of_blocks("__init__.py") == lines_of(PACKAGE / "src" / "fedcore_fedproto" / "__init__.py")
    assert source_of_blocks("equations.py") == lines_of(PACKAGE / "src" / "fedcore_fedproto" / "equations.py")
    assert source_of_blocks("test_fedproto.py") == lines_of(PACKAGE / "tests" / "test_fedproto.py")
    assert "plugins/fedcore-fedproto/pyproject.toml" in TUTORIAL.read_text(encoding="utf-8")


def source_of_blocks(file: str, until: str = "") -> list[str]:
    """Return the lines that the tutorial has for a file, up to a text of it."""
    shown = TUTORIAL.read_text(encoding="utf-8")
    if until:
        shown = shown[: shown.index(until)]
    found: list[str] = []
    for path, block in re.findall(r"^<!-- include: ([^:\s]+):\w+ -->\n```python\n(.*?)^```$", shown, re.M | re.S):
        if Path(path).name == file:
            found += [line for line in block.splitlines() if line.strip()]
    return found


def lines_of(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.strip() and "--8<--" not in line]


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["    fedcore train", "## Predict by prototype", "## Tests"])
def test_the_tutorial_trains_at_every_stage(tmp_path, stage):
    """What a reader has typed up to here is a plugin that runs."""
    package = tmp_path / "fedcore_fedproto"
    package.mkdir()
    for file in ("__init__.py", "equations.py"):
        (package / file).write_text("\n".join(source_of_blocks(file, stage)))
    command = [sys.executable, "-m", "fedcore", "train", "--plugin", "module:fedcore_fedproto.FedProto"]
    options = ["--rounds", "2", "--workers", "0", "--client-test-fraction", "0.2", "--quiet"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([*command, *options], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("personal " in done.stdout) == stage.startswith("##")


def test_the_table_of_methods_is_the_packages():
    sys.path.insert(0, str(ROOT / "tools" / "site"))
    import methods

    assert methods.PAGE.read_text(encoding="utf-8") == methods.page(), "run: python tools/site/methods.py"


def test_source_code_keeps_its_lines():
    """It stands in a cell of a table, next to the numbers of its lines; short code in other tables is on one line."""
    style = (ROOT / "docs" / "site.css").read_text(encoding="utf-8")
    on_one_line = re.findall(r"([^{}]*)\{[^{}]*white-space: nowrap", style)
    assert on_one_line
    assert all("code" not in rule or ":not(.code)" in rule for rule in on_one_line)
