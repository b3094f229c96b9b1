"""How a run goes on from a checkpoint: it trains another round, it is finished, or it cannot do as it was asked to."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from fedcore.base.config import TrainingOptions
from fedcore.runs.training import out_of_patience
from fedcore.server.state import ServerState


class TrainOn(NamedTuple):
    """A run trains its next round from a state."""

    state: ServerState


class Finished(NamedTuple):
    """A run trains no further round. What follows its training may be left to do."""

    state: ServerState
    note: str = ""
    """Why no round is trained though more were asked for."""


class Refused(NamedTuple):
    """A run cannot go on as it was asked to."""

    reason: str
    """The predicate of a sentence about the run."""


def next_state(state: ServerState, options: TrainingOptions, asked: Collection[str]) -> Finished | TrainOn | Refused:
    """Return how a run goes on from a checkpoint, and its state from there.

    A run whose training has ended trains more rounds only if it is asked to, or was by a resume that was killed.
    From a ``done`` state, which ``post_train`` has changed, it needs the checkpoint before that.

    :param options: the run's options by now.
    :param asked: the names of those that were given anew, with other values or the same.
    """
    if "rounds" in asked and options.rounds < state.round:
        return Refused(f"has had {state.round} rounds already, more than --rounds {options.rounds}")
    more = state.round < options.rounds
    if state.phase == "train":
        return TrainOn(state) if more else Finished(replace(state, phase="post_train"))
    if more and out_of_patience(options, state):
        note = (
            f"no round is trained: --patience {options.patience} ended the run after round {state.round}; to go on, "
            "add a larger --patience"
        )
        return Finished(state, note if "rounds" in asked else "")
    was_extended = state.phase == "post_train" and not state.stopped
    if more and (was_extended or {"rounds", "patience"} & {*asked}):
        return TrainOn(replace(state, phase="train", stopped=False))
    return Finished(state)
