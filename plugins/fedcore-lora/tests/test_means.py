"""The means of adapters: against dense means in float64, with unequal clients and a part of them; what travels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedcore
from fedcore import Plugin, PluginConflictError, SplitModel, hookimpl
from fedcore_lora import LowRank
from fedcore_testing import model_bytes, records
from tests.sentences import raises

PARTS = [range(6), range(6, 20), range(20, 23)]
RANK, ALPHA = 2, 3.0
draw = np.random.default_rng(0)
X = draw.normal(size=(31, 5)).astype(np.float32)
Y = draw.integers(0, 3, 31)
PLACE = "encoder.base.1.parametrizations.weight"


class Doubled(nn.Module):
    def forward(self, x):
        return x.double()


def network(num_classes, input_shape):
    return SplitModel(nn.Sequential(Doubled(), nn.Linear(5, 4, dtype=torch.float64)), 4, num_classes).double()


class KeepsAll(Plugin):
    """Keeps what the server had and the clients sent in each round, with the weights."""

    rounds: list = []

    @hookimpl
    def begin_round(self, server):
        self.rounds.append(({name: tensor.clone() for name, tensor in server.model.items()}, {}))

    @hookimpl(tryfirst=True)
    def accumulate(self, server, update):
        copied = {name: tensor.clone() for name, tensor in update.model.items()}
        self.rounds[-1][1][update.client] = (update.samples, copied)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    KeepsAll.rounds.clear()


def train(mean="products", *plugins, **options):
    settings = {"rounds": 5, "local_epochs": 2, "batch_size": 4, "lr": 0.2, "workers": 0, "device": "cpu"}
    settings |= {"model": network, "partition": PARTS, "eval_every": 5}
    lora = {"lora": {"rank": RANK, "alpha": ALPHA, "mean": mean}}
    data = (X[:23], Y[:23], X[23:], Y[23:])
    return fedcore.run(dataset=data, plugins=[lora, *plugins], progress=False, **settings | options)


def dense(state, w0):
    """Return W + R + (alpha / r) B A."""
    product = ALPHA / RANK * state[f"{PLACE}.0.B"] @ state[f"{PLACE}.0.A"]
    return w0 + state.get(f"{PLACE}.0.residual", 0) + product


def after(result, number):
    """Return the server's model after a round, from 0."""
    return KeepsAll.rounds[number + 1][0] if number + 1 < len(KeepsAll.rounds) else result.model.state_dict()


@pytest.mark.parametrize("participation", [1.0, 0.67])
@pytest.mark.parametrize(("mean", "exact"), [("products", True), ("frozen-a", True), ("factors", False)])
def test_the_new_weight_is_the_mean_of_the_clients_weights(mean, exact, participation):
    """Each round, weighted by samples; the mean of factors misses it by far more than rounding."""
    result = train(mean, KeepsAll, participation=participation)
    w0, errors, moved = result.model.state_dict()[f"{PLACE}.original"], [], []
    fixed = {n: t for n, t in result.model.state_dict().items() if n not in KeepsAll.rounds[0][0]}
    for number, (start, updates) in enumerate(KeepsAll.rounds):
        before = {**fixed, **start}
        # A client's own residual is the server's; the one in its update holds the change of its product.
        of_clients = []
        for samples, model in updates.values():
            own = {**before, **{name: tensor for name, tensor in model.items() if not name.endswith("residual")}}
            of_clients.append((samples, dense(own, w0)))
        total = sum(samples for samples, _ in of_clients)
        expected = sum(samples / total * weight for samples, weight in of_clients)
        found = dense({**fixed, **after(result, number)}, w0)
        errors.append(float((found - expected).abs().max()))
        moved.append(float((found - dense(before, w0)).abs().max()))
    assert len({len(updates) for _, updates in KeepsAll.rounds}) == 1
    assert min(moved) > 1e-3
    if exact:
        assert max(errors) < 1e-12
    else:
        assert max(errors) > 1e-3


