"""Two installed methods: they run together, or are refused before anything is written, with the reason."""

from __future__ import annotations

from importlib.metadata import entry_points
from itertools import combinations, pairwise

import pytest
import torch

import fedcore
from fedcore import RunConfig
from fedcore.base.errors import ConfigError, PluginConflictError
from fedcore.base.serial import read_tensors
from fedcore.client.setup import Setup
from fedcore.data import load_dataset, with_public
from fedcore.hooks.checks import create_plugin
from fedcore.hooks.declarations import refuse_together
from fedcore.runs.directory import RunDirectory
from fedcore_testing import same_tensors
from tests.support import in_one_test

NAMES = sorted({point.name for point in entry_points(group="fedcore.plugins")} - {"fedavg"})
PAIRS = list(combinations(NAMES, 2))
# Each method with the next one by name; all pairs are in the slow set, of which a sample is trained.
NEIGHBOURS = list(pairwise(NAMES))
SAMPLE = PAIRS[::20]
EXAMPLES = [
    ("fedavgm", "fedcd"),
    ("fedavgm", "fednova"),
    ("fedavgm", "moon"),
    ("fedcme", "fednova"),
    ("fedpac", "topk"),  # a straggler trains its own head only, and has nothing to encode
    ("fednova", "fedprox"),
    ("fedproc", "fedsam"),  # a second pass, next to a note that is a received tensor
    ("fedproc", "moon"),
]
# Where a last bit may not grow: feddecorr's other form divides by deviations near 0 at 60 times this strength, and
# 100 steps of Adam amplify it.
REPEATABLE = {
    "dp": {"seed_noise": True},
    "dp-sgd": {"seed_noise": True},
    "feddecorr": {"form": "paper"},
    "feddf": {"steps": 10},
}
ORDERS = [("fedbuff", "norm-clip"), ("lora", "moon")]
# Two local epochs: one has no middle, in which FedCME would exchange.
RUN = {
    "public": "0.1",
    "model": "mlp",
    "workers": 0,
    "device": "cpu",
    "clients": 4,
    "rounds": 2,
    "local_epochs": 2,
    "batch_size": 64,
}
STRAGGLERS = {"system": {"stragglers": 0.5}}
"""About half of the clients complete one epoch. Without FedCME: who leaves before its exchange is lost."""


def config(names, **options) -> RunConfig:
    return RunConfig(**{**RUN, **options}, plugins={name: {} for name in names})


def refusal(names, dataset) -> ConfigError | None:
    """Return why the start-up refuses these plugins, or None; anything else it raises goes through."""
    try:
        Setup.build(config(names), dataset)
    except ConfigError as error:
        return error
    return None


@pytest.fixture(scope="module")
def digits():
    return with_public(load_dataset("digits", None), RUN["public"], 0, None)


def check_pair(names, digits, tmp_path):
    """Run the pair in an order that starts, with stragglers, or see that the run is refused as the start-up was."""
    out = tmp_path / "run"
    orders = [names, names[::-1]]
    order = next((order for order in orders if refusal(order, digits) is None), None)
    if order is None:
        with pytest.raises(ConfigError) as raised:
            fedcore.run(config(names, out=out))
        assert str(raised.value) == str(refusal(names, digits))
        assert not out.exists(), "refused before anything is written"
        return
    try:
        stragglers = {} if {"fedcme", "centralised"} & {*names} else STRAGGLERS  # which these two refuse
        result = fedcore.run(config(order, out=out, **stragglers))
    except PluginConflictError:  # found in the first step: a term on parameters of which none is shared
        assert not out.exists()
        return
    records = RunDirectory(result.directory).metrics.read()
    trained = [record for record in records if "cohort" in record]  # a correction after the training adds a record
    accepted = 1 if "centralised" in names else RUN["clients"]
    assert [record["accepted"] for record in trained] == [accepted] * RUN["rounds"]
    assert all(record["failures"] == [] for record in records)
    tensors = read_tensors(result.directory / "model.safetensors")[0]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())


