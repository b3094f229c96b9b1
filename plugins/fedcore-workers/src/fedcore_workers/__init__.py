"""Worker processes on this machine, and what other packages use of them. All names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedcore.tools import lazy

if TYPE_CHECKING:
    from fedcore_workers.dispatch import Dispatcher as Dispatcher
    from fedcore_workers.dispatch import Window as Window
    from fedcore_workers.engine import WorkerEngine as WorkerEngine
    from fedcore_workers.forks import ALLOCATOR as ALLOCATOR
    from fedcore_workers.forks import TEMPLATE as TEMPLATE
    from fedcore_workers.forks import ForkedProcess as ForkedProcess
    from fedcore_workers.forks import Template as Template
    from fedcore_workers.forks import current as current
    from fedcore_workers.forks import early_template as early_template
    from fedcore_workers.forks import template as template

_attribute, __all__ = lazy(__name__, __file__)


def __getattr__(name: str) -> Any:
    return _attribute(name)


def __dir__() -> list[str]:
    return __all__
