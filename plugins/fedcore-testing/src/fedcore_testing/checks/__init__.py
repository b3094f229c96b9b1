"""The checks of the conformance kit, each a plain function of a plugin's class or name."""

from fedcore_testing.checks import contract, hooks, runs, edges  # noqa: I001 - the order in which they run
from fedcore_testing.checks.base import CHECKS, Check, CheckFailed, NotApplicable

__all__ = ["CHECKS", "Check", "CheckFailed", "NotApplicable", "contract", "edges", "hooks", "runs"]
