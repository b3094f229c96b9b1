"""What packages that draw, print or repeat studies use of this one: records, comparisons, tables, sweeps, words."""

from __future__ import annotations

from fedcore_study.cli.shared import (
    SWEEP_PANEL,
    TABLE_FORMATS,
    Baseline,
    By,
    Labels,
    Parallel,
    Reported,
    Runs,
    Tuned,
    labels_of,
    print_table,
)
from fedcore_study.cli.sweep_display import SweepDisplay
from fedcore_study.comparisons.comparison import (
    BASELINE,
    Comparison,
    block_of,
    check_reported,
    compare_runs,
    pairs,
    ranks_of,
)
from fedcore_study.comparisons.costs import seconds_per_round, timed_rounds
from fedcore_study.comparisons.figures import FEW, Difference, Figure, paired_difference
from fedcore_study.comparisons.formats import (
    as_latex,
    client_columns,
    plain_rows,
    side_by_side,
    spread,
)
from fedcore_study.comparisons.groups import Group, by_seed, distinct, group_runs, option, relabelled, uses_alpha
from fedcore_study.comparisons.records import RunRecord, Warn, find_runs, read_run, with_global_model
from fedcore_study.comparisons.significance import Ranks
from fedcore_study.comparisons.tuned import tuned_runs
from fedcore_study.lenient import list_in, mapping_in, number
from fedcore_study.studies import StudiedRuns, listed_runs, run_folders
from fedcore_study.sweeps.directory import SweepDirectory
from fedcore_study.sweeps.processes import Listener
from fedcore_study.sweeps.run import default_parallel, resolved, run_sweep
from fedcore_study.sweeps.spec import SweepSpec, axis_name
from fedcore_study.tables import Table, csv_of, csv_text, latex_comment, markdown_text
from fedcore_study.words import by_value, counted, joined, named, without_module

__all__ = [
    "BASELINE",
    "FEW",
    "SWEEP_PANEL",
    "TABLE_FORMATS",
    "Baseline",
    "By",
    "Comparison",
    "Difference",
    "Figure",
    "Group",
    "Labels",
    "Listener",
    "Parallel",
    "Ranks",
    "Reported",
    "RunRecord",
    "Runs",
    "StudiedRuns",
    "SweepDirectory",
    "SweepDisplay",
    "SweepSpec",
    "Table",
    "Tuned",
    "Warn",
    "as_latex",
    "axis_name",
    "block_of",
    "by_seed",
    "by_value",
    "check_reported",
    "client_columns",
    "compare_runs",
    "counted",
    "csv_of",
    "csv_text",
    "default_parallel",
    "distinct",
    "find_runs",
    "group_runs",
    "joined",
    "labels_of",
    "latex_comment",
    "list_in",
    "listed_runs",
    "mapping_in",
    "markdown_text",
    "named",
    "number",
    "option",
    "paired_difference",
    "pairs",
    "plain_rows",
    "print_table",
    "ranks_of",
    "read_run",
    "relabelled",
    "resolved",
    "run_folders",
    "run_sweep",
    "seconds_per_round",
    "side_by_side",
    "spread",
    "timed_rounds",
    "tuned_runs",
    "uses_alpha",
    "with_global_model",
    "without_module",
]
