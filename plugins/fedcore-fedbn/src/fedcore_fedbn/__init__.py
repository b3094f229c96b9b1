"""FedBN as a fedcore plugin."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedcore import Plugin, RunSetup, SplitModel, hookimpl

__all__ = ["FedBN", "batch_norm_names"]


class FedBN(Plugin):
    """FedBN (Li, Jiang, Zhang, Kamp, Dou, ICLR 2021, arXiv 2102.07623).

    Every client keeps its BatchNorm layers: scale, shift and running statistics. All other layers are averaged
    (Algorithm 1). Client k is evaluated with its own BatchNorm layers in the averaged model.
    """

    @hookimpl
    def personal_parameters(self, model: SplitModel) -> list[str]:
        """Keep the BatchNorm layers on each client."""
        return batch_norm_names(model)

    @hookimpl
    def check_run(self, setup: RunSetup) -> None:
        """Tell of a model without BatchNorm."""
        if not batch_norm_names(setup.model):
            setup.note(
                self.name,
                "this model has no BatchNorm layer, so every layer is averaged, as in FedAvg; choose a --model with "
                "BatchNorm",
            )


def batch_norm_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers of all BatchNorm layers, in the model's order (Algorithm 1).

    The type of a layer decides, not its name: BatchNorm of 1 to 3 dimensions, synchronised or lazy. InstanceNorm,
    LayerNorm and GroupNorm are no BatchNorm.

    >>> batch_norm_names(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    ['1.weight', '1.bias', '1.running_mean', '1.running_var', '1.num_batches_tracked']
    """
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        for name in module.state_dict()
    ]
