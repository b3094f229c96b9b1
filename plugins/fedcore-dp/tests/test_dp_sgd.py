"""DP-SGD on clients: gradients of samples, their clipped sum and noise against plain torch; refusals; epsilon."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedcore import (
    ConfigError,
    Loss,
    Plugin,
    PluginConflictError,
    RoundFailedError,
    SplitModel,
    generator,
    hookimpl,
    question,
)
from fedcore.hooks import create_plugin
from fedcore_dp import per_example, spent_epsilon
from fedcore_dp.accountant import spent_by
from fedcore_testing import federate, initial_weights, interrupted, model_bytes, records, small_config, weights
from tests.sentences import raises

HERE = f"module:{__name__}."
RUN = {"clients": 4, "rounds": 1, "partition": "iid", "client_test_fraction": 0.0, "model": "mlp", "momentum": 0.0}
SEEDED = {"seed_noise": True}


# --- gradients of samples ----------------------------------------------------------------------------------------


def convolutional():
    torch.manual_seed(0)
    base = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 6))
    return SplitModel(base, 6, 3)


def one_by_one(model, x, y):
    found = []
    for number in range(len(y)):
        loss = F.cross_entropy(model(x[number : number + 1]).logits, y[number : number + 1])
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    return {name: torch.stack(parts) for (name, _), parts in zip(model.named_parameters(), zip(*found))}


@pytest.mark.parametrize("most", [1 << 24, 1])
def test_one_pass_gives_what_a_pass_for_each_sample_gives(most, monkeypatch):
    """Also where memory holds one sample's gradients at a time."""
    monkeypatch.setattr(per_example, "MOST_NUMBERS", most)
    model, x, y = convolutional(), torch.randn(5, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1])
    names = [name for name, _ in model.named_parameters()]
    parts = list(per_example.one_pass(model, names, x, y))
    assert len(parts) == (1 if most > 1 else 5)
    for name, expected in one_by_one(model, x, y).items():
        torch.testing.assert_close(torch.cat([part[name] for part in parts]), expected, atol=1e-6, rtol=1e-4)
    assert all(parameter.grad is None for parameter in model.parameters())


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 5, padding_idx=0)

    def forward(self, x):
        return self.table(x).mean(1).tanh()


def test_the_row_of_padding_has_no_gradient_in_any_sample():
    model, x = SplitModel(Words(), 5, 3), torch.tensor([[1, 0, 0], [2, 3, 0], [0, 0, 4]])
    y = torch.tensor([0, 1, 2])
    (part,) = per_example.one_pass(model, [name for name, _ in model.named_parameters()], x, y)
    for name, expected in one_by_one(model, x, y).items():
        torch.testing.assert_close(part[name], expected)


class AsksForKinds(nn.Linear):
    """Whether it trains, and whether its weight is a parameter."""

    def __init__(self):
        super().__init__(4, 5)

    def forward(self, x):
        products = super().forward(x)
        scaled = products if isinstance(self.weight, nn.Parameter) else 3 * products
        return scaled.tanh() if products.requires_grad else scaled


def test_a_model_finds_its_weights_as_it_does_alone():
    model, x, y = SplitModel(AsksForKinds(), 5, 3), torch.randn(4, 4), torch.tensor([0, 1, 2, 0])
    (part,) = per_example.one_pass(model, [name for name, _ in model.named_parameters()], x, y)
    for name, expected in one_by_one(model, x, y).items():
        torch.testing.assert_close(part[name], expected)


class HoldsItsWeight(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.shared = [self.weight]

    def forward(self, x):
        return super().forward(x).tanh() @ self.shared[0]


class Selects(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        features = super().forward(x).tanh()
        return features.select_scatter(features[:, 1], 1, 0)


@pytest.mark.parametrize(("base", "reason"), [(HoldsItsWeight, "holds a parameter"), (Selects, "select_scatter")])
def test_a_model_that_is_another_one_under_vmap_is_refused(base, reason):
    model = SplitModel(base(), 4, 3)
    with pytest.raises(RuntimeError, match=reason):
        [*per_example.one_pass(model, ["encoder.base.weight"], torch.randn(2, 4), torch.tensor([0, 1]))]


def test_each_sample_has_its_own_dropout():
    model = SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(4, 64), nn.Dropout(0.5)), 64, 2).train()
    x, y = torch.ones(2, 1, 4), torch.zeros(2, dtype=torch.int64)
    (part,) = per_example.one_pass(model, ["classifier.weight"], x, y)
    assert not torch.equal(part["classifier.weight"][0], part["classifier.weight"][1])


