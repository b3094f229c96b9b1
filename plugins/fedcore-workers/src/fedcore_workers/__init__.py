"""Worker processes on this machine, and what other packages use of them. All names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedcore.tools import lazy

if TYPE_CHECKING:
    from fedcore_workers.dispatch import Dispatcher as Dispatcher
    from fedcore_workers.dispatch import Window as Window
    from fedcore_workers.engine import WorkerEngine as WorkerEngine
    from fedcore_workers.forks import TEMPLATE as TEMPLATE
    from fedcore_workers.forks import ForkedProcess as ForkedProcess
    from fedcore_workers.forks import Template as Template
    from fedcore_workers.forks import current as current
    from fedcore_workers.forks import die_with_parent as die_with_parent
    from fedcore_workers.forks import early_template as early_template
    from fedcore_workers.forks import template as template
    from fedcore_workers.messages import pack_error as pack_error
    from fedcore_workers.messages import pack_outcome as pack_outcome
    from fedcore_workers.messages import pack_outcomes as pack_outcomes
    from fedcore_workers.messages import pack_shared as pack_shared
    from fedcore_workers.messages import pack_site as pack_site
    from fedcore_workers.messages import pack_task as pack_task
    from fedcore_workers.messages import pack_tasks as pack_tasks
    from fedcore_workers.messages import unpack_error as unpack_error
    from fedcore_workers.messages import unpack_outcome as unpack_outcome
    from fedcore_workers.messages import unpack_outcomes as unpack_outcomes
    from fedcore_workers.messages import unpack_shared as unpack_shared
    from fedcore_workers.messages import unpack_site as unpack_site
    from fedcore_workers.messages import unpack_task as unpack_task
    from fedcore_workers.messages import unpack_tasks as unpack_tasks
    from fedcore_workers.objects import pickled as pickled
    from fedcore_workers.objects import unpickled as unpickled

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
