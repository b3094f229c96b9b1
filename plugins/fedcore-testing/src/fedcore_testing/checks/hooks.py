"""Checks of single hook calls, all on one watched run with BatchNorm and dropout in the model."""

from __future__ import annotations

from fedcore_testing.checks.base import NotApplicable, check
from fedcore_testing.findings import Rule
from fedcore_testing.trial import Trial


def _require(trial: Trial, rule: Rule) -> None:
    watched = trial.watched
    problems = [f"hook {finding.hook} {finding.what}" for finding in watched.findings if finding.rule is rule]
    assert not problems, "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" if len(problems) > 4 else "")
    if watched.error is not None:
        raise NotApplicable("the watched run stopped: see check_trains_with_batch_norm")


@check("make it work on a model with BatchNorm and dropout, as most image models have.")
def check_trains_with_batch_norm(trial: Trial) -> None:
    """Two rounds on a model with BatchNorm and dropout, or on the given model, finish without failures."""
    if trial.watched.error is not None:
        raise trial.watched.error


@check(
    "mark what stays with detach(), copy before you edit, return new tensors or dataclasses.replace; declare in starts "
    "what a client starts from, and return it from begin_local; a further pass through the model in training mode "
    "renews BatchNorm's buffers: give functional_call copies of them."
)
def check_edits_nothing_in_place(trial: Trial) -> None:
    """No hook changes a batch, model, update or payload that it received."""
    _require(trial, Rule.INPUTS)


@check("change the model's layout in configure_model only; use client.freeze and client.add_parameters.")
def check_leaves_the_models_layout_alone(trial: Trial) -> None:
    """Only ``configure_model`` may replace modules, change their mode or freeze parameters."""
    _require(trial, Rule.MODEL)


@check("keep what lasts one round in client.scratch, what lasts in client.state or server.state.")
def check_keeps_nothing_on_self(trial: Trial) -> None:
    """The plugin's object holds no tensor and does not change after ``__init__``."""
    _require(trial, Rule.SELF)


@check(
    "keep it in client.state or server.state, and send it with end_local and broadcast; a cache of constants belongs "
    "to a function outside the class."
)
def check_shares_nothing_between_processes(trial: Trial) -> None:
    """Class, module and closures hold nothing that changes: server and clients are different processes."""
    assert not trial.watched.moved, f"{', '.join(trial.watched.moved[:3])} changed during a run"


@check(
    "write to client.scratch in begin_local or in a step; what lasts goes into client.state. Weights that have to stay "
    "as they were are copied: weight.detach().clone(); client.start and step.reference have those of the round's start."
)
def check_loses_no_notes(trial: Trial) -> None:
    """No hook writes to ``client.scratch`` after the client's round, or keeps there what the training overwrites."""
    _require(trial, Rule.SCRATCH)


@check("draw from client.generator or server.generator, or inside `with step.random(purpose):`.")
def check_uses_no_global_random_state(trial: Trial) -> None:
    """No hook draws from the global generators of torch, NumPy or Python."""
    _require(trial, Rule.RANDOM_STATE)


@check("leave global settings as they are; a `with` block that gives them back is fine.")
def check_changes_no_global_settings(trial: Trial) -> None:
    """No hook changes torch's default dtype, gradient mode, threads or determinism."""
    _require(trial, Rule.SETTINGS)


@check("use masks and torch.where instead of boolean indexing and branches; make constants once, in begin_local.")
def check_never_waits_for_the_device(trial: Trial) -> None:
    """The hooks of a step never wait for the device: no ``.item()``, no boolean index."""
    _require(trial, Rule.HOST_SYNC)


@check("return Loss(value) with a value of shape (), finite, with a gradient to the local model.")
def check_loss_terms_are_scalars_that_train(trial: Trial) -> None:
    """Every term is a finite number with a gradient."""
    _require(trial, Rule.LOSS)


@check("where you divide by a norm, add a small number to it or take its clamp(min=...): a gradient can be 0.")
def check_gradients_are_finite(trial: Trial) -> None:
    """What ``gradients`` returns is finite."""
    _require(trial, Rule.GRADIENTS)


@check("send finite tensors by name; JSON values and counts become tensors, the rest stays in the state.")
def check_sends_only_finite_tensors(trial: Trial) -> None:
    """Payloads, broadcasts and answers hold tensors, all finite."""
    _require(trial, Rule.PAYLOAD)


@check("send statistics; inputs stay on the client.")
def check_sends_no_samples(trial: Trial) -> None:
    """No upload contains a client's input."""
    _require(trial, Rule.SAMPLES)


@check("compute what changes in begin_round, accumulate or server_step; broadcast only reads server.state.")
def check_broadcast_is_a_function_of_the_state(trial: Trial) -> None:
    """``broadcast`` returns the same tensors when it is called again, for an evaluation or after another client."""
    _require(trial, Rule.BROADCAST)
