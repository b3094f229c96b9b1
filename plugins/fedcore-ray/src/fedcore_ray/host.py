"""What runs on a worker: a process that hosts many clients and answers tasks, bytes in and bytes out."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace

import torch
from threadpoolctl import threadpool_limits

from fedcore import FedcoreError
from fedcore.engines import ClientRuntime, ClientSite, SharedPayload
from fedcore_ray.payload import Bytes, pack, view
from fedcore_workers import pack_error, pack_outcome, unpack_shared, unpack_site, unpack_task


class Host:
    """The class of the actors."""

    def __init__(self) -> None:
        self._runtime: ClientRuntime | None = None
        self._key: str | None = None
        self._shared: SharedPayload | None = None

    def set_up(self, site: Bytes, folder: str) -> Bytes:
        """Set the clients up, over the site where it lies; says ``ready``, or ``broken`` and why.

        :param folder: where the run was started, as relative names such as ``hf:FOLDER`` mean it.
        """
        with contextlib.suppress(OSError):  # another machine may not have it
            os.chdir(folder)
        torch.set_num_threads(1)
        self._limits = threadpool_limits(1)
        try:
            self._runtime = ClientRuntime(_on_own_gpu(unpack_site(view(site)[0])))
        except FedcoreError as error:
            return pack({}, ["broken", pack_error(error)])
        return pack({}, ["ready", None])

    def run(self, task: Bytes, shared: Bytes | None) -> Bytes:
        """Run a task; says ``outcome``, or ``broken`` where no other client would survive it either."""
        assert self._runtime is not None
        unpacked = unpack_task(*view(task.copy()))  # a method may write to what it was asked with
        if shared is not None and unpacked.shared != self._key:
            payload = unpack_shared(*view(shared))
            self._key, self._shared = unpacked.shared, payload.copy_to(self._runtime.placement)
        try:
            outcome = self._runtime.handle(unpacked, self._shared if unpacked.shared is not None else None)
            tensors, meta = pack_outcome(outcome)
        except FedcoreError as error:
            return pack({}, ["broken", pack_error(error)])
        return pack(tensors, ["outcome", meta])


def _on_own_gpu(site: ClientSite) -> ClientSite:
    """Return a site for the GPU that Ray gave this worker, which is the only one that it sees."""
    if torch.device(site.config.device).type != "cuda":
        return site
    return replace(site, config=site.config.model_copy(update={"device": "cuda"}))
