"""Which methods train which task on the command line, and what is said of the others."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

import fedcore
from fedcore import ConfigError, DataError, RunConfig
from fedcore.data import Dataset, as_dataset
from fedcore_power_of_choice import PowerOfChoice, PowerOfChoiceOptions
from fedcore_qffl import QFedAvg, QFedAvgOptions
from fedcore_tasks import MultiLabel, Regression, Segmentation, Survival
from fedcore_testing import model_bytes
from tests.sentences import raises

DATA = {
    "regression": {"dataset": "digits", "task": "regression"},
    "multilabel": {"dataset": "digit-properties"},
    "survival": {"dataset": "simulated-survival"},
    "survival-discrete": {"dataset": "simulated-survival", "task": "survival-discrete"},
    "segmentation": {"dataset": "digit-shapes", "samples": 120},
}
SMALL = {"clients": 3, "rounds": 2, "local_epochs": 1, "client_test_fraction": 0.2, "workers": 0, "batch_size": 32}
FIGURES = {
    "regression": "rmse",
    "multilabel": "macro-f1",
    "survival": "c-index",
    "survival-discrete": "c-index",
    "segmentation": "dice",
}

NEEDS = ["ccvr", "diagnostics", "fdcl", "fedcd", "fedcme", "feddf", "fedeccr", "fedetf", "fedgen", "fedlc", "fednh"]
NEEDS += ["fedntd", "fedpac", "fedproc", "fedproto", "fedrod", "fedrs", "fedtgp", "fpl", "uscc"]
NEEDS_OPTIONS = {"attack": {"kind": "label-flip"}, "noisy-clients": {"labels": 0.5}}

WORKS = ["attack", "bulyan", "centred-clip", "ditto", "dp", "dp-sgd", "fedadagrad", "fedadam", "fedala", "fedamp"]
WORKS += [
    "fedavgm",
    "fedbabu",
    "fedbn",
    "feddc",
    "feddyn",
    "fednova",
    "fedper",
    "fedprox",
    "fedrep",
    "fedsam",
    "fedyogi",
]
WORKS += ["fltrust", "geometric-median", "ifca", "krum", "lg-fedavg", "local-dp", "lora", "median"]
WORKS += [
    "noisy-clients",
    "norm-clip",
    "per-fedavg",
    "power-of-choice",
    "qffl",
    "qsgd",
    "scaffold",
    "solo",
    "topk",
    "trimmed-mean",
]
OF_ROWS = ["fedcp", "feddecorr", "moon"]  # their features are one vector for each sample
OPTIONS = {
    "dp-sgd": {"passes": "each", "seed_noise": True},
    "dp": {"seed_noise": True},
    "local-dp": {"seed_noise": True},
}
PAIRS = [
    ("fedprox", "scaffold"),
    ("ditto", "topk"),
    ("fedper", "attack"),
    ("feddyn", "norm-clip"),
    ("fedbn", "fedprox"),
]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def train(task, *plugins, **options):
    chosen = [{name: OPTIONS[name]} if isinstance(name, str) and name in OPTIONS else name for name in plugins]
    return fedcore.run(plugins=chosen, progress=False, **{**SMALL, **DATA[task], **options})


@pytest.mark.parametrize("method", [*NEEDS, *NEEDS_OPTIONS])
def test_a_method_that_needs_classes_is_refused_with_both_names(method):
    options = {"public": "0.1"} if method == "feddf" else {}
    with raises(ConfigError, f"'{method}'", "assumes classes", "'regression'"):
        train("regression", {method: NEEDS_OPTIONS[method]} if method in NEEDS_OPTIONS else method, **options)


CASES = [(task, (method,)) for task in DATA for method in (*WORKS, *(OF_ROWS if task != "segmentation" else []))]
CASES += [(task, pair) for task in DATA for pair in PAIRS]


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("task", "methods"), CASES, ids=lambda part: part if isinstance(part, str) else "+".join(part))
def test_a_method_trains_with_every_task(task, methods):
    options = {"public": "0.2"} if "fltrust" in methods else {}
    result = train(task, *methods, **options)
    assert [record["failures"] for record in result.records] == [[]] * 2
    protocol = "global" if result.metrics["global"] else "personal"
    row = result.metrics[protocol]
    assert row[FIGURES[task]] is not None
    assert "accuracy" not in row
    assert np.isfinite(row["loss"])


def test_methods_of_whole_samples_are_refused_for_masks():
    for method in OF_ROWS:
        with pytest.raises(ConfigError, match=method):
            train("segmentation", method)


def test_one_pass_for_all_samples_is_refused_without_classes():
    with raises(ConfigError, "'dp-sgd'", "'regression'", "dp-sgd.passes=each"):
        train("regression", {"dp-sgd": {"seed_noise": True}})


@pytest.mark.parametrize("task", DATA)
def test_neutral_options_and_workers_change_no_bit(task):
    plain = model_bytes(train(task))
    assert model_bytes(train(task, {"fedprox": {"mu": 0.0}})) == plain
    assert model_bytes(train(task, workers=2)) == plain


class Stopped(Exception):
    pass


@pytest.mark.parametrize("task", DATA)
def test_a_run_that_was_stopped_goes_on_and_is_evaluated_again(task):
    options = {"rounds": 3, "keep": "best", "validation_share": 0.5}

    def stop(event, details):
        if event == "round" and details["round"] == 1:
            raise Stopped

    with pytest.raises(Stopped):
        train(task, out="stopped", notify=stop, **options)
    again, whole = fedcore.resume("stopped", progress=False), train(task, **options)
    assert model_bytes(again) == model_bytes(whole)
    assert again.metrics == whole.metrics
    assert fedcore.evaluate_run("stopped")["global"] == again.metrics["global"]
    best, figure = again.summary["metrics"]["best_by_validation"], FIGURES[task]
    values = [line["metrics"]["global_validation"][figure] for line in again.records if "round" in line]
    assert best[f"validation_{figure}"] == (min if figure == "rmse" else max)(values)


def test_other_figures_can_choose():
    best = train("regression", best_by="r2", patience=5).summary["metrics"]["best_by_validation"]
    assert "validation_r2" in best
    with raises(ConfigError, "--best-by", "'worst10'", "loss, rmse, mae, r2, rmse_mean"):
        train("regression", best_by="worst10")


def test_metrics_of_classes_are_refused():
    with raises(ConfigError, "--metric macro-f1", "'regression'", "rmse, mae, r2"):
        train("regression", metrics="macro-f1")


def test_a_long_tail_is_of_classes():
    with raises(ConfigError, "--imbalance", "'regression'"):
        train("regression", imbalance=10)


def test_dirichlet_divides_numbers_by_their_deciles():
    """With a tiny alpha each decile of the targets is nearly at one client; iid gives each client all of them."""
    x, y = np.arange(400, dtype=np.float32)[:, None] / 400, np.arange(400) + 0.5
    spread = {}
    for partition in ("dirichlet", "iid"):
        options = {"partition": partition, "alpha": 0.01, "clients": 4, "rounds": 1, "workers": 0, "progress": False}
        result = fedcore.run(dataset=(x, y, x[:20], y[:20]), **options)
        parts = json.loads((result.directory / "partition.json").read_text())["train"]
        spread[partition] = np.mean([np.std(np.array(part) // 40) for part in parts])
    assert spread["dirichlet"] < 0.8 * spread["iid"]


ROWS = np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32)
PICTURES = np.zeros((12, 6, 6), dtype=np.uint8)


@pytest.mark.parametrize(
    ("x", "y", "task"),
    [
        (ROWS, np.linspace(0, 1, 12), Regression),
        (ROWS, np.random.default_rng(1).normal(size=(12, 3)), Regression),
        (ROWS, ROWS > 0, MultiLabel),
        (ROWS, np.array([(True, 1.0)] * 12, dtype=[("event", bool), ("time", float)]), Survival),
        (PICTURES, np.tile(np.arange(6), (12, 6, 1)), Segmentation),
    ],
)
def test_labels_that_are_no_classes_tell_the_task(x, y, task):
    found = as_dataset((x, y, x, y))
    assert type(found.task) is task
    assert len(found.train.labels) == 12


@pytest.mark.parametrize(("options", "noted"), [({}, True), ({"task": "regression"}, False)])
def test_a_task_that_was_inferred_is_noted_and_a_named_one_is_not(options, noted):
    notes, y = [], np.linspace(0, 1, 12)

    def notify(event, details):
        notes.extend(details["notes"] if event == "start" else [])

    fedcore.run(dataset=(ROWS, y, ROWS, y), clients=2, rounds=1, workers=0, notify=notify, **options)
    assert any("the task is regression, as the labels are" in note for note in notes) is noted


def test_a_named_task_takes_what_also_could_be_classes_and_names_what_it_cannot_take():
    assert as_dataset((ROWS, np.arange(12), ROWS, np.arange(12)), task="regression").num_classes == 1
    with raises(DataError, "y_train", "'multilabel'", "--task classification"):
        as_dataset((ROWS, np.arange(12), ROWS, np.arange(12)), task="multilabel")
    with raises(fedcore.UnknownNameError, "'regresion'", "'regression'"):
        as_dataset((ROWS, np.arange(12), ROWS, np.arange(12)), task="regresion")
    dataset = as_dataset((ROWS, np.linspace(0, 1, 12), ROWS, np.linspace(0, 1, 12)))
    assert isinstance(dataset, Dataset)
    assert as_dataset(dataset).task is dataset.task


def test_the_loss_by_which_clients_are_chosen_or_weighed_is_that_of_batches():
    """Cox's loss of n equal risks is log(n!) / n: of all samples it ranks clients by their size."""
    labels = torch.stack([torch.arange(8.0), torch.ones(8)], dim=1)

    class Client:
        n, config, task, scratch = 8, RunConfig(batch_size=4), Survival(labels), {}

        def forward(self, indices=None):
            return None, torch.zeros(8, 1), labels

    QFedAvg(QFedAvgOptions()).begin_local(Client())
    losses = PowerOfChoice(PowerOfChoiceOptions()).loss(Client())["loss"], Client.scratch["loss"]
    assert [float(loss) for loss in losses] == pytest.approx([math.log(24) / 4] * 2)
