"""The optimizers: torch's to the bit, without torch's compiler; a run with each, and what refuses them."""

import textwrap

import numpy as np
import pytest
import torch
from torch import nn

from fedcore import ConfigError, RunConfig
from fedcore.base.identity import digest
from fedcore.client.optimizer import Optimizer, ParameterGroup
from fedcore_testing import Quadratic, W, analytic_federation, federate, interrupted, model_bytes, records, weights
from tests.sentences import raises
from tests.support import run_code


def parameters(seed: int) -> list[nn.Parameter]:
    stream = torch.Generator().manual_seed(seed)
    shapes = [(3, 2, 5, 5), (3,), (7, 4), ()]
    return [nn.Parameter(torch.randn(shape, generator=stream)) for shape in shapes]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-2])
def test_steps_are_torchs_to_the_bit(momentum, weight_decay):
    own, other = parameters(0), parameters(1)
    theirs, their_other = ([nn.Parameter(p.detach().clone()) for p in group] for group in (own, other))
    lean = Optimizer(
        RunConfig(momentum=momentum), [ParameterGroup(own, 0.1, weight_decay), ParameterGroup(other, 0.03, 0.5)]
    )
    groups = [
        {"params": theirs, "weight_decay": weight_decay},
        {"params": their_other, "lr": 0.03, "weight_decay": 0.5},
    ]
    check_steps(
        lean, torch.optim.SGD(groups, lr=0.1, momentum=momentum, fused=True), [*own, *other], [*theirs, *their_other]
    )


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-2])
def test_steps_of_adam_are_torchs_to_the_bit(optimizer, weight_decay):
    own = parameters(0)
    theirs = [nn.Parameter(p.detach().clone()) for p in own]
    config = RunConfig(optimizer=optimizer, beta1=0.8, beta2=0.95, epsilon=1e-6)
    lean = Optimizer(config, [ParameterGroup(own, 0.1, weight_decay)])
    cls = torch.optim.Adam if optimizer == "adam" else torch.optim.AdamW
    reference = cls(theirs, lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=weight_decay, fused=True)
    check_steps(lean, reference, own, theirs)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_on_half_of_the_bits_are_torchs_that_are_not_fused(dtype, momentum):
    """torch's fused SGD leaves all but the last numbers of such a tensor as they are."""
    own = [nn.Parameter(p.detach().to(dtype)) for p in parameters(0)]
    theirs = [nn.Parameter(p.detach().clone()) for p in own]
    lean = Optimizer(RunConfig(momentum=momentum), [ParameterGroup(own, 0.1, 1e-2)])
    reference = torch.optim.SGD(theirs, lr=0.1, momentum=momentum, weight_decay=1e-2, fused=False, foreach=False)
    check_steps(lean, reference, own, theirs)


def check_steps(lean, reference, own, theirs):
    lean.begin(lean.parameters)
    stream = torch.Generator().manual_seed(2)
    for step in range(6):
        lean.zero_grad()
        reference.zero_grad()
        for index, (a, b) in enumerate(zip(own, theirs, strict=True)):
            if index != 1 or step % 2 == 0:  # one parameter has no gradient at times
                a.grad = torch.randn(a.shape, generator=stream).to(a.dtype)
                b.grad = a.grad.clone()
        lean.step()
        reference.step()
        for a, b in zip(own, theirs, strict=True):
            assert torch.equal(a, b)


def test_no_parameters_no_step():
    optimizer = Optimizer(RunConfig(), [ParameterGroup([], 0.1, 0.0)])
    optimizer.step()
    assert not optimizer.state


def test_a_run_loads_no_compiler(tmp_path):
    script = f"""
        import sys
        from fedcore import RunConfig, run
        options = {{"rounds": 1, "local_epochs": 1, "clients": 3, "workers": 0}}
        for optimizer in ("sgd", "adamw"):
            run(RunConfig.create({{**options, "optimizer": optimizer, "out": {str(tmp_path)!r} + "/" + optimizer}}))
            print(sorted(name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor"))))
    """
    ran = run_code(textwrap.dedent(script))
    assert ran.stdout.splitlines()[-2:] == ["[]", "[]"], ran.stderr


# --- in a run ----------------------------------------------------------------------------------------------------


def adam_by_hand(w, centre, steps, *, lr, decay, decoupled):
    """Adam (Kingma, Ba, 2015, Algorithm 1) and AdamW (Loshchilov, Hutter, 2019, Algorithm 2) on w - centre."""
    m = v = np.zeros_like(w)
    for t in range(1, steps + 1):
        g = w - centre + (0 if decoupled else decay * w)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w = w * (1 - lr * decay) if decoupled else w
        w = w - lr * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return w


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_a_run_by_hand_and_each_round_begins_anew(tmp_path, optimizer):
    options = {**analytic_federation([[2.0, -1.0]], start=[1.0, 3.0]), "weight_decay": 0.1}
    result = federate(tmp_path, Quadratic, **options, rounds=2, local_epochs=3, lr=0.2, optimizer=optimizer)
    w = np.array([1.0, 3.0])
    for _ in range(2):
        w = adam_by_hand(w, np.array([2.0, -1.0]), 3, lr=0.2, decay=0.1, decoupled=optimizer == "adamw")
    np.testing.assert_allclose(weights(result)[W], w, rtol=1e-6)


FEW = {"dataset": "module:fedcore_testing.problems.few_digits", "lr": 0.001, "optimizer": "adamw", "workers": 0}


def test_a_stopped_run_has_the_same_bits_and_options_count(tmp_path):
    plain = model_bytes(federate(tmp_path, "ditto", **FEW))
    assert model_bytes(interrupted(tmp_path, "ditto", after=0, **FEW)) == plain
    assert model_bytes(federate(tmp_path, "ditto", **{**FEW, "optimizer": "adam"})) != plain
    assert model_bytes(federate(tmp_path, "ditto", **FEW, beta1=0.5)) != plain


@pytest.mark.slow
def test_workers_have_the_same_bits(tmp_path):
    one, two = (federate(tmp_path, "ditto", **{**FEW, "workers": workers}) for workers in (1, 2))
    assert model_bytes(one) == model_bytes(two)


@pytest.mark.parametrize("method", ["scaffold", "fednova", "feddc"])
def test_what_reads_gradients_out_of_sgds_steps_is_refused(tmp_path, method):
    with raises(ConfigError, method, "--optimizer"):
        federate(tmp_path, method, optimizer="adamw")


@pytest.mark.parametrize("method", ["feddyn", "moon", ("feddc", {"linear": False})], ids=str)
def test_other_methods_train_with_it(tmp_path, method):
    lines = records(federate(tmp_path, method, **FEW, rounds=2))
    assert [line["failures"] for line in lines] == [[], []]


def test_the_default_keeps_the_digest_of_a_run():
    assert digest(RunConfig(optimizer="sgd", beta1=0.9)) == digest(RunConfig())
    assert digest(RunConfig(optimizer="adam")) != digest(RunConfig())
