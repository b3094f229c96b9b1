"""Checks that compare whole runs: same bits, resume, neutral options, combination, engines, aggregation."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from fedcore import PluginContractError
from fedcore.engines import ClientSite
from fedcore.hooks import BUILTIN, create_plugin
from fedcore.tools import registry
from fedcore_testing.checks.base import NotApplicable, check, trial_of
from fedcore_testing.checks.runners import require_close, require_close_models
from fedcore_testing.companions import Bystander
from fedcore_testing.compare import ABSOLUTE, RELATIVE, require_same, require_same_states
from fedcore_testing.engines import Echoing, last_client_first
from fedcore_testing.federation import data_of, interrupted, model_bytes, name_of, records, weights
from fedcore_testing.fingerprint import fingerprint, random_states
from fedcore_testing.forked import forked_workers
from fedcore_testing.stub_plugins import TakesSecondPasses
from fedcore_testing.trial import HERE, Trial, finished, importable_in_workers

EVEN: dict[str, Any] = {"rounds": 1, "participation": 1.0, "client_test_fraction": 0.0}
"""One round in which all clients take part with the same number of samples."""

SEES_UPDATES = ("mid_local_epoch", "pre_aggregate", "weight", "accumulate", "aggregate", "server_step")
"""The server's hooks that see what one client or several sent in a round."""

LOST = {"timeout", "worker_lost", "session_lost"}
"""Kinds of failures that the engine causes, not the plugin."""


@check("read the message; `fedcore train --plugin NAME --debug` shows the traceback.")
def check_trains(trial: Trial) -> None:
    """Two rounds on digits end with every client's update accepted."""
    finished(trial.usual)


@check(
    "draw from client.generator, server.generator, step.random or task.random, never from a global generator; keep "
    "what lasts in client.state or server.state: in a cache, a class or a module the next run finds it."
)
def check_same_seed_gives_the_same_bits(trial: Trial) -> None:
    """A second run with the same seed gives the same bits, and global random state does not change."""
    usual = trial.usual
    before = random_states()
    with _other_random_state():
        started = random_states()
        again = trial.run()
        moved = [source for source, state in random_states().items() if state != started[source]]
    assert random_states() == before
    assert not moved, f"a run moves the global random state of {', '.join(moved)}"
    require_same(usual, again, "run twice with the same seed")


@contextlib.contextmanager
def _other_random_state() -> Iterator[None]:
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(1)
    np.random.seed(1)  # the legacy state, from which a plugin would draw
    torch.default_generator.manual_seed(1)
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])


@check("give Loss a function: weight 0 leaves it out. Or correct `neutral`; None where no option is FedAvg.")
def check_neutral_options_are_fedavg(trial: Trial) -> None:
    """With its ``neutral`` options the global model is FedAvg's, bit by bit."""
    neutral = trial.plugin.neutral
    if neutral is None:
        raise NotApplicable("the plugin declares no neutral options")
    ours, fedavg = trial.run(settings=dict(neutral)), trial_of(BUILTIN, overrides=trial.overrides).usual
    assert model_bytes(ours) == model_bytes(fedavg), (
        f"with {dict(neutral) or 'any options'} the global model differs from FedAvg's"
    )


@check("keep all that lasts in client.state and server.state: a resumed run has nothing else.")
def check_resumes_to_the_same_bits(trial: Trial) -> None:
    """A run that is stopped after a round and resumed has the bits of an uninterrupted one."""
    resumed = interrupted(trial.folder, (trial.name, trial.options), after=0, **trial.run_options())
    require_same(trial.usual, resumed, "stopped after round 0 and resumed")


@check("use your own namespace only: client.state, client.scratch, update.payload; no state of the model.")
def check_runs_beside_another_plugin(trial: Trial) -> None:
    """A second plugin without effect changes nothing, in either order, and its data stay unchanged."""
    for before, after in (((Bystander,), ()), ((), (Bystander,))):
        result = finished(trial.run(*after, before=before))
        where = "behind" if before else "before"
        assert model_bytes(result) == model_bytes(trial.usual), f"{where} a plugin without effect, the model differs"
        require_same_states(
            result, trial.usual, f"{where} a plugin without effect", but=[create_plugin(name_of(Bystander), {}).name]
        )


@check("let task_loss and local_loss only compute; count and collect in observe, and write client.state there.")
def check_a_second_pass_changes_nothing(trial: Trial) -> None:
    """Terms leave no trace: with a plugin that takes each pass twice and drops the second, the bits are the same."""
    if trial.plugin.implements("gradients"):
        raise NotApplicable("the plugin takes further passes itself")
    result = finished(trial.run(TakesSecondPasses))
    assert model_bytes(result) == model_bytes(trial.usual), "where passes are taken twice, the model differs"
    for twice, once in zip(records(result), records(trial.usual), strict=True):
        assert fingerprint(twice.get("losses")) == fingerprint(once.get("losses")), (
            f"where passes are taken twice, the losses of round {twice.get('round', 'post_train')} differ"
        )
    require_same_states(result, trial.usual, "where passes are taken twice")


