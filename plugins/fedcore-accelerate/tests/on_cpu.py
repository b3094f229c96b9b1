"""CUDA graphs played on the CPU: the operations of a step, done again on the very tensors that they were done on."""

from contextlib import contextmanager, nullcontext
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedcore_accelerate import graphs, offers
from fedcore_testing import federate, forbid_host_sync, model_bytes, records


class Recording(TorchDispatchMode):
    """The operations of one branch, and the memory that they read and write."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.read, self.written = set(), set()
        self._alive = []  # else memory that is freed here would be that of another branch

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        self._alive.append((args, kwargs, out))
        given = storages((args, kwargs))
        self.read |= given
        self.written |= storages(out) - given
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = kwargs.get(argument.name, args[position] if position < len(args) else None)
                self.written |= storages(value)
        return out


def storages(values):
    """Return the addresses of the memory that tensors lie in."""
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return {leaf.untyped_storage().data_ptr() for leaf in leaves if leaf.untyped_storage().nbytes()}


class CpuRecorder:
    """Like a graph it runs no Python again, keeps every address, and takes nothing that waits for the device.

    Unlike one it has done the step once when it is recorded, so the first launch does nothing. Branches are played the
    last first, and must not write to memory that another one uses: on a device they run at the same time.
    """

    def __init__(self):
        self.recorded = self.launched = self.branched = 0
        self.kept = WeakSet()  # the graphs that somebody may launch again

    def running(self):
        return nullcontext()

    def record(self, function):
        launch = self.record_branches([function], [None])
        return lambda: launch([None])

    def record_branches(self, branches, streams):
        recordings = []
        for branch, stream in zip(branches, streams, strict=True):
            with _drawing_from(stream), forbid_host_sync(), Recording() as recording:
                branch()
            recordings.append(recording)
        for one in recordings:
            for other in recordings:
                if one is not other and one.written & (other.read | other.written):
                    raise AssertionError("a branch writes to memory that another one uses")
        self.recorded += 1
        launches = []

        def launch(streams):
            self.launched += 1
            self.branched += len(recordings) > 1
            if launches:
                for recording, stream in reversed(list(zip(recordings, streams, strict=True))):
                    with _drawing_from(stream), torch._C._AutoDispatchBelowAutograd():
                        for func, args, kwargs, out in recording.calls:
                            _redo(func, args, kwargs, out)
            launches.append(None)

        self.kept.add(launch)
        return launch


def _drawing_from(stream):
    return nullcontext() if stream is None else stream.running()


def _redo(func, args, kwargs, out):
    given = storages((args, kwargs))
    again = func(*args, **kwargs)
    for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
        if isinstance(old, Tensor) and old.untyped_storage().data_ptr() not in given:
            old.copy_(new)  # to where whoever reads it will look


@contextmanager
def captured_on_cpu(monkeypatch, recorder):
    """Capture training steps in a block, with this recorder."""
    with monkeypatch.context() as patch:
        for module in (offers, graphs):
            patch.setattr(module, "captures", lambda *given: True)
        patch.setattr(graphs, "CudaRecorder", lambda device: recorder)
        yield


def side_by_side(folder, monkeypatch, *plugins, lanes=3, recorder=None, **options):
    """Run in lanes and one client after the other; returns both results and the recorder."""
    recorder = recorder or CpuRecorder()
    plain = federate(folder, *plugins, **options)
    with captured_on_cpu(monkeypatch, recorder):
        found = federate(folder, *plugins, **{**options, "lanes": lanes})
    return found, plain, recorder


def assert_same(one, other):
    """Compare models and records, bit by bit."""
    assert model_bytes(one) == model_bytes(other)
    assert records(one) == records(other)
