"""Detect host synchronisation in a training step, on a machine without an accelerator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fedcore_accelerate import take_watched_step

_SYNCING = {
    "aten::_local_scalar_dense": "reads a tensor's value (.item(), float(), int(), bool(), or a branch on it)",
    "aten::equal": "compares two tensors on the host (torch.equal)",
    "aten::nonzero": "makes a shape depend on values (nonzero, or boolean indexing)",
    "aten::masked_select": "makes a shape depend on values (masked_select)",
    "aten::bincount": "makes a shape depend on values (bincount)",
    "aten::unique_dim": "makes a shape depend on values (unique)",
    "aten::_unique2": "makes a shape depend on values (unique)",
    "aten::unique_consecutive": "makes a shape depend on values (unique)",
    "aten::repeat_interleave": "makes a shape depend on values (repeat_interleave)",
}


_READING = {
    torch.Tensor.tolist: "tolist",
    torch.Tensor.numpy: "numpy",
    torch.Tensor.cpu: "cpu",
    torch.Tensor.__array__: "numpy.asarray",
}
"""Methods that wait for a device, but on a CPU read memory without any operation."""


class HostSync(AssertionError):
    """An operation would have to wait for the device and could not be recorded in a graph."""


class _Watch(TorchDispatchMode):
    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._report = report

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        problem = _problem(func._schema.name, args)
        if problem:
            self._report(problem)
        return func(*args, **(kwargs or {}))


class _WatchCalls(TorchFunctionMode):
    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__()
        self._report = report

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _READING.get(func)
        if name:
            self._report(f"{name} copies a tensor's values to the host; keep them on the device")
        return func(*args, **(kwargs or {}))


def _problem(name: str, args: Any) -> str:
    """Return why an operation would wait for the device; empty if it would not."""
    if name in _SYNCING:
        return f"{name} {_SYNCING[name]}; use a mask instead"
    if name in ("aten::index", "aten::index_put_", "aten::index_put"):
        for index in args[1]:
            if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8):
                return f"{name} with a boolean index makes a shape depend on values; use a mask instead"
    if name == "aten::lift_fresh":
        return "a tensor is made from Python numbers and would be copied to the device; make it once"
    return ""


@contextmanager
def watch_host_sync(report: Callable[[str], None]) -> Iterator[None]:
    """Run a block and report every operation that would make a CUDA step wait for the device, on any device."""
    with _WatchCalls(report), _Watch(report):
        yield


@contextmanager
def forbid_host_sync() -> Iterator[None]:
    """Run a block in which every operation that would make a CUDA step wait for the device is an error, on any device.

    :raises HostSync: names the operation and what to do.

    >>> with forbid_host_sync():
    ...     torch.ones(2).sum().item()
    Traceback (most recent call last):
    fedcore_testing.sync.HostSync: aten::_local_scalar_dense reads a tensor's value (.item(), float(), int(), ...
    """

    def refuse(problem: str) -> None:
        raise HostSync(problem)

    with watch_host_sync(refuse):
        yield


@contextmanager
def steps_without_host_sync() -> Iterator[list[set[str]]]:
    """Make every training step in the block, in this process, fail if it waits for the device.

    Yields a list to which each step appends what its hooks read of ``round``, ``client``, ``epoch``, ``batch``.

    :raises HostSync: inside the step, where it becomes a failure of the client.
    """
    looked: list[set[str]] = []

    def watched(*arguments: Any) -> None:
        with forbid_host_sync():
            looked.append(take_watched_step(*arguments))

    with mock.patch("fedcore.client.runner.take_step", watched):
        yield looked
