"""benchmarks/fdcl_terms.py trains from a run's checkpoint and its terms act as the paper says."""

import runpy
import sys
from pathlib import Path

import pytest

import fedcore
from fedcore.base.process import one_thread

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fdcl_terms.py"


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    options = {"model": "mlp", "clients": 4, "alpha": 0.1, "rounds": 2, "workers": 0}
    plain_sgd = {"momentum": 0.0, "weight_decay": 0.0}
    directory = tmp_path_factory.mktemp("terms") / "run"
    config = fedcore.RunConfig(
        plugins={"fdcl": {"mu": 1.0, "outputs": "logits"}}, **options, **plain_sgd, out=directory
    )
    result = fedcore.run(config)
    lines = []
    with pytest.MonkeyPatch.context() as patch, one_thread():
        patch.setattr(sys, "argv", [str(SCRIPT), str(directory), "--clients", "0", "1", "2", "3"])
        patch.setattr("builtins.print", lambda line, **_: lines.append(line))
        runpy.run_path(str(SCRIPT))["main"]()
    rows = {row.split(" | ")[0].strip("| "): [float(x) for x in row.strip("| ").split(" | ")[1:]] for row in lines[-4:]}
    return result, lines[0], rows


@pytest.mark.slow
def test_it_starts_from_the_last_checkpoint(printed):
    result, first, rows = printed
    assert first == f"after round 2, test accuracy {100 * result.metrics['global']['accuracy']:.2f} %\n"
    assert list(rows) == ["none", "L_e", "L_c", "both"]


def test_the_classifier_term_drives_logits_away_from_the_global_models(printed):
    _, _, rows = printed
    cosine_of_logits = 1
    assert rows["L_c"][cosine_of_logits] < rows["none"][cosine_of_logits]
    assert rows["both"][cosine_of_logits] < rows["L_e"][cosine_of_logits]
