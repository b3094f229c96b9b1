"""The lean SGD: torch's to the bit, without torch's compiler."""

import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from fedcore.client.optimizer import SGD, ParameterGroup


def parameters(seed: int) -> list[nn.Parameter]:
    stream = torch.Generator().manual_seed(seed)
    shapes = [(3, 2, 5, 5), (3,), (7, 4), ()]
    return [nn.Parameter(torch.randn(shape, generator=stream)) for shape in shapes]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-2])
def test_steps_are_torchs_to_the_bit(momentum, weight_decay):
    own, other = parameters(0), parameters(1)
    theirs, their_other = ([nn.Parameter(p.detach().clone()) for p in group] for group in (own, other))
    lean = SGD([ParameterGroup(own, 0.1, weight_decay), ParameterGroup(other, 0.03, 0.5)], momentum)
    lean.velocities = {p: torch.zeros_like(p) for p in lean.parameters}
    groups = [
        {"params": theirs, "weight_decay": weight_decay},
        {"params": their_other, "lr": 0.03, "weight_decay": 0.5},
    ]
    reference = torch.optim.SGD(groups, lr=0.1, momentum=momentum, fused=True)
    stream = torch.Generator().manual_seed(2)
    for step in range(6):
        lean.zero_grad()
        reference.zero_grad()
        for index, (a, b) in enumerate(zip([*own, *other], [*theirs, *their_other], strict=True)):
            if index != 1 or step % 2 == 0:  # one parameter has no gradient at times
                a.grad = torch.randn(a.shape, generator=stream)
                b.grad = a.grad.clone()
        lean.step()
        reference.step()
        for a, b in zip([*own, *other], [*theirs, *their_other], strict=True):
            assert torch.equal(a, b)


def test_no_parameters_no_step():
    SGD([ParameterGroup([], 0.1, 0.0)], 0.9).step()


def test_a_run_loads_no_compiler(tmp_path):
    script = f"""
        import sys
        from fedcore import RunConfig, run
        run(RunConfig.create({{"rounds": 2, "clients": 3, "workers": 0, "out": {str(tmp_path / "run")!r}}}))
        print(sorted(name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor"))))
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"
