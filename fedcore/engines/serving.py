"""The serving loop of a worker process: it answers the local engine's frames."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

import torch
from threadpoolctl import threadpool_limits

from fedcore.base.errors import FedcoreError
from fedcore.client.packing import pack_error, pack_outcome, unpack_task
from fedcore.client.runtime import ClientRuntime
from fedcore.client.shared_payload import SharedPayload
from fedcore.client.worker_spec import unpack_worker_spec
from fedcore.engines.channel import WORKER_SPEC, Channel, Spool


def answer_frames(fd: int, spool: Path) -> bool:
    """Serve tasks with one thread; returns False if the connection ended without a stop frame."""
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            serve(Channel(Connection(fd), Spool(spool)))
    except (EOFError, ConnectionError):
        return False
    return True


def serve(channel: Channel) -> None:
    """Set up the runtime and answer frames until the stop frame."""

    def broken(error: FedcoreError) -> None:
        channel.send("broken", {}, pack_error(error))

    try:
        runtime = ClientRuntime(unpack_worker_spec(*channel.spool.get(WORKER_SPEC)))
    except FedcoreError as error:
        broken(error)
        return
    channel.send("ready", {}, None)
    key, shared = None, None
    while True:
        kind, tensors, meta = channel.receive()
        if kind == "stop":
            return
        task = unpack_task(tensors, meta)
        if task.shared is not None and task.shared != key:
            broadcast, described = channel.spool.get(task.shared)
            key, shared = task.shared, SharedPayload(broadcast, described, runtime.placement)
        try:
            channel.send(*pack_outcome(runtime.handle(task, shared)))
        except FedcoreError as error:
            broken(error)