def test_a_sample_moves_a_sum_of_bfloat16_by_no_more_than_the_bound():
    """Rounded to bfloat16 the sum moves by 1.07."""
    gradients = torch.randn(256, 4000, generator=torch.Generator().manual_seed(0)).abs().bfloat16()
    every, others = (per_example.clipped_sum([{"w": rows}], 1.0)["w"].double() for rows in (gradients, gradients[:-1]))
    assert (every - others).norm() < 1 + 1e-5


def test_clipping_and_noise_by_hand():
    """Norms over both tensors: 5, 0.5, 0 and 2; C = 1 leaves the second and the third."""
    first = {"a": torch.tensor([[3.0], [0.3], [0.0]], dtype=torch.float64)}
    first["b"] = torch.tensor([[4.0], [-0.4], [0.0]], dtype=torch.float64)
    last = {"a": torch.tensor([[2.0]], dtype=torch.float64), "b": torch.zeros(1, 1, dtype=torch.float64)}
    total = per_example.clipped_sum([first, last], 1.0)
    assert total["a"].item() == pytest.approx(0.6 + 0.3 + 0.0 + 1.0, abs=1e-15)
    assert total["b"].item() == pytest.approx(0.8 - 0.4, abs=1e-15)
    whole = [{name: tensor.squeeze(1) for name, tensor in part.items()} for part in (first, last)]
    assert per_example.clipped_sum(whole, 1.0)["a"] == total["a"][0], "parameters of one number, of shape ()"
    noised = per_example.noised_mean(total["a"], torch.tensor([-1.5], dtype=torch.float64), 0.4, 1.0, 8)
    assert noised.item() == pytest.approx((1.9 - 0.6) / 8, abs=1e-15)


# --- a run, sample by sample ------------------------------------------------------------------------------------

SAMPLES = {}


class Watch(Plugin):
    """Notes each client's samples in order."""

    @hookimpl
    def local_samples(self, client, samples):
        positions = torch.arange(len(samples))
        SAMPLES[client.id] = samples.inputs(positions).clone(), samples.labels.clone()


def retrained(config, client, batches, *, clip, z, lr, lot):
    """Train a client again, sample by sample: w <- w - lr (sum of clipped g_i + z C N) / L."""
    x, y = SAMPLES[client]
    shapes = initial_weights(config)
    start = {name: tensor.double() for name, tensor in shapes.items()}
    names = list(start)

    def loss(values, row):
        h = torch.relu(x[row].double().flatten() @ values[names[0]].T + values[names[1]])
        for weight, bias in zip(names[2:-2:2], names[3:-2:2]):
            h = torch.relu(h @ values[weight].T + values[bias])
        return F.cross_entropy((h @ values[names[-2]].T + values[names[-1]])[None], y[row][None])

    for number, batch in enumerate(batches):
        total = {name: torch.zeros_like(value) for name, value in start.items()}
        for row in batch.tolist():
            values = {name: value.clone().requires_grad_() for name, value in start.items()}
            gradient = torch.autograd.grad(loss(values, row), list(values.values()))
            norm = np.sqrt(sum(float(g.square().sum()) for g in gradient))
            for name, g in zip(names, gradient):
                total[name] += g * min(1.0, clip / norm)
        stream = generator(0, f"dp-sgd/noise/{number}", round=0, client=client)
        for name in names:
            noise = torch.randn(start[name].shape, generator=stream, dtype=torch.float64)
            start[name] = start[name] - lr * (total[name] + z * clip * noise) / lot
    return start


OPTIONS = {"clip": 0.5, "noise_multiplier": 0.7, **SEEDED}
ONE = {**RUN, "clients": 12, "participation": 0.08, "batch_size": 50, "lr": 0.1, "local_epochs": 1, "weight_decay": 0.0}
"""One client of twelve trains, on about 120 samples."""


