"""Figures on a client's or the server's data: counted over all samples, and None with a reason where there are none."""

from __future__ import annotations

import statistics
import threading

import pytest
import torch
from torch.nn import functional as F

from fedcore.base.metrics import Counts
from fedcore.client.evaluation import MAX_PER_CLIENT, evaluate, summarise_clients
from fedcore.data import ResidentSamples
from fedcore_metrics import MacroF1


class Logits(torch.nn.Module):
    """Gives the pixels as logits."""

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return images.flatten(1), images.flatten(1)


def samples(n: int, classes: int = 3) -> ResidentSamples:
    images = torch.randn(n, 1, 1, classes, generator=torch.Generator().manual_seed(n))
    return ResidentSamples(images, torch.arange(n) % classes, [0.0], [1.0])


@pytest.mark.parametrize("threads", [1, 2])
def test_counts_are_those_of_all_samples_at_once(threads: int) -> None:
    held, cpu = samples(700), torch.device("cpu")
    logits = held.gather(torch.arange(700)).flatten(1)
    right = logits.argmax(dim=1) == held.labels
    found = evaluate(Logits(), held, 3, cpu, threads=threads)
    assert found.correct.tolist() == [int(right[held.labels == c].sum()) for c in range(3)]
    assert found.total.tolist() == [234, 233, 233]
    assert found.loss.item() == pytest.approx(float(F.cross_entropy(logits.double(), held.labels, reduction="sum")))


