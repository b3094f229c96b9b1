"""CUDA graphs: operations of functions are recorded once and repeated in one launch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from fedcore_accelerate.random_stream import RandomStream

Launch = Callable[[], None]
"""Repeats recorded operations on the device."""
Streams = Sequence[RandomStream]
LaunchBranches = Callable[[Streams], None]
"""Repeats the recorded operations of several functions side by side, each with random numbers of its own."""


class CudaRecorder:
    """Records the operations of a function as a CUDA graph, on a separate stream, to repeat them in one launch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._branches: list[tuple[torch.cuda.Stream, torch.Generator]] = []
        self._begin()

    def _begin(self) -> None:
        """Create a new memory pool. This also restores torch's generator after a failed capture."""
        self._pool = torch.cuda.graph_pool_handle()
        # torch releases a pool with its last graph, and a released pool cannot be captured into again.
        self._anchor = torch.cuda.CUDAGraph()
        with self.running():
            self._anchor.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            torch.zeros(1, device=self._device)
            self._anchor.capture_end()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run a block where recording is possible: on the recorded stream, after the work queued on the current one."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def record(self, function: Callable[[], object]) -> Launch:
        """Call a function and record its device operations without executing them; return their launch.

        :raises RuntimeError: an operation of the function cannot be recorded.
        """
        graph = torch.cuda.CUDAGraph()
        self._capture(graph, function)
        return graph.replay

    def _capture(self, graph: torch.cuda.CUDAGraph, function: Callable[[], object]) -> None:
        with _no_collection():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                function()
            except BaseException:
                with suppress(RuntimeError):  # it only says that the capture is invalid
                    graph.capture_end()
                self._begin()
                raise
            try:
                graph.capture_end()
            except RuntimeError:
                self._begin()
                raise

    def record_branches(self, branches: Sequence[Callable[[], object]], streams: Streams) -> LaunchBranches:
        """Record functions that may run side by side: none writes to what another one reads or writes.

        Each branch of the graph has a CUDA stream and a generator that no other branch uses.

        :param streams: for each function, the stream from which it draws random numbers.
        :raises RuntimeError: an operation cannot be recorded.
        """
        while len(self._branches) < len(branches):
            self._branches.append((torch.cuda.Stream(self._device), torch.Generator(self._device)))
        used, graph = self._branches[: len(branches)], torch.cuda.CUDAGraph()
        for _, generator in used:
            graph.register_generator_state(generator)

        def run() -> None:
            # All branches part before the first one begins. Otherwise the graph would run them one after the other.
            for stream, _ in used:
                stream.wait_stream(self._stream)
            for (stream, generator), branch in zip(used, branches, strict=True):
                with torch.cuda.stream(stream), self._drawing_from(generator):
                    branch()
            for stream, _ in used:
                self._stream.wait_stream(stream)

        def launch(streams: Streams) -> None:
            for (_, generator), numbers in zip(used, streams, strict=True):
                generator.set_state(numbers.states[-1])
            graph.replay()
            for (_, generator), numbers in zip(used, streams, strict=True):
                numbers.states[-1] = generator.get_state()

        self._capture(graph, run)
        return launch

    @contextmanager
    def _drawing_from(self, generator: torch.Generator) -> Iterator[None]:
        """Let the captured operations of a block draw from a registered generator."""
        default = torch.cuda.default_generators[self._stream.device_index]
        before = default.graphsafe_get_state()
        default.graphsafe_set_state(generator.graphsafe_get_state())
        try:
            yield
        finally:
            default.graphsafe_set_state(before)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable the garbage collector: destroying an old graph invalidates a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
