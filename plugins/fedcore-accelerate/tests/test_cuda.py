"""Runs on a GPU: captured steps give what plain ones give, for every plugin; skipped where there is none."""

import warnings

import example_steps
import pytest
import torch

from fedcore_accelerate.captured_steps import CaptureWarning
from fedcore_accelerate.recorder import CudaRecorder
from tests import support

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

RUN = {**example_steps.RUN, "device": "cuda"}
METHODS = [
    (),
    ("fedprox",),
    ("moon",),
    ("moon", "uscc"),
    ("fedproc",),
    ("fedeccr",),
    ("fdcl",),
    ("fedcme",),
    ("fedcd",),
    ("fedcp",),
    ("ccvr",),
    ("ditto",),
    ("fedrs",),
    ("fedper",),
    ("solo",),
    ("fednova",),
    ("scaffold",),
    ("feddyn",),
    ("feddc",),
    ("fedprox", "moon"),
    ("fedcme", "fedprox"),
    ("fedsam",),
    ("per-fedavg",),
    ("fedrep",),
    ("fedbabu",),
    ("fedala",),
    ("fedetf",),
    ("fednh",),
    ("fpl",),
    ("fedtgp",),
    ("fedpac",),
]


@pytest.fixture
def captures(monkeypatch):
    """Count captures and replays."""
    counts = {"captured": 0, "replayed": 0}
    record = CudaRecorder.record

    def counting_record(recorder, function):
        launch = record(recorder, function)
        counts["captured"] += 1

        def counting_launch():
            counts["replayed"] += 1
            launch()

        return counting_launch

    monkeypatch.setattr(CudaRecorder, "record", counting_record)
    return counts


def assert_close(one, other, **tolerances):
    for (name, a), b in zip(support.weights(one).items(), support.weights(other).values(), strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}", **tolerances)


@pytest.mark.parametrize("plugins", METHODS, ids="+".join)
def test_captured_steps_train_as_plain_ones_do(go, captures, plugins):
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        captured = go(*plugins, **RUN)
    assert captures["replayed"] > 3 * captures["captured"] > 0
    plain = go(*plugins, **RUN, capture=False)
    assert_close(captured, plain, rtol=1e-4, atol=1e-5)
    for a, b in zip(support.lines(captured), support.lines(plain), strict=True):
        assert a.get("losses", {}) == pytest.approx(b.get("losses", {}), rel=1e-3)


@pytest.mark.parametrize("model", ["with_dropout", "with_batch_norm"])
def test_dropout_and_batch_norm_are_captured(go, captures, model):
    options = {**RUN, "model": f"module:{example_steps.__name__}.{model}", "batch_size": 16}
    captured, plain = go(**options), go(**options, capture=False)
    assert captures["replayed"]
    assert_close(captured, plain, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [{"clip_norm": 1.0}, {"lr_decay": 0.5}, {"momentum": 0.0}, {"precision": "bf16"}, example_steps.ADAMW],
)
def test_options_of_the_optimizer_are_captured(go, captures, options):
    captured, plain = go("moon", **RUN, **options), go("moon", **RUN, **options, capture=False)
    assert captures["replayed"]
    assert_close(captured, plain, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("plugins", [(), ("fedcd",)], ids="+".join)
def test_the_gpu_trains_as_the_cpu_does(go, plugins):
    gpu, cpu = go(*plugins, **RUN), go(*plugins, **{**RUN, "device": "cpu"})
    assert_close(gpu, cpu, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("plugins", METHODS, ids="+".join)
def test_clients_in_lanes_train_as_one_after_the_other(go, plugins):
    """Batches have one size, so that steps that read no client are branches of one graph."""
    options = {**RUN, "partition": "iid", "batch_size": 8}
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        lanes = go(*plugins, **options, lanes=4)
    assert_close(lanes, go(*plugins, **options), rtol=1e-4, atol=1e-5)


def test_branches_draw_their_own_random_numbers(go):
    model = f"module:{example_steps.__name__}.with_dropout"
    options = {**RUN, "partition": "iid", "batch_size": 8, "model": model}
    assert_close(go(**options, lanes=4), go(**options), rtol=1e-3, atol=1e-4)


def test_clients_in_lanes_are_branches_of_one_graph(go, captures):
    go(**{**RUN, "partition": "iid", "participation": 1.0}, lanes=4)
    alone = dict(captures)
    captures.update(captured=0, replayed=0)
    go(**{**RUN, "partition": "iid", "participation": 1.0})
    assert alone["replayed"] < captures["replayed"]  # one launch takes the steps of several clients


def test_worker_processes_share_the_gpu(go):
    assert_close(go("moon", **RUN), go("moon", **{**RUN, "workers": 2}), rtol=1e-4, atol=1e-5)


def test_a_hook_that_waits_for_the_device_is_not_captured_and_said_so(go):
    with pytest.warns(CaptureWarning, match="waits.*local_loss"):
        captured = go(example_steps.Waits, **RUN)
    assert_close(captured, go(example_steps.Waits, **RUN, capture=False), rtol=1e-4, atol=1e-5)


OWN = [
    "Rebinds",
    "CountsInPython",
    "InPlace",
    "Noisy",
    "ByEpoch",
    "ByRound",
    "Adds",
    "Freezes",
    "Ascends",
    "OnRows",
    "Starts",
    "Alternates",
]


@pytest.mark.parametrize("name", OWN)
def test_what_hooks_keep_or_look_at_is_right(go, name):
    cls, options = getattr(example_steps, name), {**RUN, "batch_size": 8}
    assert_close(go(cls, **options), go(cls, **options, capture=False), rtol=1e-4, atol=1e-5)
