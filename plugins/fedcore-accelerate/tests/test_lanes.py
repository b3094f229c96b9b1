"""Which steps become branches of one graph; that results are the same stands in test_in_lanes.py."""

import warnings

import pytest
from example_steps import RUN
from on_cpu import CpuRecorder, assert_same, side_by_side

from fedcore_accelerate import lanes as module
from fedcore_accelerate.captured_steps import CaptureWarning
from fedcore_testing import partition_of
from tests.sentences import warns

ALIKE = {**RUN, "partition": "iid", "clients": 4, "participation": 1.0, "rounds": 3}


class OneAtATime(CpuRecorder):
    """Cannot record branches; as on a device, none of their operations has been executed then."""

    def __init__(self):
        super().__init__()
        self.refused = 0

    def record_branches(self, branches, streams):
        if len(branches) > 1:
            self.refused += 1
            raise RuntimeError("no branches here\nand more lines")
        return super().record_branches(branches, streams)


def test_branches_that_cannot_be_recorded_are_taken_one_by_one(tmp_path, monkeypatch):
    with warns(CaptureWarning, "no branches here"):
        lanes, plain, recorder = side_by_side(tmp_path, monkeypatch, "fedprox", recorder=OneAtATime(), **ALIKE)
    assert_same(lanes, plain)
    assert recorder.launched
    assert recorder.refused == 2  # full batches and the last ones, of which each is tried once


def test_only_so_many_combinations_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_GRAPHS", 1)
    kept = []
    note = module.Branches._note

    def noted(self, combination, launch):
        note(self, combination, launch)
        kept.append(len(self._graphs))

    monkeypatch.setattr(module.Branches, "_note", noted)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        lanes, plain, recorder = side_by_side(tmp_path, monkeypatch, **{**ALIKE, "partition": "dirichlet"})
    assert_same(lanes, plain)
    assert set(kept) == {1}
    assert recorder.launched


@pytest.mark.slow
def test_branches_of_earlier_learning_rates_are_not_kept(tmp_path, monkeypatch):
    recorder, kept = CpuRecorder(), []

    def notify(event, details):
        if event == "round":
            kept.append(len(recorder.kept))

    options = {**ALIKE, "clients": 2, "rounds": 6, "lr_decay": 0.9}
    side_by_side(tmp_path, monkeypatch, lanes=2, recorder=recorder, notify=notify, **options)
    in_lanes = kept[options["rounds"] :]  # behind the run of one client after the other
    assert len(set(in_lanes)) == 1
    assert in_lanes[0] > 0


def test_a_step_is_eager_then_captured_then_seen_together_and_then_a_branch(tmp_path, monkeypatch):
    lanes, _, recorder = side_by_side(tmp_path, monkeypatch, lanes=2, **{**ALIKE, "clients": 2, "rounds": 1})
    sizes = partition_of(lanes).train.sizes.tolist()
    assert sizes[0] // 8 == sizes[1] // 8
    full, last, epochs = sizes[0] // 8, 1, ALIKE["local_epochs"]
    assert recorder.branched == (epochs * full - 3) + (epochs * last - 3)
    assert recorder.launched == recorder.branched + 2 * 2 * 2  # two lanes, two sizes, steps two and three
