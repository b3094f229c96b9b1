"""The calls to torch.cuda that record branches, in their order, on stand-ins: this machine needs no GPU for it."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from fedcore_accelerate import recorder as module
from fedcore_accelerate.recorder import CudaRecorder
from tests.sentences import raises


class Calls(list):
    """What was called, in order."""


@pytest.fixture
def cuda(monkeypatch):
    """Stand-ins for streams, graphs and generators that note how they are used."""
    calls, current = Calls(), []

    class Stream:
        made = 0
        device_index = 0

        def __init__(self, device):
            self.name = f"stream {Stream.made}"
            Stream.made += 1

        def wait_stream(self, other):
            calls.append(f"{self.name} waits for {other.name}")

    class Graph:
        def capture_begin(self, **how):
            calls.append("begin")

        def capture_end(self):
            calls.append("end")

        def register_generator_state(self, generator):
            calls.append(f"register {generator.name}")

        def replay(self):
            calls.append("replay")

    class Generator:
        made = 0

        def __init__(self, device=None):
            self.name = f"generator {Generator.made}"
            Generator.made += 1
            self.state = "new"
            self.points_to = self

        def graphsafe_get_state(self):
            return self.points_to

        def graphsafe_set_state(self, other):
            self.points_to = other

        def set_state(self, state):
            self.state = state

        def get_state(self):
            return f"{self.state}+"

    default = Generator()

    @contextmanager
    def stream(entered):
        current.append(entered)
        try:
            yield
        finally:
            current.pop()

    @contextmanager
    def device(_):
        yield

    stub = SimpleNamespace(
        Stream=Stream,
        CUDAGraph=Graph,
        graph_pool_handle=object,
        stream=stream,
        device=device,
        current_stream=lambda _: SimpleNamespace(name="outside", wait_stream=lambda other: None),
        default_generators=[default],
    )
    monkeypatch.setattr(module, "torch", SimpleNamespace(cuda=stub, Generator=Generator, zeros=lambda *a, **k: None))
    return SimpleNamespace(calls=calls, current=current, default=default)


def numbers(*states):
    return [SimpleNamespace(states=["cpu", state]) for state in states]


def test_branches_part_run_on_their_own_and_join(cuda):
    recorder = CudaRecorder(torch.device("cpu"))
    cuda.calls.clear()

    def branch(name):
        return lambda: cuda.calls.append(f"{name} on {cuda.current[-1].name} draws from {cuda.default.points_to.name}")

    launch = recorder.record_branches([branch("a"), branch("b")], numbers("x", "y"))
    assert cuda.calls == [
        "register generator 1",
        "register generator 2",
        "begin",
        "stream 1 waits for stream 0",
        "stream 2 waits for stream 0",
        "a on stream 1 draws from generator 1",
        "b on stream 2 draws from generator 2",
        "stream 0 waits for stream 1",
        "stream 0 waits for stream 2",
        "end",
    ]
    assert cuda.default.points_to is cuda.default
    cuda.calls.clear()
    streams = numbers("p", "q")
    launch(streams)
    assert cuda.calls == ["replay"]
    assert [stream.states for stream in streams] == [["cpu", "p+"], ["cpu", "q+"]]


def test_streams_and_generators_are_made_once(cuda):
    recorder = CudaRecorder(torch.device("cpu"))
    recorder.record_branches([lambda: None] * 2, numbers("x", "y"))
    cuda.calls.clear()
    recorder.record_branches([lambda: None] * 3, numbers("x", "y", "z"))
    assert [call for call in cuda.calls if call.startswith("register")] == [
        "register generator 1",
        "register generator 2",
        "register generator 3",
    ]


def test_a_branch_that_fails_ends_the_capture_and_leaves_the_default_generator(cuda):
    recorder = CudaRecorder(torch.device("cpu"))
    cuda.calls.clear()

    def fails():
        raise RuntimeError("not while capturing")

    with raises(RuntimeError):
        recorder.record_branches([lambda: None, fails], numbers("x", "y"))
    assert cuda.default.points_to is cuda.default
    assert not cuda.current
    assert cuda.calls.count("begin") == cuda.calls.count("end")
