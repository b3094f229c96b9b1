"""The command ``export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcore.cli import command
from fedcore.tools import options, output


def export(
    run_dir: options.RunDir,
    to: Annotated[str, typer.Option("--to", metavar="safetensors|torch|onnx|transformers", help="The format.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="New folder; default the run's name with the format.")
    ] = None,
    client: Annotated[
        int | None,
        typer.Option("--client", metavar="K", help="The own model of client K, from 0, in place of the global one."),
    ] = None,
    allow_code: options.AllowCode = False,
    debug: options.Debug = False,
) -> None:
    """Write a finished run's model for other programs, with a card (README.md) of data, method and figures.

    torch: a state dict, which loads with weights_only=True, and a program of torch.export. onnx needs the packages onnx
    and onnxscript. transformers: a folder that its from_pretrained loads, of a model hf:FOLDER.
    """
    from fedcore_export.export import export_run

    name = f"{run_dir.resolve().name}{'' if client is None else f'-client-{client}'}-{to}"
    done = export_run(run_dir, to, out or Path(name), client=client, allow_code=allow_code)
    for note in done.notes:
        output.note(note)
    output.line(f"written: {done.directory} ({', '.join(done.files)})")


app = command(export)
