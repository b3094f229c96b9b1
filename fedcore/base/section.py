"""A section of the options of a run: fedcore's own, or a package's. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator

from fedcore.base import registry
from fedcore.base.errors import UnknownNameError


class Trait(Enum):
    """What holds for an option. A field's annotation has its traits."""

    NO_EFFECT = "says where and how a run is executed; does not change the bits of the results"
    LABEL = "describes a run to people"
    CHANGEABLE = "may change when a run is resumed"
    PARTITION = "determines, together with the seed, which client holds which samples"
    EVERYDAY = "belongs to the brief help"


NO_EFFECT, LABEL, CHANGEABLE, PARTITION, EVERYDAY = Trait


class Kind(str):
    """The kind of the objects that an option names, as the registry has it. The field's annotation has it."""


class Repeated(str):
    """The form of a value of an option that is given in parts, such as ``OPTION=VALUE``. The field's annotation has it.

    The flag can be repeated, for a list of texts. If a file has the option, too, its value stands in front of them.
    """


class Section(BaseModel):
    """Some options of a run, which the help of the command line shows in one panel.

    ``RunConfig`` inherits every section, those of packages too: ``self`` has all options of the run. A package names
    its section in the entry points of the group ``fedcore.options``, once for each option.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    panel: ClassVar[str]

    tries: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    """Settings of a package's options under which the conformance kit compares plugins with a run without them."""

    if TYPE_CHECKING:
        seed: int = 0
        """Functions that read a section may draw. The field is in :class:`TrainingOptions`, where the help has it."""

    @model_validator(mode="before")
    @classmethod
    def _known_options(cls, values: Any, info: ValidationInfo) -> Any:
        """Refuse an unknown option and suggest a similar one, as the command line does."""
        for name in values if isinstance(values, dict) else ():
            if name not in cls.model_fields:
                hint = f"(in {info.context})" if info.context else ""
                hint = "Several seeds are a sweep: fedcore_study.sweep(seeds=3)" if name == "seeds" else hint
                raise unknown_option(str(name), cls.model_fields, hint)
        return values

    def divided(self, dataset: Any, rows: Any) -> Any:
        """Return which training samples are divided among the clients.

        :param dataset: the :class:`fedcore.data.Dataset` as it was loaded.
        :param rows: positions of the samples that are not public, and that no other section left out: ascending (n,)
            int64, of NumPy.
        :raises ConfigError: names the option that does not fit the data set.
        """
        return rows

    def prepared(self, dataset: Any, partition: Any) -> Any:
        """Return the data set as models take it, such as normalised by the clients' training samples alone.

        :param dataset: the :class:`fedcore.data.Dataset` as it was loaded. Number and order of its samples stay.
        :param partition: a :class:`fedcore.data.Partition`. If it ``is_declared``, clients hold their own data.
        """
        return dataset

    def built(self, model: Any) -> None:
        """Act on a model that was built, before plugins configure it: on the server and wherever clients train.

        :param model: a :class:`fedcore.SplitModel`.
        """

    def scheduled(self, rate: float, number: int) -> float:
        """Return the local learning rate of round ``number``, from 0, in the place of a rate."""
        return rate

    def check(self, setup: Any) -> None:
        """Refuse what does not fit an option of the section, on the server and wherever clients train.

        :param setup: a :class:`fedcore.RunSetup`.
        :raises ConfigError: names the option.
        """

    def simulated(self, samples: Callable[[int], int], breaks: Collection[int]) -> Any:
        """Return the :class:`fedcore.System` that a run simulates; None if its clients are simply there.

        :param samples: returns the number of a client's training samples.
        :param breaks: the local epochs at whose start the cohort pauses for an exchange.
        """
        return None

    def settled(self, setup: Any, dataset: Any) -> Mapping[str, Any]:
        """Return the values of options that the set-up of the run decides, such as what ``auto`` stands for.

        A run's config.yaml records them.

        :param setup: a :class:`fedcore.RunSetup`.
        :param dataset: the :class:`fedcore.data.Dataset` of the run.
        """
        return {}

    def cautions(self, setup: Any) -> list[str]:
        """Return what the user should know when the run begins, such as an option without effect.

        :param setup: a :class:`fedcore.RunSetup`.
        """
        return []


def unknown_option(name: str, known: Collection[str], hint: str = "", *, kind: str = "option") -> UnknownNameError:
    """Return the error about an option that is not there. It names the package of fedcore that would bring it."""
    if package := registry.package_of("option", name):
        return UnknownNameError(kind, name, (), registry.is_in(repr(name), package))
    return UnknownNameError(kind, name, known, hint)
