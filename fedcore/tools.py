"""What tools are written with: packages that read, compare, show or follow runs, or add commands.

- A run directory: ``RunFiles`` reads configuration, records and summary without torch, ``RunDirectory`` also the
  checkpoints and the model. ``Run.open`` loads data set and plugins, too. ``rounds`` has the figures of a round's
  record, ``saved`` what config.yaml binds and what users permit.
- Two runs: ``settings`` and ``digest`` say whether they must have the same results. ``WITHOUT_EFFECT``, ``CHANGEABLE``,
  ``PARTITION_OPTIONS`` and ``LABELS`` say what each option determines.
- Figures: ``PROTOCOLS`` has the evaluation protocols with their titles; ``protocols`` has more about them, such as of
  which figures more is better.
- A command: ``options`` declares flags, ``output`` prints, ``build_config`` combines preset, file and flags.
- A display: ``Progress`` follows a run by its events; ``Display`` prints its notes on a terminal.
- A run with an engine of its own: ``resolve_config``, then ``Run.new`` or ``Run.open``, in the block ``training``, and
  ``show_summary``. ``code_in`` names the code that a configuration imports.
- Many runs: ``PluginSet`` and what ``resolve_`` begins check them before they start; ``started`` takes a run
  round by round.
- Names: ``registry`` finds what packages provide, and objects that a program lends; ``unknown_option`` is the error
  about an option that is not there.
- Files and processes: ``files`` writes whole files and reads records, ``safe_yaml`` reads YAML without objects,
  ``process`` starts Python and computes with one thread.

``files``, ``options``, ``output``, ``process``, ``protocols``, ``registry``, ``rounds``, ``safe_yaml`` and ``saved``
are modules. All names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedcore.base.lazy import lazy as lazy

if TYPE_CHECKING:
    from fedcore.base import files as files
    from fedcore.base import output as output
    from fedcore.base import process as process
    from fedcore.base import protocols as protocols
    from fedcore.base import registry as registry
    from fedcore.base import safe_yaml as safe_yaml
    from fedcore.base.config import Json as Json
    from fedcore.base.config import public_share as public_share
    from fedcore.base.errors import StorageError as StorageError
    from fedcore.base.errors import describe as describe
    from fedcore.base.errors import flag_of as flag_of
    from fedcore.base.errors import nearest as nearest
    from fedcore.base.identity import CHANGEABLE as CHANGEABLE
    from fedcore.base.identity import LABELS as LABELS
    from fedcore.base.identity import PARTITION_OPTIONS as PARTITION_OPTIONS
    from fedcore.base.identity import WITHOUT_EFFECT as WITHOUT_EFFECT
    from fedcore.base.identity import digest as digest
    from fedcore.base.identity import flat as flat
    from fedcore.base.identity import full_name as full_name
    from fedcore.base.identity import judged_by as judged_by
    from fedcore.base.identity import key as key
    from fedcore.base.identity import method as method
    from fedcore.base.identity import preset_options as preset_options
    from fedcore.base.identity import settings as settings
    from fedcore.base.identity import short_name as short_name
    from fedcore.base.identity import title as title
    from fedcore.base.protocols import PROTOCOLS as PROTOCOLS
    from fedcore.base.section import Kind as Kind
    from fedcore.base.section import unknown_option as unknown_option
    from fedcore.cli import options as options
    from fedcore.cli.app import app as app
    from fedcore.cli.guard import INTERRUPTED as INTERRUPTED
    from fedcore.cli.guard import SOME_FAILED as SOME_FAILED
    from fedcore.cli.settings import build_config as build_config
    from fedcore.cli.settings import typed_code as typed_code
    from fedcore.cli.training import show_summary as show_summary
    from fedcore.cli.training import training as training
    from fedcore.hooks.plugin import option_names as option_names
    from fedcore.hooks.plugin import parse_options as parse_options
    from fedcore.hooks.plugins import PluginSet as PluginSet
    from fedcore.runs import rounds as rounds
    from fedcore.runs import saved as saved
    from fedcore.runs.api import started as started
    from fedcore.runs.directory import RunDirectory as RunDirectory
    from fedcore.runs.evaluation import evaluation_tasks as evaluation_tasks
    from fedcore.runs.objects import name_objects as name_objects
    from fedcore.runs.progress import Progress as Progress
    from fedcore.runs.provenance import RECORDED as RECORDED
    from fedcore.runs.provenance import installed_versions as installed_versions
    from fedcore.runs.resolve import plugin_options as plugin_options
    from fedcore.runs.resolve import resolve_config as resolve_config
    from fedcore.runs.resolve import resolve_partition as resolve_partition
    from fedcore.runs.resolve import resolve_trackers as resolve_trackers
    from fedcore.runs.run import Run as Run
    from fedcore.runs.saved import RunFiles as RunFiles
    from fedcore.runs.saved import code_in as code_in
    from fedcore.runs.terminal import Display as Display
    from fedcore.runs.training import Experiment as Experiment

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
