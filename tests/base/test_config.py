"""Options that are checked, and the learning rate of each round against torch's schedulers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torchs

from fedcore import ConfigError, RunConfig, Section, UnknownNameError
from fedcore.base.config import DataOptions, FederationOptions, RecordOptions, TrainingOptions
from tests.sentences import raises


def rates(**options):
    config = RunConfig(lr=0.3, rounds=8, **options)
    return [config.learning_rate(number) for number in range(8)]


def reference(make):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler, found = make(optimizer), []
    for _ in range(8):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("options", "make"),
    [
        ({"lr_decay": 0.9}, lambda o: torchs.ExponentialLR(o, 0.9)),
        ({"lr_schedule": "cosine"}, lambda o: torchs.CosineAnnealingLR(o, 8)),
        ({"lr_schedule": "step", "lr_step_rounds": 3, "lr_step_factor": 0.5}, lambda o: torchs.StepLR(o, 3, 0.5)),
        ({"warmup_rounds": 3}, lambda o: torchs.LinearLR(o, 0.25, 1.0, total_iters=3)),
        (
            {"warmup_rounds": 3, "lr_schedule": "cosine"},
            lambda o: torchs.SequentialLR(
                o, [torchs.LinearLR(o, 0.25, 1.0, total_iters=3), torchs.CosineAnnealingLR(o, 5)], [3]
            ),
        ),
    ],
    ids=["decay", "cosine", "step", "warm-up", "warm-up and cosine"],
)
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_rates_are_those_of_torchs_schedulers(options, make):
    assert rates(**options) == pytest.approx(reference(make), rel=1e-12)


def test_the_default_keeps_its_bits():
    assert rates(lr_decay=0.97) == [0.3 * 0.97**number for number in range(8)]


def test_a_warm_up_is_shorter_than_the_run():
    with raises(ConfigError, "3"):
        RunConfig.create({"rounds": 3, "warmup_rounds": 3})


def test_an_unknown_option_names_the_one_that_was_meant():
    for make in (lambda: RunConfig(round=3), lambda: RunConfig.create({"round": 3})):
        with raises(UnknownNameError, "'round'", "'rounds'"):
            make()


@pytest.mark.parametrize("name", ["a b", "-a", "a/b", "../a", "", "a" * 51, ".a", "a\n"])
def test_a_name_and_a_tag_are_words(name):
    for labels in ({"name": name}, {"tags": ["fine", name]}):
        with raises(ConfigError, "1", "50"):
            RunConfig.create(labels)


def test_tags_are_a_list_without_repetitions():
    assert RunConfig(tags=["b", "a", "b"]).tags == ["b", "a"]
    assert RunConfig.create({"tags": "größe=2"}).tags == ["größe=2"]
    with raises(ConfigError, "--tag", "50"):
        RunConfig.create({"tags": [str(number) for number in range(51)]})
    with raises(ConfigError, "--note", "2000"):
        RunConfig.create({"note": "a" * 2001})


def test_the_folder_of_data_is_the_same_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = RunConfig(data_dir="data")
    monkeypatch.chdir("/")
    assert RunConfig(**config.model_dump(mode="json")).data_dir == tmp_path / "data"


def test_each_option_is_in_one_section() -> None:
    sections = RunConfig.__bases__
    names = [name for section in reversed(sections) for name in section.model_fields]
    assert names == list(RunConfig.model_fields)


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        (TrainingOptions, {"momentum": 1.0}, "less than 1"),
        (FederationOptions, {"adapt_epochs": 1}, "adapt_epochs is for clients that never train"),
        (RecordOptions, {"name": "a b"}, "a name has 1 to 50 letters"),
        (DataOptions, {"rounds": 2}, "unknown option 'rounds'"),
    ],
)
def test_a_section_has_its_own_rules(section: type[Section], values: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, ConfigError), match=words):
        section.model_validate(values)


def test_the_names_of_objects_in_a_configuration() -> None:
    config = RunConfig.create(
        {"dataset": "d", "client_models": "a,b", "public": "p", "metrics": ["m"], "plugins": ["x"]}
    )
    assert config.names() == ["x", "d", "auto", "auto", "a", "b", "dirichlet", "p", "local", "m"]
