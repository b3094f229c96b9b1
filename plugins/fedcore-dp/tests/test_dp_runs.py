"""Whole runs: what leaves and what is released against NumPy, rounds with missing clients, refusals, epsilon."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fedcore import (
    ClientUpdate,
    ConfigError,
    Exchange,
    FedcoreError,
    Plugin,
    PluginConflictError,
    PluginContractError,
    SplitModel,
    generator,
    hookimpl,
    question,
)
from fedcore.engines import ClientFailure, InProcessEngine
from fedcore.hooks import create_plugin
from fedcore_dp import CentralDP, LocalDP
from fedcore_dp.accountant import spent_by
from fedcore_dp.central import default_delta
from fedcore_testing import (
    RejectsRound1,
    committed,
    federate,
    initial_weights,
    interrupted,
    model_bytes,
    records,
    small_config,
    weights,
)
from tests.sentences import raises

HERE = f"module:{__name__}."
RUN = {"clients": 4, "rounds": 1, "partition": "iid", "client_test_fraction": 0.0}
SEEDED = {"seed_noise": True}
PLUGINS = {"dp": CentralDP, "local-dp": LocalDP}


class Tap(InProcessEngine):
    """Keeps what every client sends, and loses those that it is told to."""

    lost: tuple[int, ...] = ()

    def __init__(self, spec):
        super().__init__(spec)
        self.sent: dict[tuple[int, int], ClientUpdate] = {}
        self.shared: list[dict] = []

    def share(self, key, payload):
        self.shared.append({name: tensor.clone() for name, tensor in payload.model.items()})
        super().share(key, payload)

    def run(self, tasks, *, window=None):
        for task, outcome in super().run(tasks, window=window):
            if task.kind == "fit_begin" and task.client in self.lost:
                outcome = ClientFailure("unreachable", "not there")
            elif task.kind == "fit_begin":
                self.sent[task.round, task.client] = deepcopy(outcome)  # the server writes to it
            yield task, outcome


def tapped(folder, *plugins, lost=(), **options):
    """Run; return the result and the engine that listened."""
    engines = []

    def make(spec):
        engines.append(Tap(spec))
        engines[-1].lost = lost
        return engines[-1]

    return federate(folder, *plugins, engine=make, **{**RUN, **options}), engines[0]


def initial(folder, *plugins, **options):
    config = small_config(folder, *plugins, **{**RUN, **options})
    return {name: tensor.double().numpy() for name, tensor in initial_weights(config).items()}


def models(tap, number=0):
    """Return what the clients of a round trained: client -> name -> array."""
    found = {}
    for (at, client), update in sorted(tap.sent.items()):
        if at == number:
            model = tap._runtime.setup.uploads.named(update.model)
            found[client] = {name: tensor.double().numpy() for name, tensor in model.items()}
    return found


def clipped(start, end, bound):
    moves = {name: end[name] - start[name] for name in start}
    norm = math.sqrt(sum(np.square(move).sum() for move in moves.values()))
    return {name: move * min(1.0, bound / norm) for name, move in moves.items()}, norm


def stream(purpose, **where):
    """Return the seeded stream that fedcore derives for a purpose, here by its definition."""
    return generator(0, purpose, **where)


def close(found, expected):
    for name, tensor in found.items():
        np.testing.assert_allclose(tensor.double().numpy(), expected[name], rtol=2e-6, atol=2e-7)


# --- central: what is released -----------------------------------------------------------------------------------


def released(start, ends, z, bound, expected_clients, noise):
    total = {name: np.zeros_like(value) for name, value in start.items()}
    for end in ends:
        for name, move in clipped(start, end, bound)[0].items():
            total[name] += move
    return {name: start[name] + (total[name] + z * bound * noise[name]) / expected_clients for name in start}


def noise_like(start, generator):
    return {
        name: torch.randn(value.shape, generator=generator, dtype=torch.float64).numpy()
        for name, value in start.items()
    }


@pytest.mark.parametrize(("lost", "participation"), [((), 1.0), ((2,), 1.0), ((0, 1, 2), 1.0), ((), 0.5)])
def test_clipped_sum_and_noise_over_the_expected_number_of_clients(tmp_path, lost, participation):
    """Who is missing leaves a gap in the sum, and the divisor stays."""
    options = {"clip": 0.05, "noise_multiplier": 0.3, **SEEDED}
    result, tap = tapped(tmp_path, ("dp", options), lost=lost, participation=participation)
    start, ends = initial(tmp_path), models(tap)
    assert all(clipped(start, end, 1.0)[1] > 0.05 for end in ends.values()), "nothing would be clipped"
    assert len(ends) == round(4 * participation) - len(lost)
    noise = noise_like(start, stream("dp/noise", round=0))
    close(weights(result), released(start, ends.values(), 0.3, 0.05, 4 * participation, noise))


def test_no_client_moves_the_mean_further_than_the_bound(tmp_path):
    """Without one client the noised model differs by at most S / m, in all its parameters together."""
    options = {"clip": 0.1, "noise_multiplier": 1.0, **SEEDED}
    whole, _ = tapped(tmp_path, ("dp", options))
    without, _ = tapped(tmp_path, ("dp", options), lost=(1,))
    one, other = weights(whole), weights(without)
    moved = math.sqrt(sum(float((one[name].double() - other[name].double()).square().sum()) for name in one))
    assert moved == pytest.approx(0.1 / 4, rel=1e-3)


def test_a_client_counts_once_however_many_samples_it_has(tmp_path):
    options = {"partition": "quantity", "alpha": 0.3}
    result, tap = tapped(tmp_path, ("dp", {"clip": 1e3, "noise_multiplier": 1e-12, **SEEDED}), **options)
    ends = models(tap)
    assert len({update.samples for update in tap.sent.values()}) > 1
    close(weights(result), {name: np.mean([end[name] for end in ends.values()], axis=0) for name in ends[0]})


def test_the_noise_has_the_promised_scale(tmp_path):
    """Secure noise, large beside the update: its spread is z S / m, to what chance allows."""
    result, _ = tapped(tmp_path, ("dp", {"clip": 0.01, "noise_multiplier": 500.0}))
    start = initial(tmp_path)
    moved = np.concatenate([(t.double().numpy() - start[n]).ravel() for n, t in weights(result).items()])
    assert len(moved) > 5_000
    assert abs(moved.std() / (500 * 0.01 / 4) - 1) < 6.2 / math.sqrt(2 * len(moved))


def test_fixed_parameters_of_clients_do_not_travel(tmp_path):
    """A client that sends what is not trained, and so gets no noise, is rejected."""
    with raises(FedcoreError, "'encoder.base.1.scale'"):
        tapped(tmp_path, (f"{HERE}Edits", {}), ("dp", SEEDED), model=f"{HERE}with_fixed_scale")


class Edits(Plugin):
    @hookimpl
    def pre_upload(self, client, update):
        return replace(update, model={**update.model, "encoder.base.1.scale": torch.tensor([9.0])})


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0]), requires_grad=False)

    def forward(self, x):
        return x * self.scale


def with_fixed_scale(num_classes, input_shape):
    return SplitModel(nn.Sequential(nn.Flatten(), Scale(), nn.Linear(64, 8), nn.ReLU()), 8, num_classes)


# --- central: adaptive clipping ----------------------------------------------------------------------------------

ADAPTIVE = {"clip": 0.05, "quantile": 0.5, "clip_rate": 0.7, "noise_multiplier": 0.3, "count_noise": 0.4, **SEEDED}


@pytest.mark.parametrize("lost", [(), (2,)])
def test_the_bound_follows_the_norms_and_the_noise_follows_the_bound(tmp_path, lost):
    """Three rounds again in NumPy: bound, bits, noise on both; who is missing counts for neither side."""
    result, tap = tapped(tmp_path, ("dp", ADAPTIVE), lost=lost, rounds=3)
    bound, multiplier = 0.05, (0.3**-2 - 0.8**-2) ** -0.5
    starts = [{name: tensor.double().numpy() for name, tensor in sent.items()} for sent in tap.shared[:3]]
    for number, (start, report) in enumerate(zip(starts, reports(result, "dp"), strict=True)):
        ends = models(tap, number).values()
        within = sum(clipped(start, end, 1.0)[1] <= bound for end in ends)
        noise = noise_like(start, stream("dp/noise", round=number))
        expected = released(start, ends, multiplier, bound, 4, noise)
        close(weights(result) if number == 2 else tap.shared[number + 1], expected)
        count = 0.4 * float(torch.randn((), generator=stream("dp/count", round=number), dtype=torch.float64))
        share = (within - (len(ends) - within) + 2 * count) / 8 + 0.5
        assert {name: report[name] for name in ("clip", "unclipped")} == pytest.approx(
            {"clip": bound, "unclipped": share}
        )
        assert report["epsilon"] == spent_by("pld", 0.3, 1.0, number + 1, 0.1)["epsilon"]
        bound *= math.exp(-0.7 * (share - 0.5))


def test_an_adapted_bound_resumes_to_the_same_bits_and_keeps_no_count(tmp_path):
    options = {**RUN, "rounds": 3}
    resumed, whole = (
        interrupted(tmp_path, ("dp", ADAPTIVE), after=0, **options),
        federate(tmp_path, ("dp", ADAPTIVE), **options),
    )
    assert model_bytes(resumed) == model_bytes(whole)
    assert reports(resumed, "dp") == reports(whole, "dp")
    assert set(committed(whole).plugins["dp"]) == {"clip", "last", "round"}


def test_without_noise_the_bound_follows_the_exact_share(tmp_path):
    result, _ = tapped(tmp_path, ("dp", {**ADAPTIVE, "clip": 1e3, "noise_multiplier": 0.0}), rounds=2)
    first, second = reports(result, "dp")
    assert first == {"epsilon": None, "delta": 0.1, "noise": "seeded", "clip": 1e3, "unclipped": 1.0}
    assert second["clip"] == pytest.approx(1e3 * math.exp(-0.35))


def test_a_round_without_an_update_reports_no_share_of_it(tmp_path):
    options = {"quantile": 0.5, "noise_multiplier": 0.0}
    result = federate(tmp_path, ("dp", options), RejectsRound1, **{**RUN, "rounds": 3}, min_clients=0)
    assert ["unclipped" in report for report in reports(result, "dp")] == [True, False, True]


def test_a_round_without_clients_does_not_count_the_one_that_trains(tmp_path):
    options = {"sampling": "poisson", **ADAPTIVE, "noise_multiplier": 0.0}
    result, _ = tapped(tmp_path, ("dp", options), participation=0.02, min_clients=1)
    assert reports(result, "dp")[0]["unclipped"] == 0.5


def test_a_count_noise_that_takes_the_whole_budget_is_refused(tmp_path):
    with raises(ConfigError, "count_noise=0.5", "noise_multiplier=1"):
        federate(tmp_path, ("dp", {"quantile": 0.5, "count_noise": 0.5}), **RUN)
    federate(tmp_path, ("dp", {"quantile": 0.5, "noise_multiplier": 3.0}), **RUN)


# --- central: who takes part -------------------------------------------------------------------------------------


def drawn(options, rounds=400, clients=30, rate=0.2):
    """Return the cohorts that the plugin draws, with its states."""
    plugin = create_plugin("dp", {"sampling": "poisson", **options})
    found = []
    for number in range(rounds):
        server = SimpleNamespace(
            available=range(clients),
            config=SimpleNamespace(participation=rate),
            state={},
            generator=lambda purpose, number=number: stream(purpose, round=number),
        )
        found.append((plugin.select_clients(server), server.state["idle"]))
    return found


@pytest.mark.parametrize("options", [{}, SEEDED], ids=["secure", "seeded"])
def test_poisson_cohorts_are_independent_draws(options):
    cohorts = drawn(options)
    assert all(len(cohort) == 1 for cohort, idle in cohorts if idle)
    taken = np.zeros((400, 30))
    for row, (cohort, idle) in zip(taken, cohorts):
        row[[] if idle else cohort] = 1
    sizes = taken.sum(axis=1)
    assert abs(taken.mean() - 0.2) < 6.2 * math.sqrt(0.16 / taken.size)
    assert 0.6 < sizes.var() / (30 * 0.16) < 1.6  # a fixed size has none
    assert len(set(map(tuple, taken))) > 300


def test_poisson_cohorts_are_drawn_again_from_the_seed_only():
    assert drawn(SEEDED, rounds=5) == drawn(SEEDED, rounds=5)
    assert drawn({}, rounds=5) != drawn({}, rounds=5)


def test_where_nobody_is_drawn_one_trains_and_counts_as_zero(tmp_path):
    options = {"sampling": "poisson", "clip": 1.0, "noise_multiplier": 0.5, **SEEDED}
    result, tap = tapped(tmp_path, ("dp", options), participation=0.02)
    assert records(result)[0]["accepted"] == 1
    start = initial(tmp_path)
    assert clipped(start, next(iter(models(tap).values())), 1.0)[1] > 0, "the client did train"
    noise = noise_like(start, stream("dp/noise", round=0))
    close(weights(result), {name: start[name] + 0.5 * noise[name] / (0.02 * 4) for name in start})


def test_poisson_sums_are_divided_by_the_mean_size(tmp_path):
    options = {"sampling": "poisson", "clip": 0.05, "noise_multiplier": 0.1, **SEEDED}
    result, tap = tapped(tmp_path, ("dp", options), participation=0.6)
    cohort = records(result)[0]["cohort"]
    start, noise = initial(tmp_path), noise_like(initial(tmp_path), stream("dp/noise", round=0))
    assert sorted(models(tap)) == cohort
    close(weights(result), released(start, models(tap).values(), 0.1, 0.05, 2.4, noise))


def test_unseen_clients_do_not_count(tmp_path):
    """If all take part in every round, poisson is fixed; two of the four never train."""
    options = {"clip": 0.05, "noise_multiplier": 0.1, **SEEDED}
    unseen = {**RUN, "unseen_clients": 0.5, "client_test_fraction": 0.2}
    fixed, poisson = (
        weights(federate(tmp_path, ("dp", {"sampling": sampling, **options}), **unseen))
        for sampling in ("fixed", "poisson")
    )
    assert all(torch.equal(fixed[name], poisson[name]) for name in fixed)


def test_poisson_needs_rounds_that_stop_without_an_update(tmp_path):
    with raises(ConfigError, "--min-clients", "1"):
        federate(tmp_path, ("dp", {"sampling": "poisson"}), **RUN, min_clients=0)


def test_poisson_is_refused_where_a_round_without_an_update_is_likely(tmp_path):
    chosen = ("dp", {"sampling": "poisson"})
    with raises(ConfigError, "1"):
        federate(tmp_path, chosen, **{**RUN, "clients": 4, "participation": 0.5}, system={"dropout": 0.5})
    federate(tmp_path, chosen, **{**RUN, "clients": 40, "participation": 0.5}, system={"dropout": 0.5})


# --- local: what leaves ------------------------------------------------------------------------------------------


class Sends(Plugin):
    """Sends numbers, counts and a mask, and looks at what arrives."""

    @hookimpl
    def end_local(self, client):
        return {
            "half": torch.tensor([3.0, 4.0], dtype=torch.float16),
            "numbers": torch.full((2, 2), 1.5 * (client.id + 1)),
            "counts": torch.tensor([client.id, 40, 1000]),
            "mask": torch.tensor([True, False, True]),
        }

    @hookimpl
    def accumulate(self, server, update):
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in update.payload.items()}
        assert dtypes == {"half": "float16", "numbers": "float32", "counts": "int64", "mask": "bool"}


SENDS = (f"{HERE}Sends", {})
LOCAL = {"clip": 0.05, "payload_clip": 2.0, "noise_multiplier": 0.25, **SEEDED}


@pytest.mark.parametrize("order", [1, -1])
def test_everything_that_leaves_is_clipped_and_noised_as_one_release(tmp_path, order):
    _, plain = tapped(tmp_path, SENDS)
    result, tap = tapped(tmp_path, *[SENDS, ("local-dp", LOCAL)][::order])
    assert records(result)[0]["failures"] == []
    start = initial(tmp_path)
    for client, end in models(plain).items():
        sent, generator = tap.sent[0, client], stream("local-dp", round=0, client=client)
        scale = 0.25 * math.sqrt(3)  # update, numbers, counts

        def noise(shape, generator=generator):
            return torch.randn(shape, generator=generator, dtype=torch.float64).numpy()

        moves, norm = clipped(start, end, 0.05)
        assert norm > 0.05
        for name, move in moves.items():
            expected = start[name] + move + scale * 0.05 * noise(move.shape)
            np.testing.assert_allclose(sent.model[name].double().numpy(), expected, rtol=2e-6, atol=2e-7)
        own = plain.sent[0, client].payload["sends"]
        for names in (["half", "numbers"], ["counts", "mask"]):
            values = {name: own[name].double().numpy() for name in names}
            norm = math.sqrt(sum(np.square(value).sum() for value in values.values()))
            for name, value in values.items():
                expected = value * min(1.0, 2.0 / norm) + scale * 2.0 * noise(value.shape)
                expected = {"counts": np.round(expected).clip(0), "mask": expected > 0.5}.get(name, expected)
                found = sent.payload["sends"][name].double().numpy()
                np.testing.assert_allclose(found, expected, rtol=1e-3 if name == "half" else 2e-6, atol=1e-6)


def test_what_stays_on_the_client_is_no_vector_of_the_release(tmp_path):
    """FedProto sends prototypes and a mask, and no model: two vectors."""
    pytest.importorskip("fedcore_fedproto")
    _, plain = tapped(tmp_path, "fedproto")
    _, tap = tapped(tmp_path, "fedproto", ("local-dp", LOCAL))
    for client in range(4):
        own, sent = (each.sent[0, client].payload["fedproto"]["prototypes"].double() for each in (plain, tap))
        noise = torch.randn(own.shape, generator=stream("local-dp", round=0, client=client), dtype=torch.float64)
        expected = own * min(1.0, 2.0 / own.norm()) + 0.25 * 2.0 * math.sqrt(2) * noise
        np.testing.assert_allclose(sent, expected, rtol=2e-6, atol=1e-6)


def test_what_a_client_says_of_itself_is_constant(tmp_path):
    options = {"partition": "quantity", "alpha": 0.3}
    result, tap = tapped(tmp_path, ("local-dp", LOCAL), **options)
    said = [(update.samples, update.steps, update.metrics) for update in tap.sent.values()]
    assert said == [(1, 1, {"losses": {}})] * 4
    assert records(result)[0]["losses"] == {}


def test_the_mean_of_local_releases_is_uniform(tmp_path):
    result, tap = tapped(tmp_path, ("local-dp", LOCAL), partition="quantity", alpha=0.3)
    ends = models(tap)
    close(weights(result), {name: np.mean([end[name] for end in ends.values()], axis=0) for name in ends[0]})


def test_local_secure_noise_has_the_promised_scale(tmp_path):
    _, tap = tapped(tmp_path, ("local-dp", {"clip": 0.01, "noise_multiplier": 500.0}), clients=1)
    start, (end,) = initial(tmp_path), models(tap).values()
    moved = np.concatenate([(end[name] - start[name]).ravel() for name in start])
    assert abs(moved.std() / 5 - 1) < 6.2 / math.sqrt(2 * len(moved))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "other", [("fedcd", {"bound_moves": False}), "scaffold", "feddc", "fedcp", "ditto", "feddyn"], ids=str
)
def test_methods_that_send_more_than_the_model_run_with_local_noise(tmp_path, other):
    pytest.importorskip(f"fedcore_{other if isinstance(other, str) else other[0]}")
    result = federate(tmp_path, other, "local-dp", **{**RUN, "rounds": 2})
    assert [record["failures"] for record in records(result) if "round" in record] == [[], []]


def test_fedcds_bound_on_moves_is_refused_next_to_noise_on_prototypes(tmp_path):
    pytest.importorskip("fedcore_fedcd")
    with raises(PluginConflictError, "'fedcd'", "'local-dp'", "--set", "fedcd.bound_moves"):
        federate(tmp_path, "fedcd", "local-dp", **RUN)


# --- epsilon -----------------------------------------------------------------------------------------------------


def reports(result, plugin):
    return [record["reports"][plugin] for record in records(result)]


@pytest.mark.parametrize(("sampling", "rate"), [("fixed", 1.0), ("poisson", 0.5)])
def test_epsilon_stands_in_every_record_and_in_the_summary(tmp_path, sampling, rate):
    options = {"sampling": sampling, "noise_multiplier": 2.0, "delta": 1e-3, **SEEDED}
    result = federate(tmp_path, ("dp", options), **{**RUN, "rounds": 3}, participation=0.5)
    expected = [
        {**spent_by("pld", 2.0, rate, number + 1, 1e-3), "delta": 1e-3, "noise": "seeded"} for number in range(3)
    ]
    assert reports(result, "dp") == expected
    assert json.loads((result.directory / "summary.json").read_text())["reports"] == {"dp": expected[-1]}
    assert 0 < expected[0]["epsilon"] < expected[2]["epsilon"]


def test_delta_is_below_one_in_n_by_default(tmp_path):
    (report,) = reports(federate(tmp_path, "dp", **{**RUN, "clients": 20}), "dp")
    assert report == {**spent_by("pld", 1.0, 1.0, 1, 20**-1.1), "delta": 20**-1.1, "noise": "secure"}
    assert default_delta(3) == 0.1


def test_a_clients_own_epsilon_is_that_of_whoever_took_part_most(tmp_path):
    result = federate(
        tmp_path,
        ("local-dp", {"noise_multiplier": 4.0, "accountant": "rdp"}),
        **{**RUN, "rounds": 5},
        participation=0.5,
    )
    cohorts = [record["cohort"] for record in records(result)]
    for number, report in enumerate(reports(result, "local-dp")):
        most = max(sum(client in cohort for cohort in cohorts[: number + 1]) for client in range(4))
        assert report == {**spent_by("rdp", 2.0, 1.0, most, 1e-5), "delta": 1e-5, "noise": "secure"}


@pytest.mark.parametrize("name", ["local-dp", "dp-sgd"])
def test_a_round_without_an_accepted_update_counts_for_every_client(tmp_path, name):
    """Its clients may have sent, but the round keeps nothing that would say who."""
    plugin, often = (name, {"noise_multiplier": 4.0, **SEEDED}), {**RUN, "rounds": 3}
    lost, _ = tapped(tmp_path, plugin, lost=(0, 1, 2, 3), **often, min_clients=0)
    assert [record["accepted"] for record in records(lost)] == [0, 0, 0]
    assert reports(lost, name) == reports(federate(tmp_path, plugin, **often), name)


@pytest.mark.parametrize("name", PLUGINS)
def test_without_noise_no_epsilon_is_claimed(tmp_path, name):
    (report,) = reports(federate(tmp_path, (name, {"noise_multiplier": 0.0}), **RUN), name)
    assert report["epsilon"] is None


# --- bits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLUGINS)
def test_clipping_alone_keeps_the_weights_by_samples(tmp_path, name):
    options = {"partition": "quantity", "alpha": 0.3}
    result, tap = tapped(tmp_path, (name, {"clip": 0.05, "noise_multiplier": 0.0}), **options)
    _, plain = tapped(tmp_path, **options)
    start, counts = initial(tmp_path), {k: plain.sent[0, k].samples for k in range(4)}
    moves = {client: clipped(start, end, 0.05)[0] for client, end in models(plain).items()}
    total = sum(counts.values())
    close(weights(result), {n: start[n] + sum(counts[k] * moves[k][n] for k in moves) / total for n in start})
    assert tap.sent[0, 1].samples == counts[1]


@pytest.mark.parametrize("name", PLUGINS)
def test_secure_noise_differs_from_run_to_run_and_seeded_noise_does_not(tmp_path, name):
    one, other = (model_bytes(federate(tmp_path, name, **RUN)) for _ in "ab")
    assert one != other
    one, other = (model_bytes(federate(tmp_path, (name, SEEDED), **{**RUN, "rounds": 2})) for _ in "ab")
    assert one == other


# --- refusals ----------------------------------------------------------------------------------------------------


def batch_norm(num_classes, input_shape):
    base = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU())
    return SplitModel(base, 16, num_classes)


@pytest.mark.parametrize("name", PLUGINS)
def test_shared_buffers_are_refused_with_the_remedy(tmp_path, name):
    out = tmp_path / "run"
    with raises(ConfigError, "running_mean", "--buffers"):
        federate(tmp_path, name, **RUN, model=f"{HERE}batch_norm", out=out)
    assert not out.exists()
    result = federate(tmp_path, name, **RUN, model=f"{HERE}batch_norm", buffers="local")
    assert records(result)[0]["failures"] == []


def of_bfloat16(num_classes, input_shape):
    base = nn.Sequential(nn.Flatten(), Bfloat16(64, 16))
    return SplitModel(base, 16, num_classes).bfloat16()


class Bfloat16(nn.Linear):
    def forward(self, x):
        return super().forward(x.bfloat16()).relu()


def test_parameters_to_which_the_mean_is_rounded_by_more_than_the_bound_are_refused(tmp_path):
    with raises(ConfigError, "'dp'", "bfloat16", "--precision", "float32"):
        federate(tmp_path, "dp", **RUN, model=f"{HERE}of_bfloat16")
    for plugin in (("dp", {"noise_multiplier": 0.0}), "local-dp"):
        assert records(federate(tmp_path, plugin, **RUN, model=f"{HERE}of_bfloat16"))[0]["failures"] == []


def implementing(hook):
    def body(self):
        return None

    mark = question if hook == "question" else hookimpl
    declared = {"aggregate": {"owns": ("*",)}, "mid_local_epoch": {"exchanges": Exchange(("*",), lambda epochs: ())}}
    return type(f"Has{hook.title().replace('_', '')}", (Plugin,), {hook: mark(body), **declared.get(hook, {})})


@pytest.mark.parametrize("hook", ["pre_aggregate", "accumulate", "aggregate", "mid_local_epoch", "question"])
@pytest.mark.parametrize("order", [1, -1])
def test_central_noise_refuses_who_sees_single_clients(tmp_path, hook, order):
    cls = implementing(hook)
    with raises(PluginConflictError, "'dp'", f"'{cls.__name__.lower()}'", hook):
        federate(tmp_path, *["dp", cls][::order], **RUN)


@pytest.mark.parametrize("hook", ["mid_local_epoch", "question"])
def test_local_noise_refuses_what_goes_past_it(tmp_path, hook):
    cls = implementing(hook)
    with raises(PluginConflictError, "'local-dp'", f"'{cls.__name__.lower()}'", hook):
        federate(tmp_path, cls, "local-dp", **RUN)


class StartsElsewhere(Plugin):
    starts = ("*",)

    @hookimpl
    def begin_local(self, client):
        return None


@pytest.mark.parametrize("z", [0.0, 1.0])
def test_local_clipping_refuses_clients_that_start_from_another_model(tmp_path, z):
    with raises(PluginConflictError, "'local-dp'"):
        federate(tmp_path, StartsElsewhere, ("local-dp", {"noise_multiplier": z}), **RUN)


@pytest.mark.parametrize("method", ["fednova", "qffl"])
def test_local_noise_is_refused_to_a_server_that_scales_by_the_steps_it_hides(tmp_path, method):
    with raises(PluginConflictError, "'local-dp'", method):
        federate(tmp_path, method, ("local-dp", {"noise_multiplier": 1.0}), **RUN)


@pytest.mark.parametrize("hook", ["pre_aggregate", "accumulate", "aggregate"])
def test_local_noise_lets_the_server_do_what_it_likes(tmp_path, hook):
    assert records(federate(tmp_path, implementing(hook), "local-dp", **RUN))[0]["failures"] == []


@pytest.mark.parametrize("name", PLUGINS)
@pytest.mark.parametrize(("option", "said"), [({"patience": 1}, "--patience"), ({"keep": "best"}, "--keep best")])
def test_no_round_is_chosen_by_figures_without_noise(tmp_path, name, option, said):
    held_out = {**RUN, "client_test_fraction": 0.2, **option}
    with raises(ConfigError, f"'{name}'", said):
        federate(tmp_path, name, **held_out)
    federate(tmp_path, (name, {"noise_multiplier": 0.0}), **held_out)


@pytest.mark.parametrize("name", PLUGINS)
def test_without_noise_nothing_is_promised_and_nothing_refused(tmp_path, name):
    plain = {"noise_multiplier": 0.0}
    result = federate(tmp_path, implementing("accumulate"), implementing("question"), (name, plain), **RUN)
    assert records(result)[0]["failures"] == []


class Momentum(Plugin):
    """A server optimizer in small."""

    @hookimpl
    def server_step(self, server, mean):
        return {name: value + (value - server.model[name]) for name, value in mean.items()}


def test_a_server_step_goes_behind_the_noise(tmp_path):
    start = initial(tmp_path)
    alone = weights(federate(tmp_path, ("dp", SEEDED), **RUN))
    both = weights(federate(tmp_path, ("dp", SEEDED), f"{HERE}Momentum", **RUN))
    close(both, {name: 2 * alone[name].double().numpy() - start[name] for name in start})
    with raises(PluginConflictError, "'dp'"):
        federate(tmp_path, f"{HERE}Momentum", "dp", **RUN)


def test_both_at_once(tmp_path):
    result = federate(tmp_path, "dp", "local-dp", **RUN)
    assert set(records(result)[0]["reports"]) == {"dp", "local-dp"}


def test_the_server_keeps_nothing_of_single_clients(tmp_path):
    result = federate(tmp_path, ("dp", SEEDED), **RUN)
    state = committed(result)
    assert "dp" not in state.plugins


def test_noise_beyond_all_numbers_is_told(tmp_path):
    """The model diverges in aggregation, after which nothing is trained that could say so."""
    record = records(federate(tmp_path, ("dp", {"clip": 1e20}), **RUN))[0]
    assert record["metrics"]["global"]["loss"] is None
    assert record["metrics"]["global"]["loss_reason"] == "the loss is not finite"


# --- next to malicious clients -----------------------------------------------------------------------------------

ATTACK = {"kind": "sign-flip", "strength": 50.0, "clients": [1, 3]}


def test_the_servers_clipping_bounds_clients_that_do_not_clip(tmp_path):
    """Malicious updates are turned round and 50 times as long; each counts for S in the sum, as an honest one does."""
    pytest.importorskip("fedcore_attacks")
    options = {"clip": 0.05, "noise_multiplier": 0.3, **SEEDED}
    result, tap = tapped(tmp_path, ("dp", options), ("attack", ATTACK))
    assert records(result)[0]["reports"]["attack"]["malicious"] == [1, 3]
    start = initial(tmp_path)
    ends = {
        client: {n: start[n] + (-50.0 if client in (1, 3) else 1.0) * (end[n] - start[n]) for n in start}
        for client, end in models(tap).items()
    }
    noise = noise_like(start, stream("dp/noise", round=0))
    close(weights(result), released(start, ends.values(), 0.3, 0.05, 4, noise))


@pytest.mark.parametrize("kind", ["label-flip", "scale", "noise"])
def test_attacks_that_read_no_honest_update_keep_the_guarantee(tmp_path, kind):
    pytest.importorskip("fedcore_attacks")
    result = federate(tmp_path, ("attack", {"kind": kind}), "dp", **RUN)
    assert records(result)[0]["accepted"] == 4


@pytest.mark.parametrize("options", [{"kind": "alie"}, {"kind": "ipm"}, {"kind": "mimic"}, {"kind": "replacement"}])
def test_attacks_that_read_honest_updates_are_refused(tmp_path, options):
    """An honest client's update would count in the malicious ones, too: more than S."""
    pytest.importorskip("fedcore_attacks")
    with raises(PluginConflictError, "'dp'", "'attack'", "all_updates"):
        federate(tmp_path, "dp", ("attack", options), **RUN)
    if options["kind"] == "replacement":
        federate(tmp_path, "dp", ("attack", {**options, "strength": 5.0}), **RUN)


def test_local_noise_does_not_hold_malicious_clients(tmp_path):
    """Noise on the client is the client's own protection: what arrives from a malicious one is 50 times as long."""
    pytest.importorskip("fedcore_attacks")
    honest = weights(federate(tmp_path, ("local-dp", LOCAL), **RUN))
    result, tap = tapped(tmp_path, ("local-dp", LOCAL), ("attack", ATTACK))
    start, sent = initial(tmp_path), models(tap)
    factors = {client: -50.0 if client in (1, 3) else 1.0 for client in sent}
    mean = {n: start[n] + sum(factors[c] * (sent[c][n] - start[n]) for c in sent) / 4 for n in start}
    for name, tensor in weights(result).items():
        np.testing.assert_allclose(tensor.double().numpy(), mean[name], rtol=1e-4, atol=1e-4)
        assert not torch.equal(tensor, honest[name])


def test_complex_numbers_are_refused_by_name(tmp_path):
    with raises(PluginContractError, "'waves'", "'z'"):
        federate(tmp_path, f"{HERE}Waves", "local-dp", **RUN)


class Waves(Plugin):
    @hookimpl
    def end_local(self, client):
        return {"z": torch.zeros(2, dtype=torch.complex64)}
