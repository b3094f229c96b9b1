"""What tools are written with: packages that read, compare, show or follow runs, or add commands.

- A run directory: ``RunFiles`` reads configuration, records and summary without torch, ``RunDirectory`` also the
  checkpoints and the model. ``Run.open`` loads data set and plugins, too. ``rounds`` has the figures of a round's
  record.
- Two runs: ``settings`` and ``digest`` say whether they must have the same results. ``WITHOUT_EFFECT``, ``CHANGEABLE``,
  ``PARTITION_OPTIONS`` and ``LABELS`` say what each option determines.
- Figures: ``PROTOCOLS`` has the evaluation protocols with their titles, ``SIGNS`` says of which figures more is better.
- A command: ``options`` declares flags, ``output`` prints, ``build_config`` combines preset, file and flags.
- A display: ``Progress`` follows a run by its events; ``Display`` prints its notes on a terminal.
- A run with an engine of its own: ``resolve_config``, then ``Run.new`` or ``Run.open``, in the block ``training``, and
  ``show_summary``. ``code_in`` names the code that a configuration imports.
- Names: ``available`` and ``resolve`` find what packages provide; ``unknown_option`` is the error about another one.

``options``, ``output`` and ``rounds`` are modules. All names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedcore.base.lazy import lazy as lazy

if TYPE_CHECKING:
    from fedcore.base import output as output
    from fedcore.base.config import public_share as public_share
    from fedcore.base.errors import nearest as nearest
    from fedcore.base.files import parse_json as parse_json
    from fedcore.base.files import storing as storing
    from fedcore.base.files import write_json as write_json
    from fedcore.base.files import write_text as write_text
    from fedcore.base.identity import CHANGEABLE as CHANGEABLE
    from fedcore.base.identity import LABELS as LABELS
    from fedcore.base.identity import PARTITION_OPTIONS as PARTITION_OPTIONS
    from fedcore.base.identity import WITHOUT_EFFECT as WITHOUT_EFFECT
    from fedcore.base.identity import digest as digest
    from fedcore.base.identity import flat as flat
    from fedcore.base.identity import method as method
    from fedcore.base.identity import preset_options as preset_options
    from fedcore.base.identity import settings as settings
    from fedcore.base.identity import short_name as short_name
    from fedcore.base.identity import title as title
    from fedcore.base.process import environment as environment
    from fedcore.base.process import importing as importing
    from fedcore.base.process import one_thread as one_thread
    from fedcore.base.process import python_command as python_command
    from fedcore.base.protocols import EVALUATED as EVALUATED
    from fedcore.base.protocols import PROTOCOLS as PROTOCOLS
    from fedcore.base.protocols import SIGNS as SIGNS
    from fedcore.base.registry import available as available
    from fedcore.base.registry import conflict as conflict
    from fedcore.base.registry import group_of as group_of
    from fedcore.base.registry import package_of as package_of
    from fedcore.base.registry import packages as packages
    from fedcore.base.registry import resolve as resolve
    from fedcore.base.safe_yaml import write_yaml as write_yaml
    from fedcore.base.section import unknown_option as unknown_option
    from fedcore.cli import options as options
    from fedcore.cli.settings import build_config as build_config
    from fedcore.cli.training import show_summary as show_summary
    from fedcore.cli.training import training as training
    from fedcore.hooks.plugin import option_names as option_names
    from fedcore.hooks.plugin import parse_options as parse_options
    from fedcore.runs import rounds as rounds
    from fedcore.runs.directory import RunDirectory as RunDirectory
    from fedcore.runs.progress import Progress as Progress
    from fedcore.runs.provenance import RECORDED as RECORDED
    from fedcore.runs.provenance import installed_versions as installed_versions
    from fedcore.runs.resolve import resolve_config as resolve_config
    from fedcore.runs.run import Run as Run
    from fedcore.runs.saved import RunFiles as RunFiles
    from fedcore.runs.saved import code_in as code_in
    from fedcore.runs.terminal import Display as Display

_attribute, __all__ = lazy(__name__, __file__)


def __getattr__(name: str) -> Any:
    return _attribute(name)


def __dir__() -> list[str]:
    return __all__
