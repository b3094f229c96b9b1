"""The working models of trainings that proceed side by side."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch import nn

from fedcore.client import Begin, Memory, Setup, Training, WorkingModel
from fedcore.engines import ClientTask
from fedcore.models import copied


def hooked_parameter(model: nn.Module) -> str:
    """Return a parameter with a hook on its gradient; empty without one."""
    named = model.named_parameters()
    return next((name for name, p in named if p._backward_hooks or p._post_accumulate_grad_hooks), "")


class Places:
    """The working models of a runtime, one for each training that is under way. They are made when they are needed.

    :param memory: makes the tensors that the clients of a working model use in turn.
    """

    def __init__(self, setup: Setup, memory: Callable[[], Memory]) -> None:
        self._setup, self._memory = setup, memory
        self._initial = copied(setup.model)  # the first working model trains the model of the set-up itself
        self.models = [WorkingModel(setup, memory())]

    def trainings(self, tasks: Sequence[ClientTask], begin: Begin) -> Iterator[tuple[int, Training]]:
        """Yield the number of each task and its training, with a working model that no unfinished one has.

        A training takes its place when the caller asks for it. Clients with and without a previous model do not have
        like steps, so they are not mixed.
        """
        busy: set[int] = set()

        def training(place: int, task: ClientTask) -> Training:
            try:
                return (yield from begin(task, self.models[place]))
            finally:
                busy.discard(place)

        for number in sorted(range(len(tasks)), key=lambda number: tasks[number].version is None):
            place = next(place for place in itertools.count() if place not in busy)
            if place == len(self.models):
                further = replace(self._setup, model=copied(self._initial))
                self.models.append(WorkingModel(further, self._memory()))
            busy.add(place)
            yield number, training(place, tasks[number])
