"""Writes a finished run's model, the global or a client's own, to a folder for other programs, with a model card."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations

from fedcore import ConfigError, RunDirectoryError, SplitModel, UnknownNameError
from fedcore.data import Dataset, Inputs
from fedcore.models import Placement
from fedcore.tools import Run, files, process
from fedcore_export.card import PIPELINE, ExportedFile, model_card, plain_model
from fedcore_export.own_model import own_model

FORMATS = ("safetensors", "torch", "onnx", "transformers")

ONNX_PACKAGES = ("onnx", "onnxscript")
"""What torch needs to write ONNX."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Exported:
    """The written files.

    :param notes: what could not be written, and why.
    """

    directory: Path
    files: list[str]
    notes: list[str]


class Classify(nn.Module):
    """A model that returns the logits alone, as programs without fedcore want it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, C) logits."""
        logits: Tensor = self.model(x).logits
        return logits


def export_run(path: Path, form: str, out: Path, *, client: int | None = None, allow_code: bool = False) -> Exported:
    """Write a finished run's model as ``form``, and README.md, to a new folder.

    :param form: ``safetensors``; ``torch``: a state dict, and a program of torch.export where the batches are
        tensors; ``onnx``; or ``transformers``: what its ``from_pretrained`` loads, of a model ``hf:FOLDER``.
    :param client: the own model of this client instead of the global one.
    :param allow_code: as for :func:`fedcore.runs.api.resume`.
    :raises RunDirectoryError: there is no run in ``path``, it is not finished, or its model is damaged.
    :raises ConfigError: ``out`` holds something, there is no global model, or the format does not work for it.
    """
    if form not in FORMATS:
        raise UnknownNameError("format", form, FORMATS)
    if form == "onnx":
        require_onnx()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out} exists already; name a new folder")
    with process.one_thread():
        run = Run.open(path, allow_code=allow_code, reads=True)
        summary = run.directory.read_summary()
        if summary is None:
            raise RunDirectoryError(
                f"{path} is not finished, and the model is written at the end; go on with: "
                f"{run.directory.how_to_resume}"
            )
        notes: list[str] = []
        took_part = True
        if client is None:
            model: nn.Module = trained_model(run)
        else:
            model, took_part = own_model(run, client, notes.append)
            notes += [] if took_part else [f"client {client} took part in no round"]
        merge_adapters(run, model, client)
        session = (run.directory.sessions.read() or [{}])[-1]
        with files.storing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
                folder = Path(temporary) / "model"
                folder.mkdir()
                notes += WRITERS[form](model, run.dataset, folder)
                if fitted := Inputs.of(run.dataset).recipe.get("skops"):
                    (folder / PIPELINE).write_bytes(base64.b64decode(fitted))
                written = [_described(file) for file in sorted(folder.iterdir())]
                card = model_card(run, summary, session, written, model=model, client=client, took_part=took_part)
                files.write_text(folder / "README.md", card)
                os.rename(folder, out)  # the folder appears complete or not at all
    return Exported(out, [*(file.name for file in written), "README.md"], notes)


def trained_model(run: Run) -> SplitModel:
    """Return a finished run's global model, on the CPU, in eval mode.

    :raises ConfigError: parts of it stay on the clients.
    :raises RunDirectoryError: its file is missing, damaged or another model's.
    """
    setup = run.setup
    if setup.layout.personal:
        raise ConfigError(
            f"{run.directory.path} has no global model to export: {sorted(setup.layout.personal)[0]!r} and the "
            "like stay on the clients; a client's own: --client K"
        )
    model = Placement.plain().model(setup.model)
    run.directory.load_model(model)
    return model.eval()


def merge_adapters(run: Run, model: nn.Module, client: int | None) -> None:
    """Turn weights that plugins parametrized (LoRA's W + (alpha / r) B A) into plain ones, in place.

    Parametrizations of the network itself, such as a weight norm, stay: the network's state dict has their names.
    """
    adapted = {name: module for name, module in model.named_modules() if is_parametrized(module)}
    if not adapted:
        return
    plain = dict(plain_model(run, client, model).named_modules())
    for name, module in adapted.items():
        if name in plain and not is_parametrized(plain[name]):
            for tensor in list(module.parametrizations):
                remove_parametrizations(module, tensor)


