"""The options of this package: what they refuse, what ``auto`` stands for, what they say, and what a run records."""

from __future__ import annotations

import pytest
import torch
import yaml

from fedcore import ConfigError, RunConfig, load_run, resume, run
from fedcore.client import OneByOne, Setup, runner_of
from fedcore.data import load_dataset
from fedcore.models import build_model
from fedcore_accelerate import Acceleration, tuning
from fedcore_accelerate.options import options_of
from tests import support
from tests.models.test_placement import IMAGES, Viewed, images
from tests.sentences import raises


def written_config(result):
    return yaml.safe_load((result.directory / "config.yaml").read_text())


@pytest.mark.parametrize(
    ("plugins", "options", "reason"),
    [
        (["fedcme"], {}, "plugin 'fedcme' pauses clients"),
        (["fedamp"], {}, "plugin 'fedamp' sends each client tensors of its own"),
        (["fedsam"], {}, "plugin 'fedsam' changes gradients"),
        (["fedcp"], {}, "the model has buffers"),
        (["moon"], {"local_epochs": 1}, ""),
        ([], {"stack": 1}, ""),
        ([], {"stack": 1, "lanes": 8, "device": "cpu"}, "on the CPU"),
    ],
)
def test_an_option_without_effect_is_noted(plugins, options, reason):
    config = RunConfig.create({"plugins": plugins, "model": "mlp", "stack": 8, **options})
    notes = Acceleration.cautions(options_of(config), Setup.build(config, load_dataset("digits")))
    flag = f"--{'lanes' if 'lanes' in options else 'stack'} 8 has no effect"
    assert [note[: len(flag)] for note in notes] == [flag] * bool(reason)
    assert reason in "".join(notes)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, 50),
        ({"workers": 0}, 50),
        ({"workers": 1}, 50),
        ({"workers": 3}, 34),
        ({"workers": 5}, 20),
        ({"clients": 150}, 38),  # two for each worker: three of 50 would keep one waiting
        ({"clients": 1000}, 50),
        ({"workers": 16}, 1),  # fewer than 12 for each worker
        ({"participation": 0.1}, 1),
        ({"model": "fdcl-cnn"}, 1),
        ({"plugins": ["fedcme"]}, 1),
        ({"plugins": ["fedsam"]}, 1),
        ({"plugins": ["fedcp"]}, 1),
        ({"precision": "bf16"}, 1),
        ({"client_timeout": 5.0}, 1),
        ({"client_models": ["mlp", "mlp"]}, 1),
        ({"lanes": 2}, 1),  # without effect on a CPU, but no configuration has both
    ],
)
def test_auto_stacks_where_it_is_faster(options, size):
    config = RunConfig.create(
        {"clients": 100, "model": "mlp", "workers": 2, "stack": "auto", "device": "cpu", **options}
    )
    digits = load_dataset("digits")
    assert Acceleration.settled(options_of(config), Setup.build(config, digits), digits) == {"stack": size}


def test_a_run_records_the_stack_that_auto_stands_for(tmp_path):
    options = {"clients": 24, "rounds": 1, "workers": 0, "stack": "auto", "partition": "iid", "out": tmp_path / "run"}
    result = run(**options)
    assert load_run(result.directory).config.stack == 24
    again = run(**{**options, "stack": 24, "out": tmp_path / "again"})
    assert support.lines(result)[0]["losses"] == support.lines(again)[0]["losses"]


def test_limits_on_single_clients_are_refused():
    with raises(ConfigError, "client_timeout"):
        RunConfig.create({"stack": 8, "client_timeout": 5.0})


@pytest.mark.parametrize("stack", ["2000", "all", 0])
def test_a_stack_out_of_bounds_is_one_problem(stack):
    with raises(ConfigError, "--stack", 1, 1024, "auto", str(stack)) as refused:
        RunConfig.create({"stack": stack})
    assert "\n" not in str(refused.value)


def test_all_problems_are_in_one_message():
    with raises(ConfigError, "--lr", "--lanes", "64"):
        RunConfig.create({"lanes": 65, "lr": -1.0})


def test_config_yaml_holds_what_is_not_at_its_default(tmp_path):
    options = {"clients": 2, "rounds": 1, "local_epochs": 1, "workers": 0, "device": "cpu", "out": tmp_path / "run"}
    result = run(**options, capture=False, progress=False)
    written = written_config(result)
    assert {name: written[name] for name in Acceleration.model_fields.keys() & written} == {"capture": False}
    longer = resume(result.directory, changes={"rounds": 2, "lanes": 3}, progress=False)
    assert (longer.config.lanes, longer.config.capture, longer.config.stack) == (3, False, 1)
    (change,) = written_config(result)["changes"]
    assert (change["rounds"], change["lanes"]) == ([1, 2], [1, 3])
    again = resume(result.directory, changes={"rounds": 2, "lanes": 1}, progress=False)
    assert again.config.lanes == 1


@pytest.mark.parametrize("faster", ["contiguous", "channels_last"])
def test_autotune_takes_the_faster_format_and_records_it(go, monkeypatch, faster):
    times = {name: 1.0 if name == faster else 2.0 for name in tuning.FORMATS}
    monkeypatch.setattr(tuning, "measure", lambda *_: times)
    result = go(**IMAGES, autotune=True)
    assert written_config(result)["memory_format"] == faster


def test_autotune_measures_both_formats_and_leaves_the_model_alone(monkeypatch):
    monkeypatch.setattr(tuning, "TURNS", 2)
    before = build_model("simple-cnn", num_classes=4, input_shape=(3, 16, 16), seed=0, projection=False)[0]
    state = {name: tensor.clone() for name, tensor in before.state_dict().items()}
    seconds = tuning.measure(RunConfig(device="cpu"), before, images())
    assert set(seconds) == {"contiguous", "channels_last"}
    assert all(0 < value < float("inf") for value in seconds.values())
    assert all(torch.equal(tensor, state[name]) for name, tensor in before.state_dict().items())


@pytest.mark.parametrize("options", [{"memory_format": "contiguous"}, {"model": "mlp"}])
def test_autotune_leaves_a_choice_and_what_has_none(go, monkeypatch, options):
    monkeypatch.setattr(tuning, "measure", lambda *_: pytest.fail("nothing to measure"))
    result = go(**{**IMAGES, **options}, autotune=True)
    assert written_config(result)["memory_format"] == options.get("memory_format", "auto")


def test_autotune_leaves_a_network_that_takes_one_format(go):
    assert go(model=Viewed, dataset=IMAGES["dataset"], autotune=True).config.memory_format == "auto"


def test_a_trial_takes_each_step_by_itself(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr("fedcore.client.runtime.runner_of", lambda *given: made.append(runner_of(*given)) or made[-1])
    result = run(clients=30, stack=25, autotune=True, model="simple-cnn", fast_dev_run=True, progress=False)
    assert result.config.memory_format == "auto"  # nothing was measured
    assert [type(runner) for runner in made] == [OneByOne]