@check(
    "weights sum to one: divide by the sum over the round's clients; average, do not add up. Where no "
    "client has a class, divide by counts.clamp(min=1) and keep the old row."
)
def check_mean_of_equal_updates_is_that_update(trial: Trial) -> None:
    """If two of three clients take part and send the same model, it becomes the global model.

    No client has the last class: its row in a layer with a row per class may stay as it is.
    """
    plugin = trial.plugin
    if plugin.server_optimizer:
        raise NotApplicable("a server optimizer steps elsewhere")
    if set(plugin.owns) & set(plugin.starts):
        raise NotApplicable("clients start from several models of the plugin's, and each gets its own clients' mean")
    engines: list[Echoing] = []

    def echoing(spec: ClientSite) -> Echoing:
        engines.append(Echoing(spec))
        return engines[-1]

    # A server's step can depend on the rounds before; clients that start from older models move from these.
    rounds = 1 if "staleness" in plugin.reads else 2
    options = {**EVEN, "participation": 0.67, "rounds": rounds, "partition": f"{HERE}without_last"}
    result = finished(trial.run(engine=echoing, **options))
    before, sent = map(list, zip(*engines[0].rounds, strict=True))
    if not sent[0]:
        raise NotApplicable("no parameters of the model are sent as they are")
    classes = data_of(result)[0].num_classes
    for old, expected, after in zip(before, sent, [*before[1:], weights(result)], strict=True):
        for name in expected:
            if expected[name].shape[:1] == (classes,):
                still = torch.isclose(after[name][-1], old[name][-1], rtol=RELATIVE, atol=ABSOLUTE)
                expected[name][-1] = torch.where(still, old[name][-1], expected[name][-1])
        require_close_models(trial, after, expected, "the clients sent the same model, but the global one differs in")


@check("take what you encode out of update.model, and send fewer bytes for it.")
def check_encoding_saves_bytes(trial: Trial) -> None:
    """A plugin that ``encodes`` parameters uploads less than the model."""
    if not trial.plugin.encodes:
        raise NotApplicable("the plugin encodes nothing")
    fedavg = trial_of(BUILTIN, overrides=trial.overrides).usual
    sent, whole = (finished(run).summary["bytes"]["up"] for run in (trial.usual, fedavg))
    assert sent < whole, f"the clients sent {sent} bytes, FedAvg's clients {whole}"


@check("sums and means must not depend on which update comes first; keep what belongs to one client under its id.")
def check_order_of_clients_does_not_matter(trial: Trial) -> None:
    """Another order of the updates and of ``server.cohort`` gives the same model and states, up to rounding."""
    if not any(map(trial.plugin.implements, SEES_UPDATES)):
        raise NotApplicable("no hook of the server sees updates")
    options = {**EVEN, "clients": 5}  # of three, two are nearest to each other: a tie that only the order can break
    straight, how = finished(trial.run(**options)), "with the clients in reverse order"
    with last_client_first():  # each keeps its id, so that values kept by client are the same
        reverse = finished(trial.run(**options))
    require_close(trial, reverse, straight, how, **options)


@check("define the class in a module that can be imported, keep nothing outside the states.", slow=True)
def check_worker_processes_give_the_same_bits(trial: Trial) -> None:
    """One worker process and two give the bits of this process."""
    for workers in (1, 2):
        with importable_in_workers(), forked_workers():
            result = finished(trial.run(workers=workers))
        require_same(trial.usual, result, f"with workers={workers} and in this process")


@check("define the class in a module that can be imported, keep nothing outside the states.", slow=True)
def check_every_engine_gives_the_same_bits(trial: Trial) -> None:
    """Every other engine that is installed gives the bits of this process.

    An engine that does not start, or that loses workers, says nothing about a plugin: a busy machine is enough. What a
    plugin does to worker processes is the object of the check before this one.
    """
    usual, (engines, silent) = trial.usual, _engines_that_simulate()
    for name in engines:
        try:
            with importable_in_workers():
                result = trial.run(engine=name, workers=None, min_clients=0)
        except Exception as error:
            if isinstance(error, PluginContractError) and error.plugin != name:
                raise
            silent.append(f"engine {name} does not run here: {type(error).__name__}: {error}")
            continue
        lost = {failure["kind"] for record in records(result) for failure in record["failures"]} & LOST
        if lost:
            silent.append(f"engine {name} does not run here: {', '.join(sorted(lost))}")
        else:
            require_same(usual, finished(result), f"with engine={name} and in this process")
    if silent:
        raise NotApplicable("; ".join(silent))


def _engines_that_simulate() -> tuple[list[str], list[str]]:
    """Return the engines but the local one, without those whose clients live elsewhere, in a federation.

    :returns: the engines' names, and a sentence on each engine that cannot be imported, which is no plugin's fault.
    :raises NotApplicable: none is installed.
    """
    simulators, silent = [], []
    for name in registry.available("engine"):
        try:
            if name != "local" and getattr(registry.resolve("engine", name), "simulates", True):
                simulators.append(name)
        except PluginContractError as error:
            silent.append(str(error))
    if not (simulators or silent):
        raise NotApplicable("no other engine that simulates clients is installed")
    return simulators, silent