def check_steps(folder, result, batches_of):
    """Compare the trained model with the steps on these batches, taken one sample at a time."""
    (client,) = records(result)[0]["cohort"]
    batches = batches_of(client, len(SAMPLES[client][1]))
    expected = retrained(small_config(folder, **ONE), client, batches, clip=0.5, z=0.7, lr=0.1, lot=50)
    for name, tensor in weights(result).items():
        torch.testing.assert_close(tensor.double(), expected[name], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("passes", ["one", "each"])
def test_steps_follow_the_noised_mean_of_clipped_gradients(tmp_path, passes):
    """Three batches an epoch, the last of them smaller: the divisor stays the batch size."""
    SAMPLES.clear()

    def batches_of(client, n):
        order = torch.randperm(n, generator=generator(0, "shuffle/0", round=0, client=client))
        assert [len(batch) for batch in order.split(50)] == [50, 50, n - 100]
        return order.split(50)

    check_steps(tmp_path, federate(tmp_path, ("dp-sgd", {**OPTIONS, "passes": passes}), Watch, **ONE), batches_of)


def test_a_poisson_sample_takes_the_place_of_the_batch(tmp_path):
    SAMPLES.clear()

    def batches_of(client, n):
        streams = [generator(0, f"dp-sgd/sample/{s}", round=0, client=client) for s in range(3)]
        chances = [torch.rand(n, generator=stream, dtype=torch.float64) for stream in streams]
        batches = [(chance < 50 / n).nonzero().flatten() for chance in chances]
        assert len({len(batch) for batch in batches}) > 1
        return batches

    check_steps(tmp_path, federate(tmp_path, ("dp-sgd", {**OPTIONS, "sampling": "poisson"}), Watch, **ONE), batches_of)


def test_a_step_without_a_sample_is_noise_alone(tmp_path):
    options = {**OPTIONS, "sampling": "poisson"}
    result = federate(tmp_path, ("dp-sgd", options), **{**ONE, "batch_size": 1, "local_steps": 3})
    start = initial_weights(result.config)
    assert all(
        tensor.isfinite().all() and not torch.equal(tensor, start[name]) for name, tensor in weights(result).items()
    )


def test_one_sample_moves_a_step_by_no_more_than_the_bound(tmp_path):
    """Another label of one sample: the step differs by at most 2 C lr / L, noise and all other samples being equal."""
    options = {"clip": 0.3, "noise_multiplier": 1.0, **SEEDED}
    size = {**ONE, "local_steps": 1, "batch_size": 2000, "lr": 1.0}
    SAMPLES.clear()
    one = weights(federate(tmp_path, ("dp-sgd", options), **size))
    other = weights(federate(tmp_path, ("dp-sgd", options), f"{HERE}Mislabels", Watch, **size))
    moved = np.sqrt(sum(float((one[name].double() - other[name].double()).square().sum()) for name in one))
    ((_, labels),) = SAMPLES.values()
    n = len(labels)
    assert 0 < moved <= 2 * 0.3 / n * (1 + 1e-3)


class Mislabels(Plugin):
    @hookimpl
    def local_samples(self, client, samples):
        labels = samples.labels.clone()
        labels[0] = (labels[0] + 5) % 10
        return samples.changed(labels=labels)


def test_secure_noise_has_the_promised_scale(tmp_path):
    options = {**ONE, "local_steps": 1, "lr": 1.0}
    result = federate(tmp_path, ("dp-sgd", {"clip": 1.0, "noise_multiplier": 1000.0}), **options)
    start = initial_weights(small_config(tmp_path, **options))
    moved = torch.cat([(tensor - start[name]).flatten() for name, tensor in weights(result).items()]).double()
    assert abs(float(moved.std()) / 20 - 1) < 6.2 / np.sqrt(2 * len(moved))


# --- bits --------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", [{}, {"sampling": "poisson"}, {"passes": "each"}])
def test_seeds_and_resumed_runs_have_the_same_bits(tmp_path, options):
    chosen, size = ("dp-sgd", {**SEEDED, **options}), {**ONE, "rounds": 2}
    straight = model_bytes(federate(tmp_path, chosen, **size))
    assert straight == model_bytes(interrupted(tmp_path, chosen, after=0, **size))
    assert straight != model_bytes(federate(tmp_path, chosen, **size, seed=1))


def test_secure_noise_differs_from_run_to_run(tmp_path):
    one, other = (model_bytes(federate(tmp_path, "dp-sgd", **RUN)) for _ in "ab")
    assert one != other


# --- epsilon -----------------------------------------------------------------------------------------------------


def reports(result):
    return [record["reports"]["dp-sgd"] for record in records(result)]


def test_the_largest_epsilon_of_any_client_stands_in_every_record(tmp_path):
    """Clients of different sizes: q = B / n_k, and T_k the steps of the rounds in which client k took part."""
    size = {"partition": "quantity", "alpha": 0.5, "batch_size": 128, "local_epochs": 2, "rounds": 3}
    size |= {"clients": 6, "participation": 0.5}
    SAMPLES.clear()
    result = federate(tmp_path, ("dp-sgd", {"noise_multiplier": 1.1, "sampling": "poisson"}), Watch, **{**RUN, **size})
    n = {client: len(labels) for client, (_, labels) in SAMPLES.items()}
    assert len(set(n.values())) > 1
    cohorts = [record["cohort"] for record in records(result)]
    for number, report in enumerate(reports(result)):
        took = {client: sum(client in cohort for cohort in cohorts[: number + 1]) for client in n}
        all_spent = [
            spent_by("pld", 1.1, min(1.0, 128 / n[c]), took[c] * 2 * -(-n[c] // 128), 1e-5) for c in n if took[c]
        ]
        most = {name: max(spent[name] for spent in all_spent) for name in ("epsilon", "epsilon_rdp")}
        assert report == {**most, "delta": 1e-5, "noise": "secure"}
    assert json.loads((result.directory / "summary.json").read_text())["reports"]["dp-sgd"] == report


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("work", "passes"), [({"local_epochs": 2}, 4), ({"local_steps": 4}, 4)])
def test_shuffled_batches_have_a_bound_that_needs_no_sampling(tmp_path, work, passes):
    """Every sample is in one batch of an epoch: a Gaussian release for each epoch."""
    options = {"noise_multiplier": 2.0, "accountant": "rdp"}
    report = reports(federate(tmp_path, ("dp-sgd", options), **{**RUN, "rounds": 2, "batch_size": 128, **work}))[-1]
    assert report["epsilon_unsampled"] == spent_epsilon(2.0, 1.0, passes, 1e-5, "rdp")
    assert set(report) == {"epsilon", "epsilon_unsampled", "delta", "noise"}


def test_without_noise_nothing_is_promised_and_the_losses_are_sent(tmp_path):
    options = ("dp-sgd", {"noise_multiplier": 0.0, "passes": "each"})
    result = federate(tmp_path, options, f"{HERE}Asks", f"{HERE}Term", **RUN)
    assert reports(result) == [{"epsilon": None, "delta": 1e-5, "noise": "secure"}]
    assert records(result)[0]["losses"]["task"] > 0


def test_with_noise_no_loss_leaves_the_client(tmp_path):
    assert records(federate(tmp_path, "dp-sgd", **RUN))[0]["losses"] == {}


# --- company -----------------------------------------------------------------------------------------------------


def batch_norm(num_classes, input_shape):
    base = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU())
    return SplitModel(base, 16, num_classes)


def frozen_batch_norm(num_classes, input_shape):
    model = batch_norm(num_classes, input_shape)
    for parameter in model.encoder.base[2].parameters():
        parameter.requires_grad_(False)
    return model


def test_batch_norm_that_does_not_train_mixes_nothing(tmp_path):
    result = federate(tmp_path, "dp-sgd", **{**ONE, "model": f"{HERE}frozen_batch_norm", "buffers": "local"})
    assert records(result)[0]["failures"] == []


@pytest.mark.parametrize("z", [0.0, 1.0])
def test_batch_norm_is_refused_with_the_remedy(tmp_path, z):
    with raises(ConfigError, "'encoder.base.2'"):
        federate(tmp_path, ("dp-sgd", {"noise_multiplier": z}), **{**RUN, "model": f"{HERE}batch_norm"})


class Recurrent(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.rows, self.head = nn.GRU(8, 4, batch_first=True), nn.Linear(4, num_classes)

    def forward(self, x):
        return self.head(self.rows(x.squeeze(1))[0][:, -1])


def test_a_model_that_vmap_does_not_run_is_refused_with_the_remedy(tmp_path):
    options = {**ONE, "model": f"{HERE}Recurrent"}
    with pytest.raises(RoundFailedError, match=r"vmap does not run the model .*; use dp-sgd\.passes=each"):
        federate(tmp_path, "dp-sgd", **options)
    result = federate(tmp_path, ("dp-sgd", {"passes": "each"}), **options)
    assert records(result)[0]["failures"] == []


def with_a_hook(num_classes, input_shape):
    layer = nn.Linear(64, 8)
    layer.weight.register_hook(lambda gradient: 0.5 * gradient)
    return SplitModel(nn.Sequential(nn.Flatten(), layer), 8, num_classes)


class Asks(Plugin):
    @question
    def figures(self, client):
        return None


class Term(Plugin):
    """A term for each sample: the mean of its squared logits."""

    @hookimpl
    def local_loss(self, step):
        return Loss(step.logits.square().mean())


def implementing(hook):
    return type(f"Has{hook.title().replace('_', '')}", (Plugin,), {hook: hookimpl(lambda self: None)})


@pytest.mark.parametrize("hook", ["begin_local", "observe", "end_local", "pre_upload"])
def test_who_may_look_at_samples_past_the_gradients_is_refused(tmp_path, hook):
    with raises(PluginConflictError, "'dp-sgd'", f"'has{hook.replace('_', '')}'", hook):
        federate(tmp_path, "dp-sgd", implementing(hook), **RUN)


def test_questions_patience_and_terms_are_refused(tmp_path):
    with raises(PluginConflictError):
        federate(tmp_path, "dp-sgd", f"{HERE}Asks", **RUN)
    for option, said in (({"patience": 1}, "--patience"), ({"keep": "best"}, "--keep best")):
        with raises(ConfigError, said):
            federate(tmp_path, "dp-sgd", **{**RUN, "client_test_fraction": 0.2, **option})
    with raises(PluginConflictError, "local_loss", "sgd.passes"):
        federate(tmp_path, "dp-sgd", f"{HERE}Term", **RUN)
    with raises(ConfigError, "--precision", "sgd.passes"):
        federate(tmp_path, "dp-sgd", **RUN, precision="bf16")
    with raises(ConfigError, "'encoder.base.1.weight'", "hook", "sgd.passes"):
        federate(tmp_path, "dp-sgd", **{**RUN, "model": with_a_hook})
    with raises(ConfigError, "sampling=poisson", "passes=one"):
        federate(tmp_path, ("dp-sgd", {"passes": "each", "sampling": "poisson"}), **RUN)


def test_drawn_samples_are_not_augmented():
    config = SimpleNamespace(precision="fp32", augment=True)
    task = SimpleNamespace(kind=SimpleNamespace(classes=True))
    plugins = SimpleNamespace(implementers=lambda hook: [])
    setup = SimpleNamespace(config=config, model=nn.Linear(2, 2), task=task, plugins=plugins)
    with raises(ConfigError, "sampling=poisson", "--augment"):
        create_plugin("dp-sgd", {"sampling": "poisson", "noise_multiplier": 0.0}).check_run(setup)


def test_terms_of_other_plugins_are_clipped_with_the_loss(tmp_path):
    """Whatever the term, a step moves no further than C lr."""
    options = {**ONE, "local_steps": 1, "lr": 1.0}
    chosen = ("dp-sgd", {"clip": 0.3, "noise_multiplier": 0.0, "passes": "each"})
    start = initial_weights(small_config(tmp_path, **options))
    alone = weights(federate(tmp_path, chosen, **options))
    both = weights(federate(tmp_path, chosen, f"{HERE}Term", **options))
    norms = [
        np.sqrt(sum(float((end[name].double() - start[name].double()).square().sum()) for name in start))
        for end in (alone, both)
    ]
    assert max(norms) <= 0.3 * (1 + 1e-3)
    assert any(not torch.equal(alone[name], both[name]) for name in start)


@pytest.mark.parametrize("other", ["fedprox", "fedavgm", "local-dp", "dp", "topk", "fedper"])
def test_next_to_other_plugins(tmp_path, other):
    pytest.importorskip(f"fedcore_{ {'local-dp': 'dp', 'topk': 'compress'}.get(other, other) }")
    each = {"passes": "each"} if other == "fedprox" else {}
    result = federate(tmp_path, ("dp-sgd", each), other, **ONE)
    assert records(result)[0]["failures"] == []


@pytest.mark.parametrize("passes", ["one", "each"])
@pytest.mark.parametrize("other", ["fedrs", "scaffold", "ditto", "fedsam", "fedproc", "fedala"])
def test_plugins_that_do_not_go_with_it(tmp_path, other, passes):
    pytest.importorskip(f"fedcore_{other}")
    with raises(PluginConflictError, "'dp-sgd'", f"'{other}'") as refusal:
        federate(tmp_path, ("dp-sgd", {"passes": passes}), other, **RUN)
    assert "passes=each" not in str(refusal.value)  # it would not help


def test_poisoned_samples_are_clipped_with_the_others(tmp_path):
    """A data attack poisons what the client trains on; its gradients are clipped and noised as any."""
    pytest.importorskip("fedcore_attacks")
    attack = ("attack", {"kind": "label-flip", "share": 0.5})
    chosen = ("dp-sgd", {**SEEDED, "sampling": "poisson"})
    size = {**RUN, "local_steps": 2}
    one, other = (model_bytes(federate(tmp_path, *pair, **size)) for pair in ((chosen, attack), (attack, chosen)))
    assert one == other != model_bytes(federate(tmp_path, chosen, **size))
