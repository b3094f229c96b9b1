"""What packages that draw, print or repeat studies use of this one: records, comparisons, tables, sweeps, words.

All names are imported on first use: commands answer ``--help`` without what they need to run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedcore.tools import lazy

if TYPE_CHECKING:
    from fedcore_study.cli.shared import SWEEP_PANEL as SWEEP_PANEL
    from fedcore_study.cli.shared import TABLE_FORMATS as TABLE_FORMATS
    from fedcore_study.cli.shared import Baseline as Baseline
    from fedcore_study.cli.shared import By as By
    from fedcore_study.cli.shared import Labels as Labels
    from fedcore_study.cli.shared import Parallel as Parallel
    from fedcore_study.cli.shared import Reported as Reported
    from fedcore_study.cli.shared import Runs as Runs
    from fedcore_study.cli.shared import Tuned as Tuned
    from fedcore_study.cli.shared import labels_of as labels_of
    from fedcore_study.cli.shared import print_table as print_table
    from fedcore_study.cli.sweep_display import SweepDisplay as SweepDisplay
    from fedcore_study.comparisons.blocks import block_of as block_of
    from fedcore_study.comparisons.blocks import pairs as pairs
    from fedcore_study.comparisons.blocks import ranks_of as ranks_of
    from fedcore_study.comparisons.compare import check_reported as check_reported
    from fedcore_study.comparisons.compare import compare_runs as compare_runs
    from fedcore_study.comparisons.comparison import BASELINE as BASELINE
    from fedcore_study.comparisons.comparison import Comparison as Comparison
    from fedcore_study.comparisons.costs import seconds_per_round as seconds_per_round
    from fedcore_study.comparisons.costs import timed_rounds as timed_rounds
    from fedcore_study.comparisons.figures import FEW as FEW
    from fedcore_study.comparisons.figures import Difference as Difference
    from fedcore_study.comparisons.figures import Figure as Figure
    from fedcore_study.comparisons.figures import paired_difference as paired_difference
    from fedcore_study.comparisons.formats import as_latex as as_latex
    from fedcore_study.comparisons.formats import best_rows as best_rows
    from fedcore_study.comparisons.formats import client_columns as client_columns
    from fedcore_study.comparisons.formats import each_client as each_client
    from fedcore_study.comparisons.formats import plain_rows as plain_rows
    from fedcore_study.comparisons.formats import side_by_side as side_by_side
    from fedcore_study.comparisons.formats import spread as spread
    from fedcore_study.comparisons.groups import Group as Group
    from fedcore_study.comparisons.groups import by_seed as by_seed
    from fedcore_study.comparisons.groups import distinct as distinct
    from fedcore_study.comparisons.groups import group_runs as group_runs
    from fedcore_study.comparisons.groups import option as option
    from fedcore_study.comparisons.groups import relabelled as relabelled
    from fedcore_study.comparisons.groups import uses_alpha as uses_alpha
    from fedcore_study.comparisons.measures import ACCURACY as ACCURACY
    from fedcore_study.comparisons.measures import Measure as Measure
    from fedcore_study.comparisons.records import RunRecord as RunRecord
    from fedcore_study.comparisons.records import Warn as Warn
    from fedcore_study.comparisons.records import find_runs as find_runs
    from fedcore_study.comparisons.records import read_run as read_run
    from fedcore_study.comparisons.records import with_global_model as with_global_model
    from fedcore_study.comparisons.significance import Ranks as Ranks
    from fedcore_study.comparisons.tuned import tuned_runs as tuned_runs
    from fedcore_study.lenient import list_in as list_in
    from fedcore_study.lenient import mapping_in as mapping_in
    from fedcore_study.lenient import number as number
    from fedcore_study.studies import StudiedRuns as StudiedRuns
    from fedcore_study.studies import listed_runs as listed_runs
    from fedcore_study.studies import run_folders as run_folders
    from fedcore_study.sweeps.directory import SweepDirectory as SweepDirectory
    from fedcore_study.sweeps.processes import Listener as Listener
    from fedcore_study.sweeps.run import default_parallel as default_parallel
    from fedcore_study.sweeps.run import resolved as resolved
    from fedcore_study.sweeps.run import run_sweep as run_sweep
    from fedcore_study.sweeps.spec import SweepSpec as SweepSpec
    from fedcore_study.sweeps.spec import axis_name as axis_name
    from fedcore_study.tables import Table as Table
    from fedcore_study.tables import csv_of as csv_of
    from fedcore_study.tables import csv_text as csv_text
    from fedcore_study.tables import latex_comment as latex_comment
    from fedcore_study.tables import markdown_text as markdown_text
    from fedcore_study.words import by_value as by_value
    from fedcore_study.words import counted as counted
    from fedcore_study.words import joined as joined
    from fedcore_study.words import named as named
    from fedcore_study.words import shown as shown

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
