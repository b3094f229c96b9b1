"""Make the pictures of the README from real runs: ``python tools/pictures.py [FOLDER]``, a few minutes on two cores.

It runs the README's commands in FOLDER (default: a new one) and writes docs/pictures/terminal.svg, a terminal with a
run, and docs/pictures/accuracy.png, the report's figure of accuracy over rounds.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
TRAIN = "fedcore train --plugin moon --rounds 5"
SWEEP = (
    "fedcore sweep --grid plugin=fedavg,moon,moon+uscc --projection "
    "--alpha 0.1 --lr 0.03 --rounds 20 --seeds 3 --out sweeps/first"
)
COMPARE = "fedcore compare sweeps/first --baseline fedavg"
REPORT = "fedcore report sweeps/first --out first.html --figures figures --figure-format png --points 0 --force"
COLUMNS = 96


def output_of(command: str, folder: Path) -> str:
    """Return what a command prints to a terminal, with its colours."""
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    words = [sys.executable, "-m", *shlex.split(command)]  # fedcore as a module
    done = subprocess.run(  # noqa: S603 - our own words
        words, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return done.stdout.decode().replace(str(folder) + "/", "").rstrip()


def terminal(shown: dict[str, str]) -> str:
    """Return a picture of a terminal in which these commands were run."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for command, output in shown.items():
        console.print(Text(f"$ {command}", style="bold"))
        console.print(Text.from_ansi(output))
        console.print()
    picture = console.export_svg(title="fedcore", theme=MONOKAI)
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)  # nothing is loaded from another machine


def main(folder: Path) -> None:
    """Run the commands and write the pictures."""
    shown = {TRAIN: output_of(TRAIN, folder)}
    output_of(SWEEP, folder)
    shown[COMPARE] = output_of(COMPARE, folder)
    (PICTURES / "terminal.svg").write_text(terminal(shown), encoding="utf-8")
    output_of(REPORT, folder)
    (PICTURES / "accuracy.png").write_bytes((folder / "figures" / "learning-global.png").read_bytes())


if __name__ == "__main__":
    main(Path(sys.argv[1] if sys.argv[1:] else tempfile.mkdtemp()).absolute())
