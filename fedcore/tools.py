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
- Many runs: ``PluginSet`` and what ``resolve_`` begins check them before they start; ``started`` takes a run
  round by round; ``check_code`` and ``check_places`` keep what their files name to what a user allows.
- Names: ``available`` and ``resolve`` find what packages provide; ``unknown_option`` is the error about another one.

``options``, ``output``, ``process``, ``protocols`` and ``rounds`` are modules. All names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedcore.base.lazy import lazy as lazy

if TYPE_CHECKING:
    from fedcore.base import output as output
    from fedcore.base import process as process
    from fedcore.base import protocols as protocols
    from fedcore.base.config import Json as Json
    from fedcore.base.config import public_share as public_share
    from fedcore.base.errors import StorageError as StorageError
    from fedcore.base.errors import describe as describe
    from fedcore.base.errors import flag_of as flag_of
    from fedcore.base.errors import nearest as nearest
    from fedcore.base.files import TEMPORARY as TEMPORARY
    from fedcore.base.files import RecordFile as RecordFile
    from fedcore.base.files import parse_json as parse_json
    from fedcore.base.files import parse_record as parse_record
    from fedcore.base.files import refuse_links as refuse_links
    from fedcore.base.files import replacing as replacing
    from fedcore.base.files import storing as storing
    from fedcore.base.files import write_json as write_json
    from fedcore.base.files import write_text as write_text
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
    from fedcore.base.process import environment as environment
    from fedcore.base.process import importing as importing
    from fedcore.base.process import one_thread as one_thread
    from fedcore.base.process import python_command as python_command
    from fedcore.base.protocols import EVALUATED as EVALUATED
    from fedcore.base.protocols import PROTOCOLS as PROTOCOLS
    from fedcore.base.protocols import SIGNS as SIGNS
    from fedcore.base.registry import LENT as LENT
    from fedcore.base.registry import OBJECT as OBJECT
    from fedcore.base.registry import PREFIXED as PREFIXED
    from fedcore.base.registry import Key as Key
    from fedcore.base.registry import available as available
    from fedcore.base.registry import call as call
    from fedcore.base.registry import conflict as conflict
    from fedcore.base.registry import group_of as group_of
    from fedcore.base.registry import how_to_install as how_to_install
    from fedcore.base.registry import import_name as import_name
    from fedcore.base.registry import is_code as is_code
    from fedcore.base.registry import is_lent as is_lent
    from fedcore.base.registry import lent as lent
    from fedcore.base.registry import package_of as package_of
    from fedcore.base.registry import packages as packages
    from fedcore.base.registry import resolve as resolve
    from fedcore.base.safe_yaml import BESIDE_OPTIONS as BESIDE_OPTIONS
    from fedcore.base.safe_yaml import parse_setting as parse_setting
    from fedcore.base.safe_yaml import read_config_file as read_config_file
    from fedcore.base.safe_yaml import read_mapping as read_mapping
    from fedcore.base.safe_yaml import read_yaml as read_yaml
    from fedcore.base.safe_yaml import write_yaml as write_yaml
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
    from fedcore.runs.saved import SOURCE as SOURCE
    from fedcore.runs.saved import RunFiles as RunFiles
    from fedcore.runs.saved import SavedConfig as SavedConfig
    from fedcore.runs.saved import check_code as check_code
    from fedcore.runs.saved import check_places as check_places
    from fedcore.runs.saved import code_in as code_in
    from fedcore.runs.saved import how_to_resume as how_to_resume
    from fedcore.runs.saved import objects_in as objects_in
    from fedcore.runs.saved import partition_digest as partition_digest
    from fedcore.runs.saved import places_in as places_in
    from fedcore.runs.terminal import Display as Display
    from fedcore.runs.training import Experiment as Experiment

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
