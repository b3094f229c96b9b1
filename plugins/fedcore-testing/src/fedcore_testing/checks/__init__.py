"""The checks of the conformance kit, each a plain function of a plugin's class or name."""

from fedcore_testing.checks import contract, hooks, runs, runners, edges  # noqa: I001 - the order in which they run
from fedcore_testing.checks.base import CHECKS, Check, CheckFailed, NotApplicable
from fedcore_testing.checks.runners import the_same_as_one_by_one

__all__ = [
    "CHECKS",
    "Check",
    "CheckFailed",
    "NotApplicable",
    "contract",
    "edges",
    "hooks",
    "runners",
    "runs",
    "the_same_as_one_by_one",
]