class Threads(Logits):
    """Notes how many threads torch has."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen.add(torch.get_num_threads())
        return super().forward(images)


@pytest.mark.parametrize("threads", [1, 2])
def test_each_chunk_has_one_thread_and_torch_what_it_had_afterwards(threads: int) -> None:
    before, model, later = torch.get_num_threads(), Threads(), []
    torch.set_num_threads(3)
    try:
        evaluate(model, samples(700), 3, torch.device("cpu"), threads=threads)
        assert model.seen == {1}
        assert torch.get_num_threads() == 3
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later == [3]
    finally:
        torch.set_num_threads(before)


def test_only_the_samples_that_are_asked_for_count() -> None:
    held = samples(9)
    found = evaluate(Logits(), held, 3, torch.device("cpu"), indices=torch.tensor([0, 3, 4]))
    assert found.total.tolist() == [2, 1, 0]
    assert found.rates()["per_class"][2] is None
    assert found.rates()["samples"] == 3


def test_counts_of_several_sets_add_up_to_those_of_all_samples() -> None:
    held, metrics, cpu = samples(700), {"f1": MacroF1(3)}, torch.device("cpu")
    whole, *parts = (
        evaluate(Logits(), held, 3, cpu, indices=rows, confusion=True, metrics=metrics)
        for rows in (torch.arange(700), torch.arange(1), torch.arange(1, 600), torch.arange(600, 700))
    )
    joined = parts[0] + parts[1] + parts[2]
    assert joined.tensors().keys() == whole.tensors().keys()
    for name, tensor in joined.tensors().items():
        torch.testing.assert_close(tensor, whole.tensors()[name])
    assert joined.rates(metrics) == {**whole.rates(metrics), "loss": pytest.approx(whole.rates()["loss"])}


def test_a_loss_that_is_not_finite_has_a_reason() -> None:
    assert counts_of(1, 2, torch.inf).rates() == {
        "accuracy": 0.5,
        "loss": None,
        "loss_reason": "the loss is not finite",
        "samples": 2,
        "per_class": [0.5],
    }


def counts_of(correct: int, total: int, loss: float) -> Counts:
    """Counts of samples of one class."""
    numbers = {"correct": torch.tensor([correct]), "total": torch.tensor([total])}
    return Counts(**numbers, loss=torch.tensor(loss, dtype=torch.float64), undefined=torch.tensor(0))


NONE = [[torch.nan, 0.0, 0.0], [0.0, 0.0, torch.nan], [torch.inf, 0.0, 0.0], [-torch.inf] * 3]
"""Logits without a softmax. argmax gives class 0 for all but the second row."""


def test_a_sample_without_a_softmax_is_a_hit_of_no_class() -> None:
    rows = torch.tensor([*NONE, [1.0, -torch.inf, 0.0], [0.0, 0.0, 1.0]])
    held = ResidentSamples(rows.view(-1, 1, 1, 3), torch.tensor([0, 2, 0, 0, 0, 1]), [0.0], [1.0])
    found = evaluate(Logits(), held, 3, torch.device("cpu"), confusion=True, metrics={"f1": MacroF1(3)})
    assert (found.correct.tolist(), found.total.tolist(), int(found.undefined)) == ([1, 0, 0], [4, 1, 1], 4)
    assert found.confusion is not None
    assert found.confusion.tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 0]]
    figures = found.rates({"f1": MacroF1(3)})
    assert (figures["accuracy"], figures["per_class"], figures["undefined"]) == (1 / 6, [0.25, 0.0, 0.0], 4)
    assert figures["loss"] is figures["f1"] is None
    (row,) = summarise_clients(
        {0: {"personal": figures | {"loss": torch.nan}}}, [], {"personal": {"f1": None}}
    ).values()
    assert (row["accuracy"], row["undefined"], row["f1_mean"]) == (1 / 6, 4, None)


def test_clients_are_joined_weighted_by_what_they_hold_out() -> None:
    rows = {
        0: {"global_local": {"accuracy": 1.0, "samples": 1, "loss": 0.5}},
        1: {"global_local": {"accuracy": 1 / 3, "samples": 3, "loss": 2.5}},
    }
    (row,) = summarise_clients(rows, untrained=[1], pooled={}).values()
    assert (row["accuracy"], row["loss"], row["clients"], row["untrained"]) == (0.5, 0.75, 2, 0)
    assert row["per_client"] == {"0": 1.0, "1": 0.333333}
    assert (row["worst10"], row["mean"], row["best10"]) == pytest.approx((1 / 3, 2 / 3, 1.0))
    assert [row["quantiles"][0], row["quantiles"][-1]] == pytest.approx([1 / 3, 1.0])


def test_a_mean_over_clients_says_over_how_many_it_is() -> None:
    def row(*values: float | None) -> dict[str, float | None]:
        rates = {"accuracy": 0.5, "samples": 2, "loss": 0.5}
        clients = {client: {"global_local": {**rates, "auroc": value}} for client, value in enumerate(values)}
        return summarise_clients(clients, [], {"global_local": {"auroc": 0.7}})["global_local"]

    assert row(0.5, 0.7)["auroc_mean"] == pytest.approx(0.6)
    assert row(0.5, None, 0.7)["auroc_per_client"] == {"0": 0.5, "2": 0.7}
    assert "mean_over" not in row(0.5, 0.7)
    assert "mean_over" not in row(None, None)
    assert row(0.5, None, 0.7)["auroc_mean"] == pytest.approx(0.6)
    assert row(0.5, None, 0.7)["mean_over"] == {"auroc": 2}


def test_beyond_a_thousand_clients_their_figures_are_recorded_but_not_each_one() -> None:
    right = [client % 7 for client in range(MAX_PER_CLIENT + 10)]
    rows = {
        client: {"global_local": counts_of(n, 10 + client % 2, 1.0).rates() | {"loss": 1.0}}
        for client, n in enumerate(right)
    }
    (row,) = summarise_clients(rows, untrained=[], pooled={}).values()
    assert "per_client" not in row
    ordered = sorted(n / (10 + client % 2) for client, n in enumerate(right))
    assert row["mean"] == pytest.approx(statistics.fmean(ordered))
    assert row["std"] == pytest.approx(statistics.pstdev(ordered))
    assert row["worst10"] == pytest.approx(statistics.fmean(ordered[:101]))
    assert row["best10"] == pytest.approx(statistics.fmean(ordered[-101:]))
    assert row["mean"] != pytest.approx(row["accuracy"], abs=1e-6)  # which counts clients by their samples
