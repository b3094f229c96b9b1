"""A worker process of the local engine: ``python -m fedcore_workers.worker FD ENGINE``.

A worker ends when its connection ends. On Linux it also ends at once when the engine's process dies, even in the middle
of an epoch or while it is stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import warnings
from functools import partial
from typing import Any

from fedcore import FedcoreError
from fedcore.engines import ClientRuntime, SharedPayload, nobody_draws_outside
from fedcore.tools import process
from fedcore_workers.forks import die_with_parent
from fedcore_workers.messages import pack_error, pack_outcomes, unpack_shared, unpack_site, unpack_tasks
from fedcore_workers.transport import Channel, get_frame


def main(fd: int, engine: int | None = None) -> None:
    """Serve an engine until it closes the connection or dies.

    :param fd: the descriptor of the connection.
    :param engine: the process id of the engine. None: a template forked this process, which dies with it.
    """
    if engine is not None:
        die_with_parent(engine)
    for number in (signal.SIGINT, signal.SIGTERM):  # SLURM sends it to every process of a job; the engine ends workers
        signal.signal(number, signal.SIG_IGN)
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):  # a worker that gets its task does not keep the engine from sending the next
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    nobody_draws_outside()
    channel = Channel(socket.socket(fileno=fd))
    warnings.showwarning = partial(_pass_on, channel)
    with process.one_thread(), contextlib.suppress(EOFError, ConnectionError):
        serve(channel)


def _pass_on(channel: Channel, *warning: Any) -> None:
    """Send a warning, as :func:`warnings.showwarning` gets it, to the engine, which prints it once for all workers."""
    message, category, file, line = warning[:4]
    channel.send({}, ["warning", warnings.formatwarning(message, category, file, line)])


def serve(channel: Channel) -> None:
    """Set up the runtime, then work on tasks.

    :raises EOFError, ConnectionError: the connection ended.
    """
    _, _, descriptor = channel.receive()
    assert descriptor is not None
    try:
        runtime = ClientRuntime(unpack_site(get_frame(descriptor)[0]))
    except FedcoreError as error:
        channel.send({}, ["broken", pack_error(error)])
        return
    channel.send({}, ["ready", None])
    shared: SharedPayload | None = None
    while True:
        tensors, tasks, descriptor = channel.receive()
        if descriptor is not None:
            shared = None  # frees the last payload before the next one is mapped
            shared = unpack_shared(*get_frame(descriptor)).copy_to(runtime.placement)
        began = time.process_time()
        try:
            outcomes = runtime.handle_together(unpack_tasks(tensors, tasks), shared)
            packed, meta = pack_outcomes(outcomes)
        except FedcoreError as error:
            channel.send({}, ["broken", pack_error(error)])
            continue
        channel.send(packed, ["outcomes", meta, time.process_time() - began])


if __name__ == "__main__":
    process.end_without_collecting()
    main(int(sys.argv[1]), int(sys.argv[2]))
