"""A run's directory and its files."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import itertools
import json
import os
import re
import shlex
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from fedcore.base.errors import RunDirectoryError
from fedcore.base.files import (
    TEMPORARY,
    make_folders,
    storing,
    sync_names,
    sync_path,
    write_text,
)
from fedcore.base.serial import read_tensors, write_tensors
from fedcore.base.tensors import copy_into
from fedcore.client.store import ClientStore, RemoteClientStore
from fedcore.data.inputs import Inputs
from fedcore.models.split import SplitModel
from fedcore.runs.checkpoint import CheckpointStore
from fedcore.runs.saved import RunFiles, SavedConfig
from fedcore.server.state import ServerState

BEST, NEXT_BEST = "model-best.safetensors", "model-best-next.safetensors"
"""The best round's model, and a newer one that no checkpoint names yet."""


class RunDirectory(RunFiles):
    """Paths and files of one run.

    They are ``config.yaml`` (itself a valid ``--config``), ``partition.json``, ``metrics.jsonl`` (a line per round, and
    one of ``post_train``), ``sessions.jsonl`` (a line per process that trained the run), ``summary.json``,
    ``model.safetensors``, with ``--keep best`` ``model-best.safetensors``, ``checkpoint/`` and ``clients/``. People may
    add ``labels.json``: name, tags and note instead of those in ``config.yaml``. No checkpoint depends on it.

    :param with_clients: whether the directory holds the clients' states. Remote clients keep their states themselves.
    """

    def __init__(self, path: Path, *, with_clients: bool = True) -> None:
        super().__init__(path)
        self._locked = False
        self.clients = (ClientStore if with_clients else RemoteClientStore)(path / "clients")
        self.checkpoints = CheckpointStore(path / "checkpoint", self.clients)

    @classmethod
    @contextlib.contextmanager
    def create(cls, out: Path | None, names: Iterable[str] = (), *, with_clients: bool = True) -> Iterator[Self]:
        """Make a new, empty run directory, and keep other processes from it until the block ends.

        If the block raises before a round was finished, the directory is deleted again: there is nothing to resume.

        :param out: None for a folder below ``runs``, named after time and ``names``. No other process gets it.
        :raises RunDirectoryError: the directory cannot be made, is not empty, or belongs to another process.
        """
        if out is not None and out.exists() and not out.is_dir():
            raise _exists(out)
        try:
            made = _default_folder(names) if out is None else make_folders(out)
        except OSError as error:
            raise RunDirectoryError(f"--out {out or 'runs'} cannot be made: {error}") from error
        folder = cls((made[0] if out is None else out).resolve(), with_clients=with_clients)
        with folder.lock():
            if any(folder.path.iterdir()):
                raise _exists(folder.path)
            try:
                yield folder
            except BaseException:
                if not folder.metrics.length:
                    for path in folder.path.iterdir():
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
                    for each in made:
                        with contextlib.suppress(OSError):  # it is not empty
                            each.rmdir()
                raise

    def copied(self, out: Path) -> Self:
        """Return a copy in a new directory. Its files are writable, even if this one is a read-only archive.

        :raises RunDirectoryError: the copy cannot be written, or a process trains in one of the two.
        """
        try:
            with self.create(out, with_clients=not isinstance(self.clients, RemoteClientStore)) as made:
                with self.lock():
                    shutil.copytree(
                        self.path, made.path, symlinks=True, dirs_exist_ok=True, copy_function=shutil.copyfile
                    )
                for folder, _, _ in os.walk(made.path):
                    os.chmod(folder, os.stat(folder).st_mode | stat.S_IRWXU)
        except OSError as error:
            first = error.args[0][0][-1] if isinstance(error, shutil.Error) else error  # it lists each file
            raise RunDirectoryError(f"{self.path} cannot be copied to {out}: {first}") from error
        return made

    def write_config(self, saved: SavedConfig) -> None:
        """Write config.yaml, and bind the checkpoints to it."""
        saved.write(self.path / "config.yaml")
        self.checkpoints.binding = saved.binding

    def read_saved(self) -> SavedConfig:
        """Read config.yaml; raises as :meth:`SavedConfig.read`. A checkpoint shows which option was changed."""
        return SavedConfig.read(self.path / "config.yaml", self.checkpoints.newest_binding)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from training this run until the block ends. The block may take the lock again.

        :raises RunDirectoryError: another process trains this run.
        """
        if self._locked:
            yield
            return
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:  # another process could not begin its run here, and deleted the directory
            raise RunDirectoryError(f"{self.path} cannot be opened: {error.strerror or error}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise RunDirectoryError(
                f"another process is training in {self.path}; wait for it to end, or stop it"
            ) from None
        except OSError:  # a network file system that cannot lock folders
            pass
        self._locked = True
        try:
            yield
        finally:
            self._locked = False
            os.close(descriptor)

    def checkpoint(self, state: ServerState, touched: Iterable[int]) -> None:
        """Save a checkpoint, in any thread; see :meth:`CheckpointStore.save`. The records are on the disk before it."""
        if self.metrics.length:
            with storing(self.metrics.path):
                sync_path(self.metrics.path)
        self.checkpoints.save(state, touched)

    def restore(self, state: ServerState | None) -> None:
        """Bring the directory back to the checkpoint that was loaded. What was written later will be written again.

        :param state: the state of the checkpoint; None if there is none.
        """
        self.metrics.restore(0 if state is None else state.metrics_bytes)
        self.sessions.restore()
        self.checkpoints.tidy()
        rounds, best = (0, {}) if state is None else (state.round, state.best)
        if best and self._best_round(NEXT_BEST) == best["round"] + 1:
            self.take_best()
        self.path.joinpath(NEXT_BEST).unlink(missing_ok=True)
        if self._best_round(BEST) > rounds:  # it will be trained again
            self.path.joinpath(BEST).unlink()
        for path in self.path.glob(f".*{TEMPORARY}"):
            path.unlink(missing_ok=True)

    def write_model(
        self, model: Mapping[str, Tensor], names: Mapping[str, str], inputs: Inputs, *, best: int | None = None
    ) -> None:
        """Write the final global model, or that of the best round, and the form of its inputs.

        :param names: the tensors' names in the file, see :meth:`SplitModel.file_names`.
        :param best: the best round so far, from 1, if it is the model of this round. After the checkpoint that names
            this round :meth:`take_best` has to follow.
        """
        tensors = {names[name]: tensor for name, tensor in model.items()}
        file = self.path / ("model.safetensors" if best is None else NEXT_BEST)
        write_tensors(file, tensors, {"inputs": asdict(inputs), "best_round": best})

    def take_best(self) -> None:
        """Let the best round's model that was written last replace the one before.

        :raises StorageError: it cannot be renamed.
        """
        with storing(self.path):
            os.replace(self.path / NEXT_BEST, self.path / BEST)
            sync_path(self.path)

    def _best_round(self, name: str) -> int:
        """Return the round in a file of the best round's model; 0 if the file is missing or damaged."""
        try:
            return int(read_tensors(self.path / name)[1]["best_round"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def load_model(self, model: SplitModel, *, best: int | None = None) -> Inputs:
        """Load the final global model's weights, or those of the best round, into a model on the CPU.

        :param best: as for :meth:`write_model`.
        :returns: the form of the model's inputs.
        :raises RunDirectoryError: the file is missing, damaged, or of another model or round.
        """
        file = self.path / ("model.safetensors" if best is None else BEST)
        try:
            tensors, meta = read_tensors(file)
            if meta["best_round"] != best:
                raise ValueError(f"it is of round {meta['best_round']}, but the best round is {best}")
            inputs = Inputs.from_json(meta["inputs"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            fault = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
            again = "A resume does not write it again"
            if best is None and self.checkpoints.any():
                again = f"{self.how_to_resume} writes it again"
            raise RunDirectoryError(f"{file} {fault}. {again}") from error
        own, names = model.state_dict(), model.file_names()
        expected = {names[name]: (tensor.shape, tensor.dtype) for name, tensor in own.items()}
        if {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()} != expected:
            raise RunDirectoryError(f"the tensors in {file} are not those of the model that config.yaml describes")
        copy_into(own, {name: tensors[names[name]] for name in own})
        return inputs

    def reopen_finished(self) -> None:
        """Delete summary and model of a finished run, before it is resumed for more rounds."""
        with storing(self.path):
            for name in ("summary.json", "model.safetensors"):
                (self.path / name).unlink(missing_ok=True)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json."""
        text = json.dumps(summary, indent=2)
        # A row of numbers takes one line: a confusion matrix of 100 classes has 10,000 numbers.
        rows = re.sub(r"\[\n[\s\d.,eE+-]+\]", lambda row: "[" + " ".join(row[0][1:-1].split()) + "]", text)
        write_text(self.path / "summary.json", rows + "\n")


def _default_folder(names: Iterable[str]) -> list[Path]:
    """Make an empty folder below ``runs``, named after time and names; return the new folders, innermost first."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    base = Path("runs").resolve() / f"{stamp}-{'-'.join(names) or 'fedavg'}"
    made = make_folders(base.parent)
    for number in itertools.count():
        out = base.with_name(f"{base.name}-{number}") if number else base
        with contextlib.suppress(FileExistsError):  # of a run that began in the same second
            out.mkdir()
            break
    sync_names([out])
    return [out, *made]


def _exists(out: Path) -> RunDirectoryError:
    resume = f", or go on with: fedcore resume {shlex.quote(str(out))}" if (out / "config.yaml").is_file() else ""
    return RunDirectoryError(f"--out {out} exists already. Choose another directory{resume}")
