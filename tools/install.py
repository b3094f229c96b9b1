"""Install fedcore with the packages of plugins/ into this Python's environment; `make setup` calls it.

    python tools/install.py [--profile core] [--extra report] [--torch cpu [--torch-index ADDRESS]]

By uv, from PATH or fetched by pip, and by pip where uv cannot be had or fails: the same packages, at the versions of
constraints.txt, from the indexes that pip is configured for. Needs the standard library only.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ["hatchling", "editables"]
ALONE = "fedcore-flower"
"""Flower asks for older versions than the pinned ones: this package is installed without what it requires."""

UV_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "cert": "SSL_CERT_FILE",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "trusted-host": "UV_INSECURE_HOST",
}
"""Options of pip -> the environment variables by which uv does the same."""

Pip = list[list[str]]


def main() -> int:
    """Install; returns the exit code."""
    parser = argparse.ArgumentParser(description="Install fedcore and the packages of plugins/.")
    parser.add_argument("--profile", choices=("dev", "core"), default="dev", help="core: no development tools")
    parser.add_argument("--extra", action="append", default=[], help="an extra of fedcore, such as report; repeatable")
    parser.add_argument("--torch", choices=("default", "cpu"), default="default", help="cpu: torch without CUDA")
    parser.add_argument("--torch-index", default="", help="index or folder that holds torch's CPU wheels")
    chosen = parser.parse_args()
    steps = list(requirements(chosen.profile, chosen.extra))
    uv = find_uv()
    problem = "no uv on PATH, and pip cannot fetch it"
    if uv is not None:
        problem = by_uv(uv, steps, chosen.torch, chosen.torch_index)
    code = by_pip(steps, chosen.torch, chosen.torch_index, problem) if problem else 0
    if not code:
        for misfit in misfits():
            print(f"note: {misfit}", file=sys.stderr)
    return code


def requirements(profile: str, extras: Sequence[str] = ()) -> Iterator[list[str]]:
    """Yield what is installed, step by step: the build tools, everything, and the package that stands alone."""
    packages = [path.parent for path in sorted((ROOT / "plugins").glob("*/pyproject.toml"))]
    if profile == "core":
        packages = [path for path in packages if not own_dependencies(path)]
    yield BUILD
    editable = [word for path in packages if path.name != ALONE for word in ("-e", str(path))]
    named = ",".join([*["dev"] * (profile == "dev"), *extras])
    yield ["-e", f"{ROOT}[{named}]" if named else str(ROOT), *editable]
    if profile == "dev":
        yield ["--no-deps", "-e", str(ROOT / "plugins" / ALONE)]


def own_dependencies(package: Path) -> list[str]:
    """Return what a package requires beyond fedcore, and beyond what fedcore-zoo and the packages of studies require.

    Profile core leaves out the packages that require more.
    """
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ours = ("fedcore", "cloudpickle", "torchvision", "pillow", "scikit-learn", "scipy", "pandas", "jinja2")
    ours += ("safetensors", "typing_extensions")
    return [need for need in project["dependencies"] if not need.startswith(ours)]


def find_uv() -> str | None:
    """Return uv's path: from PATH, from this environment, or fetched into it by pip; None where pip cannot."""
    own = Path(sys.executable).with_name("uv")
    found = shutil.which("uv") or shutil.which(own)
    if found is None:
        fetch = [sys.executable, "-m", "pip", "install", "--quiet", "--retries", "1", "uv"]
        execute(fetch)
        found = shutil.which(own)
    return found


def by_uv(uv: str, steps: Pip, torch: str, torch_index: str) -> str:
    """Install by uv, with bytecode compiled by one process per core; returns what failed, empty if nothing did."""
    # As pip does, take the best version that any index has, not the first index that knows the name.
    install = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--index-strategy", "unsafe-best-match"]
    install += ["--no-build-isolation", "--compile-bytecode", "-c", str(ROOT / "constraints.txt")]
    if torch == "cpu":
        install += index_option(torch_index, "--index") if torch_index else ["--torch-backend", "cpu"]
    environment = {**uv_environment(pip_options()), **os.environ}
    for step in steps:
        done = execute([*install, *step], env=environment)
        if done.returncode:
            return done.stderr.strip() or f"uv ended with exit code {done.returncode}"
    return ""


def by_pip(steps: Pip, torch: str, torch_index: str, problem: str) -> int:
    """Install by pip; ``problem`` is why not by uv, printed where pip fails, too. Returns pip's exit code."""
    if torch == "cpu" and not torch_index:
        print(
            f"TORCH=cpu needs uv, which is not usable here ({problem}), or the address of an index (or folder) with "
            "torch's CPU wheels: make setup TORCH=cpu TORCH_INDEX=ADDRESS",
            file=sys.stderr,
        )
        return 2
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-build-isolation"]
    install += ["-c", str(ROOT / "constraints.txt")]
    install += index_option(torch_index, "--extra-index-url") if torch == "cpu" else []
    for step in steps:
        code = execute([*install, *step], capture_output=False).returncode
        if code:
            print(f"uv was not used: {problem}", file=sys.stderr)
            return code
    execute([sys.executable, "-m", "compileall", "-q", "-j", "0", sys.prefix])
    return 0


TORCHVISION = """
from importlib.metadata import version
print("torchvision", version("torchvision"), "next to torch", version("torch"))
import torchvision
"""


def misfits() -> Iterator[str]:
    """Yield what is installed but does not work together, with the remedy. fedcore itself works all the same."""
    tried = execute([sys.executable, "-c", TORCHVISION])
    if tried.returncode:
        reason = tried.stderr.strip().rpartition("\n")[2]
        yield (
            f"{tried.stdout.strip() or 'torchvision'} cannot be imported ({reason}). fedcore-zoo loads it all the "
            "same; whatever else imports it fails, such as timm. Both have to come from one index: make "
            "clean, then make setup TORCH=cpu for torch without CUDA; TORCH_INDEX=ADDRESS names an index that has both"
        )
    checked = execute([sys.executable, "-m", "pip", "check"])
    broken = [line for line in checked.stdout.splitlines() if not line.startswith(f"{ALONE} ")]
    if checked.returncode and broken:
        yield f"{' '.join(broken)} Remedy: make clean, then make setup, which installs the pinned versions anew"


def index_option(address: str, flag: str) -> list[str]:
    """Return the option that adds an index, or a folder of wheels."""
    return ["--find-links", address] if Path(address).is_dir() else [flag, address]


def pip_options() -> dict[str, str]:
    """Return pip's configuration, of its files and its environment: option -> value."""
    listed = execute([sys.executable, "-m", "pip", "config", "list"])
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}  # the last one counts
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in found:
            found[section][option] = str(ast.literal_eval(value))
    return {option: value for section in found.values() for option, value in section.items()}


def uv_environment(options: dict[str, str]) -> dict[str, str]:
    """Return the environment in which uv uses what pip is configured for."""
    separators = {"UV_FIND_LINKS": ","}  # the others take spaces, as pip does
    return {
        UV_NAMES[option]: separators.get(UV_NAMES[option], " ").join(value.split())
        for option, value in options.items()
        if option in UV_NAMES
    }


def execute(
    command: list[str], *, capture_output: bool = True, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, whatever its exit code."""
    return subprocess.run(command, capture_output=capture_output, env=env, text=True, check=False)  # noqa: S603


if __name__ == "__main__":
    sys.exit(main())