def test_identical_adapters_are_their_own_mean():
    """The mean of one client's adapter is its product, by all three means."""
    rows = [*range(6)]
    for mean in ("factors", "products", "frozen-a"):
        result = train(mean, KeepsAll, partition=[rows], rounds=1, local_epochs=1, batch_size=6)
        (_, updates), state = KeepsAll.rounds.pop(), result.model.state_dict()
        model = updates[0][1]
        w0 = state[f"{PLACE}.original"]
        own = {**state, **{n: t for n, t in model.items() if not n.endswith("residual")}}
        own.pop(f"{PLACE}.0.residual", None)
        torch.testing.assert_close(dense(state, w0), dense(own, w0), rtol=1e-12, atol=1e-15)


def test_what_travels():
    """The residual goes down, dense, and never up; with frozen A neither does A."""
    a, b, residual, head = RANK * 5, 4 * RANK, 4 * 5, 4 * 3 + 3
    for mean, up, down in (
        ("factors", a + b + head, a + b + head),
        ("products", a + b + head, a + b + head + residual),
        ("frozen-a", b + head, b + head),
    ):
        for line in records(train(mean, rounds=2)):
            assert line["bytes"]["by_plugin"]["model"] == {"up": 3 * 8 * up, "down": 3 * 8 * down}, mean


def test_a_frozen_classifier_neither_changes_nor_travels():
    result = fedcore.run(
        dataset=(X[:23], Y[:23], X[23:], Y[23:]),
        plugins={"lora": {"rank": RANK, "classifier": False}},
        model=network,
        partition=PARTS,
        rounds=1,
        workers=0,
        progress=False,
    )
    assert [n for n, p in result.model.named_parameters() if p.requires_grad] == [f"{PLACE}.0.A", f"{PLACE}.0.B"]
    assert records(result)[0]["bytes"]["by_plugin"]["model"]["up"] == 3 * 8 * (RANK * 5 + 4 * RANK)


def test_a_transposed_weight_gets_the_transposed_product():
    adapter = LowRank(torch.zeros(3, 2), 1, 2.0, transposed=True, residual=True)
    with torch.no_grad():
        adapter.A.copy_(torch.tensor([[1.0, 2.0, 3.0]]))
        adapter.B.copy_(torch.tensor([[1.0], [-1.0]]))
        adapter.residual.copy_(torch.tensor([[0.0, 0.0, 0.5], [0.0, 0.0, 0.0]]))
    assert adapter(torch.zeros(3, 2)).tolist() == [[2.0, -2.0], [4.0, -4.0], [6.5, -6.0]]


class Stopped(Exception):
    pass


def test_a_stopped_run_goes_on_to_the_same_bits():
    def stop(event, details):
        if event == "round" and details["round"] == 2:
            raise Stopped

    options = {"model": "mlp", "partition": "dirichlet", "clients": 3, "participation": 0.67, "rounds": 4}
    lora = {"lora": {"mean": "products"}}
    common = {"dataset": "digits", "plugins": lora, "workers": 0, "local_epochs": 1, "progress": False, **options}
    with pytest.raises(Stopped):
        fedcore.run(out="stopped", notify=stop, **common)
    again, whole = fedcore.resume("stopped", progress=False), fedcore.run(**common)
    assert model_bytes(again) == model_bytes(whole)
    assert model_bytes(fedcore.run(**common | {"workers": 2})) == model_bytes(whole)


def test_an_export_holds_the_residual_too(tmp_path):
    from safetensors.torch import load_file

    from fedcore_export import export_run

    result = fedcore.run(
        dataset="digits", plugins={"lora": {"mean": "products"}}, clients=3, rounds=2, workers=0, progress=False
    )
    export_run(result.directory, "safetensors", tmp_path / "out")
    exported, state = load_file(tmp_path / "out" / "model.safetensors"), result.model.state_dict()
    place = "encoder.base.fc1.parametrizations.weight"
    adapter = {name: state[f"{place}.0.{name}"] for name in ("A", "B", "residual")}
    assert adapter["residual"].abs().max() > 1e-4
    expected = state[f"{place}.original"] + adapter["residual"] + adapter["B"] @ adapter["A"]
    torch.testing.assert_close(exported["encoder.base.fc1.weight"], expected)


# --- other plugins -----------------------------------------------------------------------------------------------

TRAINS = ["fedprox", "scaffold", "ditto", "median", "krum", "trimmed-mean", "norm-clip"]
REFUSED = ["attack", "fedadam", "fedavgm", "feddyn", "fednova", "qffl", "topk", "qsgd", "local-dp", "fedala", "ifca"]


