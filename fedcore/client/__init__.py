"""One client: its runtime and sessions, the single loop over local epochs and batches, its messages.

The names below are for runners, and for tests of what hooks read. They are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedcore.base.lazy import lazy

if TYPE_CHECKING:
    from fedcore.base.seeding import global_generators as global_generators
    from fedcore.base.seeding import random_stream as random_stream
    from fedcore.client.context import Batch as Batch
    from fedcore.client.context import BatchStep as BatchStep
    from fedcore.client.context import SessionContext as SessionContext
    from fedcore.client.context import context_of as context_of
    from fedcore.client.evaluation import evaluate as evaluate
    from fedcore.client.evaluation import own_model as own_model
    from fedcore.client.loop import epochs_of as epochs_of
    from fedcore.client.loop import take_step as take_step
    from fedcore.client.objective import require_gradient as require_gradient
    from fedcore.client.objective import total_loss as total_loss
    from fedcore.client.optimizer import Optimizer as Optimizer
    from fedcore.client.runner import Begin as Begin
    from fedcore.client.runner import OneByOne as OneByOne
    from fedcore.client.runner import Runner as Runner
    from fedcore.client.runner import Training as Training
    from fedcore.client.runner import drain as drain
    from fedcore.client.runner import runner_of as runner_of
    from fedcore.client.runtime import CORE as CORE
    from fedcore.client.runtime import Failed as Failed
    from fedcore.client.runtime import begin_local as begin_local
    from fedcore.client.runtime import refuse_edits as refuse_edits
    from fedcore.client.session import LocalSession as LocalSession
    from fedcore.client.session import LocalWork as LocalWork
    from fedcore.client.session import LossTotals as LossTotals
    from fedcore.client.setup import Setup as Setup
    from fedcore.client.working_model import Memory as Memory
    from fedcore.client.working_model import WorkingModel as WorkingModel
    from fedcore.data.client_data import Picked as Picked

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
