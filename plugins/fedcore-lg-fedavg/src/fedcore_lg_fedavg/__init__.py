"""LG-FedAvg as a fedcore plugin."""

from __future__ import annotations

from fnmatch import fnmatchcase

from pydantic import Field, field_validator

from fedcore import ConfigError, Plugin, PluginOptions, SplitModel, hookimpl
from fedcore_functional import check_layers, names_of_last_layers

__all__ = ["LGFedAvg", "LGFedAvgOptions", "local_names"]


class LGFedAvgOptions(PluginOptions):
    """Options of LG-FedAvg."""

    shared: int | list[str] = Field(
        default=1,
        description="Number of global layers, counted from the output; or patterns over the model's names, such as "
        "[classifier.*]. 0 shares nothing; [*] is FedAvg.",
    )

    _check_shared = field_validator("shared")(check_layers)


class LGFedAvg(Plugin[LGFedAvgOptions]):
    """LG-FedAvg (Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, 2020, arXiv 2001.01523).

    Client m keeps its representation, the first layers l_m. The last layers g are sent, and averaged by samples. Both
    are trained together by SGD. Client m's model is (l_m, g).
    """

    neutral = {"shared": ["*"]}

    @hookimpl
    def personal_parameters(self, model: SplitModel) -> list[str]:
        """Keep l_m on each client."""
        return local_names(model, self.options.shared)


def local_names(model: SplitModel, shared: int | list[str]) -> list[str]:
    """Return the names of the parameters and buffers of the local layers: all but the shared ones (Algorithm 1).

    :param shared: the number of shared layers at the model's end, or patterns over the model's names.
    :raises ConfigError: the model has fewer layers, or no name matches a pattern.
    """
    names = list(model.state_dict())
    if isinstance(shared, int):
        kept = names_of_last_layers(model, shared, option="lg-fedavg.shared")
        return [name for name in names if name not in kept]
    for pattern in shared:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"lg-fedavg.shared: {pattern!r} matches none of the model's names ({', '.join(names)})")
    return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in shared)]
