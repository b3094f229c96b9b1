"""Which runs are the same to sweeps and comparisons."""

from __future__ import annotations

from fedcore import RunConfig
from fedcore.base.identity import digest


def test_runs_of_the_same_results_have_the_same_digest():
    one = RunConfig(plugins={"moon": {}}, lr=0.1)
    assert digest(one) == digest(RunConfig(lr=0.1, plugins={"fedavg": {}, "moon": {}}, workers=3, out="elsewhere"))
    assert digest(one) == digest(one.model_copy(update={"name": "first", "tags": ["a"], "note": "seen"}))
    others = [RunConfig(plugins={"moon": {}}), one.model_copy(update={"seed": 1}), RunConfig(lr=0.1)]
    assert len({digest(config) for config in (one, *others)}) == 4


def test_an_option_at_its_default_does_not_count():
    """Sweeps that started before there was the option find their runs again."""
    assert digest(RunConfig(local_steps=None)) == digest(RunConfig()) == "44136fa355b3"
    assert digest(RunConfig(local_steps=5)) != digest(RunConfig())