def check_refusals(names, digits):
    """A refusal names both and the reason, or another order: ``configure_model`` works in the user's order."""
    refusals = [error for error in (refusal(names, digits), refusal(names[::-1], digits)) if error is not None]
    explained = []
    for error in refusals:
        text = str(error)
        both = all(repr(name) in text for name in names)
        assert both or "list the plugin that" in text, text
        if both:
            assert len(text.partition(": ")[2]) > 10, "a reason after the names"
            explained.append(text)
    assert explained or len(refusals) < 2, "no order starts, and no message says why"


@in_one_test(names=NEIGHBOURS)
def test_some_pairs_start_or_are_refused_with_the_reason(names, digits):
    check_refusals(names, digits)


@pytest.mark.slow
@in_one_test(names=PAIRS)
def test_every_pair_starts_or_is_refused_with_the_reason(names, digits):
    check_refusals(names, digits)


def test_what_declarations_refuse_is_refused_with_both_names():
    """Of all pairs; tests/hooks/test_declarations.py has every two declarations."""
    made = {name: create_plugin(name, {}) for name in NAMES}
    refused = {}
    for pair in PAIRS:
        try:
            refuse_together(*(made[name] for name in pair))
        except PluginConflictError as error:
            refused[pair] = str(error)
    assert 0 < len(refused) < len(PAIRS)
    assert [text for pair, text in refused.items() if not all(repr(name) in text for name in pair)] == []


@in_one_test(name=NAMES)
def test_every_method_starts_alone(name, digits):
    assert refusal([name], digits) is None


@pytest.mark.parametrize("name", ["ditto", "fedala", "fedbabu", "fedrod", "fltrust", "ifca", "per-fedavg"])
def test_no_other_model_ignores_a_task_loss(name, digits):
    """Each of them trains, adapts or chooses a model by cross-entropy of its own."""
    for names in ([name, "fedlc"], ["fedlc", name]):
        error = refusal(names, digits)
        assert isinstance(error, PluginConflictError)
        assert all(repr(each) in str(error) for each in names)
        assert "task loss" in str(error) or "task_loss" in str(error)


@pytest.mark.parametrize("names", EXAMPLES, ids="+".join)
def test_some_pairs_run_or_are_refused(names, digits, tmp_path):
    missing = set(names) - set(NAMES)
    if missing:
        pytest.skip(f"not installed: {', '.join(sorted(missing))}")
    check_pair(names, digits, tmp_path)


@pytest.mark.parametrize("names", ORDERS, ids="+".join)
def test_some_pairs_give_the_same_model_in_both_orders(names, tmp_path):
    if missing := set(names) - set(NAMES):
        pytest.skip(f"not installed: {', '.join(sorted(missing))}")
    one, other = (model_of({name: {} for name in order}, tmp_path / order[0]) for order in (names, names[::-1]))
    assert same_tensors(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("names", SAMPLE, ids="+".join)
def test_a_sample_of_pairs_runs_or_is_refused(names, digits, tmp_path):
    check_pair(names, digits, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(NAMES) - {"topk"}))
def test_a_compressor_that_leaves_one_entry_out_changes_next_to_nothing(name, digits, tmp_path):
    """What it loses beside another method, such as parameters that one freezes and changes afterwards, shows here."""
    options = {name: REPEATABLE.get(name, {}), "topk": {"fraction": 0.9999}}
    orders = [[name, "topk"], ["topk", name]]
    order = next((order for order in orders if refusal(order, digits) is None), None)
    if order is None:
        pytest.skip("refused, with the reason: see above")
    both = model_of({plugin: options[plugin] for plugin in order}, tmp_path / "both")
    for tensor_name, tensor in model_of({name: options[name]}, tmp_path / "alone").items():
        torch.testing.assert_close(both[tensor_name], tensor, rtol=0, atol=1e-5)


def model_of(plugins, out):
    """Return the tensors of the final model of a run with these plugins and options."""
    result = fedcore.run(RunConfig(**RUN, plugins=plugins, out=out))
    return read_tensors(result.directory / "model.safetensors")[0]
