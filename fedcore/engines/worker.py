"""A worker process of the local engine: ``python -m fedcore.engines.worker FD SPOOL``.

Lives as long as its connection: when the engine's process is gone, killed even, the worker ends too.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from threadpoolctl import threadpool_limits

from fedcore.client import Shared
from fedcore.engines.channel import Channel, Spool, pack_outcome, unpack_task
from fedcore.engines.site import unpack_site
from fedcore.errors import FedcoreError
from fedcore.runtime import ClientRuntime
from fedcore.serial import read_tensors

PR_SET_PDEATHSIG = 1


def main(fd: int, spool: Spool) -> None:
    """Serve tasks until the engine hangs up."""
    end_with_parent()
    torch.set_num_threads(1)
    channel = Channel(Connection(fd), spool)
    engine = os.getppid()
    try:
        with threadpool_limits(1):
            serve(channel)
    except (EOFError, BrokenPipeError):
        pass
    finally:
        if os.getppid() != engine:
            spool.remove()  # the engine died without cleaning up


def end_with_parent() -> None:
    """Have the kernel end this process, in mid-epoch too, when the engine's process dies (Linux)."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def serve(channel: Channel) -> None:
    """Set the runtime up and answer every frame."""

    def broken(error: FedcoreError) -> None:
        where = {"plugin": getattr(error, "plugin", None), "hook": getattr(error, "hook", None)}
        channel.send("broken", {}, {"message": str(error), **where})

    try:
        runtime = ClientRuntime(unpack_site(*read_tensors(channel.spool.path / "site.safetensors")))
    except FedcoreError as error:
        broken(error)
        return
    channel.send("ready", {}, None)
    key, shared = None, None
    while True:
        _, tensors, meta = channel.receive()
        task = unpack_task(tensors, meta)
        if task.shared is not None and task.shared != key:
            broadcast, described = read_tensors(channel.spool.path / f"{task.shared}.safetensors")
            key, shared = task.shared, Shared(broadcast, described, runtime.placement)
        try:
            channel.send(*pack_outcome(runtime.handle(task, shared)))
        except FedcoreError as error:
            broken(error)


if __name__ == "__main__":
    main(int(sys.argv[1]), Spool(Path(sys.argv[2])))
