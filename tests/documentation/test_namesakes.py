"""Every module of fedcore has a test file of its name, or an entry below: which one tests it, or why none does."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TESTED_BY = {
    "behaviour/test_hostile_updates.py": ["server/validation.py"],
    "data/test_partitioners.py": ["data/owners.py"],
    "cli/test_commands.py": [
        "cli/__main__.py",
        "cli/app.py",
        "cli/data.py",
        "cli/output.py",
        "cli/plugin_card.py",
        "cli/plugins.py",
        "cli/summary.py",
        "cli/training.py",
    ],
    "cli/test_errors.py": ["cli/guard.py"],
    "cli/test_export.py": ["runs/card.py", "runs/export.py"],
    "cli/test_flags.py": [
        "base/system_options.py",
        "base/validation_errors.py",
        "cli/fields.py",
        "cli/options.py",
        "cli/settings.py",
    ],
    "client/test_batches.py": ["client/loop.py"],
    "client/test_context.py": ["client/mean_gradients.py"],
    "client/test_starts.py": ["client/plugin_results.py"],
    "data/test_datasets.py": ["data/official_files.py", "data/split.py"],
    "data/test_index_lists.py": ["data/picture.py"],
    "data/test_other_samples.py": [
        "client/worker_spec.py",
        "data/rows.py",
        "data/sequences.py",
    ],
    "engines/test_channel.py": ["engines/frames.py"],
    "engines/test_local.py": ["engines/serving.py"],
    "functional/test_prototypes.py": ["hooks/prototype_exchange.py"],
    "hooks/test_hooks_called.py": ["hooks/hookspecs.py"],
    "hooks/test_objective.py": ["client/objective.py"],
    "hooks/test_plugin.py": [
        "base/errors.py",
        "hooks/fedavg.py",
        "server/context.py",
        "server/plugin_results.py",
    ],
    "hooks/test_plugins.py": ["base/choices.py"],
    "hooks/test_updates.py": ["server/round.py"],
    "models/test_named.py": ["models/weights.py"],
    "models/test_placement.py": ["runs/autotune.py"],
    "reliability/test_bound.py": ["base/identity.py", "data/content.py", "runs/saved.py"],
    "reliability/test_damage.py": ["runs/directory.py"],
    "reliability/test_foreign_files.py": ["runs/trust.py"],
    "reliability/test_watchdog.py": ["engines/worker.py"],
    "runs/test_experiment.py": ["runs/opened.py", "runs/resolve.py", "runs/training.py"],
    "runs/test_given.py": ["base/objects.py", "models/build.py", "runs/notebook.py"],
    "runs/test_result.py": ["runs/learning_curve.py", "runs/records.py"],
    "runs/test_start.py": ["storage/config_file.py"],
    "runs/trackers/test_tracking.py": [
        "runs/trackers/base.py",
        "runs/trackers/following.py",
        "runs/trackers/memory.py",
        "runs/trackers/process.py",
        "runs/trackers/scalars.py",
        "testing/trackers.py",
    ],
    "server/test_system.py": ["runs/participation.py"],
    "testing/test_analytic.py": [
        "testing/federation.py",
        "testing/fixtures.py",
        "testing/stub_plugins.py",
    ],
    "testing/test_engine_contract.py": ["client/runtime.py", "testing/probe.py"],
    "testing/test_fork_server.py": ["testing/forked.py"],
    "testing/test_kit_aggregation.py": ["testing/compare.py"],
    "testing/test_kit.py": [
        "cli/authors.py",
        "testing/bystander.py",
        "testing/checks/base.py",
        "testing/checks/contract.py",
        "testing/checks/edges.py",
        "testing/checks/hooks.py",
        "testing/checks/runs.py",
        "testing/engines.py",
        "testing/fingerprint.py",
        "testing/gradients.py",
        "testing/problems.py",
        "testing/start_watch.py",
        "testing/sync.py",
        "testing/trial.py",
        "testing/findings.py",
        "testing/inspectors.py",
        "testing/sensors.py",
        "testing/watch.py",
    ],
}
"""Test file -> modules that it tests as a user would, through several of them at once."""

WITHOUT = {
    "values without behaviour; types are mypy's": [
        "base/types.py",
        "base/version.py",
        "engines/protocol.py",
        "testing/importable.py",
    ],
}
"""Reason -> modules that no test names."""

MODULES = sorted(
    path.relative_to(ROOT / "fedcore").as_posix()
    for path in (ROOT / "fedcore").rglob("*.py")
    if path.name != "__init__.py" and "templates" not in path.parts
)
EXCEPTIONS = [module for modules in (*TESTED_BY.values(), *WITHOUT.values()) for module in modules]


def namesake(module: str) -> Path:
    place = Path(module)
    return ROOT / "tests" / place.parent / f"test_{place.name}"


@pytest.mark.parametrize("module", MODULES)
def test_a_module_has_its_tests(module: str) -> None:
    expected = namesake(module).relative_to(ROOT)
    assert namesake(module).exists() or module in EXCEPTIONS, f"write {expected}, or say here which file tests {module}"


def test_no_exception_is_made_in_vain() -> None:
    assert len(set(EXCEPTIONS)) == len(EXCEPTIONS)
    assert [module for module in EXCEPTIONS if module not in MODULES] == []
    assert [module for module in EXCEPTIONS if namesake(module).exists()] == []
    assert [file for file in TESTED_BY if not (ROOT / "tests" / file).exists()] == []
