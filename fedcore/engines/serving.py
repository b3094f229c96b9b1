"""The serving loop of a worker process: it answers the local engine's frames."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from fedcore.base.errors import FedcoreError
from fedcore.base.process import one_thread
from fedcore.client.messages import (
    BUNDLE,
    ClientResult,
    ClientTask,
    Outcome,
    SharedPayload,
    pack_error,
    pack_outcome,
    unpack_task,
)
from fedcore.client.runtime import ClientRuntime
from fedcore.client.worker_spec import unpack_objects, unpack_worker_spec
from fedcore.engines.bundles import PROCESSOR_SECONDS, join_outcomes, split_tasks
from fedcore.engines.channel import WORKER_SPEC, Channel, Spool


def answer_frames(fd: int, spool: Path) -> bool:
    """Serve tasks with one thread; returns False if the connection ended without a stop frame."""
    try:
        with one_thread():
            serve(Channel(socket.socket(fileno=fd), Spool(spool)))
    except (EOFError, ConnectionError):
        return False
    return True


def serve(channel: Channel) -> None:
    """Set up the runtime and answer frames until the stop frame."""

    def broken(error: FedcoreError) -> None:
        channel.send("broken", {}, pack_error(error))

    try:
        unpack_objects(channel.receive_bytes())
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
            if task.kind == BUNDLE:
                outcome: Outcome = join_outcomes(task, (_timed(runtime, own, shared) for own in split_tasks(task)))
            else:
                outcome = _timed(runtime, task, shared)
            channel.send(*pack_outcome(outcome))
        except FedcoreError as error:
            broken(error)


def _timed(runtime: ClientRuntime, task: ClientTask, shared: SharedPayload | None) -> Outcome:
    began = time.process_time()
    outcome = runtime.handle(task, shared)
    if isinstance(outcome, ClientResult):
        outcome.meta[PROCESSOR_SECONDS] = time.process_time() - began
    return outcome