@pytest.mark.parametrize("method", TRAINS)
def test_methods_that_train_next_to_the_mean_of_products(method):
    result = train("products", method, partition="iid", clients=4, rounds=2, client_test_fraction=0.2)
    assert [line["failures"] for line in result.records] == [[], []]


@pytest.mark.parametrize("method", REFUSED)
def test_methods_that_are_refused_next_to_the_mean_of_products(method):
    with raises(PluginConflictError, "'lora'", f"'{method}'"):
        train("products", method, partition="iid", clients=4, rounds=2)
    train("factors", method, partition="iid", clients=4, rounds=1)


def test_a_server_optimizer_is_refused_with_the_reason():
    with raises(PluginConflictError, "'fedadam' steps from the mean of A and B"):
        train("products", "fedadam")


def test_central_privacy_adds_its_noise_to_residuals_too():
    quiet = {"dp": {"seed_noise": True, "noise_multiplier": 1e-9, "clip": 1e6}}
    result = train("products", quiet, rounds=1)
    assert result.model.state_dict()[f"{PLACE}.0.residual"].abs().max() > 0


def test_krum_takes_the_weight_of_one_client():
    result = train("products", KeepsAll, "krum", partition="iid", clients=4, rounds=1)
    (_, updates), state = KeepsAll.rounds[0], result.model.state_dict()
    w0 = state[f"{PLACE}.original"]
    of_clients = [
        dense({**state, **model, f"{PLACE}.0.residual": torch.zeros(4, 5)}, w0) for _, model in updates.values()
    ]
    found = dense(state, w0)
    assert min(float((found - own).abs().max()) for own in of_clients) < 1e-12


def test_scaffold_against_a_loop_by_hand():
    """Five rounds, full batches, unequal clients: A, B and R agree with a loop in float64."""
    parts = [[*part] for part in PARTS]
    result = train("products", "scaffold", batch_size=1000, momentum=0.0, weight_decay=0.0, lr=0.1)
    again = train("products", KeepsAll, "scaffold", batch_size=1000, momentum=0.0, weight_decay=0.0, lr=0.1)
    assert model_bytes(result) == model_bytes(again)
    state, first = result.model.state_dict(), KeepsAll.rounds[0][0]
    w0 = state[f"{PLACE}.original"]
    bias = state["encoder.base.1.bias"]
    names = [f"{PLACE}.0.A", f"{PLACE}.0.B", "classifier.weight", "classifier.bias"]
    w, residual = [first[name].clone() for name in names], torch.zeros(4, 5, dtype=torch.float64)
    shares = [len(part) / 23 for part in parts]
    own, common = [[torch.zeros_like(p) for p in w] for _ in parts], [torch.zeros_like(p) for p in w]
    x, y = torch.from_numpy(X).double(), torch.from_numpy(Y)
    for _ in range(5):
        ends = []
        for client, part in enumerate(parts):
            v = [p.clone().requires_grad_() for p in w]
            fix = [c - k for c, k in zip(common, own[client], strict=True)]
            for _ in range(2):
                a, b, head, shift = v
                weight = w0 + residual + ALPHA / RANK * b @ a
                logits = (x[part] @ weight.T + bias) @ head.T + shift
                slopes = torch.autograd.grad(nn.functional.cross_entropy(logits, y[part]), v)
                with torch.no_grad():
                    v = [(p - 0.1 * (g + f)).requires_grad_() for p, g, f in zip(v, slopes, fix, strict=True)]
            ends.append([p.detach() for p in v])
            moved = [(start - end) / 0.2 for start, end in zip(w, ends[-1], strict=True)]
            own[client] = [step - f for step, f in zip(moved, fix, strict=True)]
        mean = [sum(s * end for s, end in zip(shares, each, strict=True)) for each in zip(*ends, strict=True)]
        products = sum(s * end[1] @ end[0] for s, end in zip(shares, ends, strict=True))
        residual = residual + ALPHA / RANK * (products - mean[1] @ mean[0])
        w = mean
        common = [sum(s * c for s, c in zip(shares, each, strict=True)) for each in zip(*own, strict=True)]
    for name, expected in zip([*names, f"{PLACE}.0.residual"], [*w, residual], strict=True):
        torch.testing.assert_close(state[name], expected, rtol=1e-9, atol=1e-12)
    assert residual.abs().max() > 1e-6