def require_onnx() -> None:
    """Refuse ONNX where its packages are missing.

    :raises ConfigError: names them.
    """
    missing = [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"--to onnx needs {' and '.join(missing)}: pip install onnx onnxscript")


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights by the names of the user's own network, see ``SplitModel.file_names``."""
    names = model.file_names() if isinstance(model, SplitModel) else {}
    return {names.get(name, name): tensor for name, tensor in model.state_dict().items()}


def _safetensors(model: nn.Module, dataset: Dataset, folder: Path) -> list[str]:
    """Write the weights."""
    tensors = {name: tensor.contiguous().clone() for name, tensor in _weights(model).items()}
    (folder / "model.safetensors").write_bytes(safetensors.torch.save(tensors, {"format": "pt"}))
    return []


def _torch(model: nn.Module, dataset: Dataset, folder: Path) -> list[str]:
    """Write a state dict, and the program if torch can export it."""
    weights = io.BytesIO()  # the libraries hide a system error such as a full disk: the file is written below
    torch.save(_weights(model), weights)
    (folder / "model.pt").write_bytes(weights.getvalue())
    if dataset.kind != "tensor":
        return [f"no model.pt2: torch.export takes tensors, and the batches of {dataset.name} are {dataset.kind}"]
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program = torch.export.export(Classify(model), (_example(dataset),), dynamic_shapes=_any_batch())
            written = io.BytesIO()
            torch.export.save(program, written)
    except Exception as error:  # torch.export can raise anything for a network that it cannot trace
        _log.debug("no program", exc_info=True)
        return [f"no model.pt2: torch.export cannot take this network ({_first_line(error)})"]
    (folder / "model.pt2").write_bytes(written.getvalue())
    return []


def _onnx(model: nn.Module, dataset: Dataset, folder: Path) -> list[str]:
    """Write the network with its weights."""
    if dataset.kind != "tensor":
        raise ConfigError(f"--to onnx takes tensors, and the batches of {dataset.name} are {dataset.kind}")
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                Classify(model),
                (_example(dataset),),
                folder / "model.onnx",
                dynamo=True,
                external_data=False,
                verbose=False,
                input_names=["x"],
                output_names=["logits"],
                dynamic_shapes=_any_batch(),
            )
    except OSError:  # of the disk, not of the network
        raise
    except Exception as error:  # torch.onnx.export, too, can raise anything
        raise ConfigError(f"torch cannot write this network as ONNX: {_first_line(error)}") from error
    return []


def _transformers(model: nn.Module, dataset: Dataset, folder: Path) -> list[str]:
    """Write configuration and weights, as transformers reads them. The network has ``save_pretrained`` for it."""
    network = model.network() if isinstance(model, SplitModel) else model
    save = getattr(network, "save_pretrained", None)
    if save is None:
        raise ConfigError(
            f"--to transformers takes a classifier of transformers (--model hf:FOLDER), and this is a "
            f"{type(network).__name__}; --to safetensors writes the weights of any network"
        )
    save(folder, dataset.class_names or ())
    return []


WRITERS: dict[str, Callable[[nn.Module, Dataset, Path], list[str]]] = {
    "safetensors": _safetensors,
    "torch": _torch,
    "onnx": _onnx,
    "transformers": _transformers,
}
"""By format: writes a model's files into a folder, and returns notes on what could not be written."""


def _example(dataset: Dataset) -> Tensor:
    """Return a batch of two test samples."""
    batch: Tensor = dataset.test.gather(torch.arange(min(2, len(dataset.test)))).contiguous()
    return batch


def _any_batch() -> dict[str, dict[int, Any]]:
    return {"x": {0: torch.export.Dim("batch")}}


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:  # the exporter to ONNX says in which step it failed, and its cause why
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]:.200}"


def _described(file: Path) -> ExportedFile:
    content = file.read_bytes()
    return ExportedFile(file.name, len(content), hashlib.sha256(content).hexdigest())
