"""pfl-research's accountants of privacy, and whole runs of its algorithms."""

from __future__ import annotations

import copy
import logging
import warnings
from typing import Any

import torch
import whole
from cases import Fixture
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.algorithm.fedprox import FedProx, FedProxParams
from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.user_state import AbstractUserStateStorage
from pfl.exception import UserNotFoundError
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from pfl.privacy import PLDPrivacyAccountant, RDPPrivacyAccountant

warnings.simplefilter("ignore")
C = Fixture("pfl", "pfl-research", "pfl", source="run of the library's accountants and algorithms")
C.difference(
    "reversed sign of c_i",
    "library",
    "pfl-research adds the client's movement over K eta to c_i, Option II subtracts it, since the movement is against "
    "the gradient.",
    follows="fedcore (Karimireddy et al., Algorithm 1, Option II)",
    where="pfl/algorithm/scaffold.py: SCAFFOLD.train_one_user",
)
for kind, accountant in (("pld", PLDPrivacyAccountant), ("rdp", RDPPrivacyAccountant)):
    for rounds, rate, epsilon, delta, noise in (
        (1000, 0.01, 2, None, 0.76),
        (100, 0.1, None, 1e-8, 0.5),
        (500, 0.02, None, 1e-6, 1.1),
    ):
        made = accountant(
            num_compositions=rounds,
            sampling_probability=rate,
            mechanism="gaussian",
            epsilon=epsilon,
            delta=delta,
            noise_parameter=noise,
            noise_scale=1.0,
        )
        said = f"test_privacy_accountant: q {rate}, {rounds} rounds, z {noise} ({kind})"
        C.add(
            f"{kind.upper()} epsilon",
            said,
            "epsilon",
            float(made.epsilon),
            noise=noise,
            rate=rate,
            rounds=rounds,
            delta=float(made.delta),
            accountant=kind,
            tolerance=0.02,
        )


# whole runs of its backend that simulates; each round has two users
PAIRS = [[0, 1], [2, 3], [0, 3], [1, 2]]


class Model(torch.nn.Module):
    """The network of ``whole``, with the loss that pfl-research asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = whole.model()

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy."""
        return torch.nn.functional.cross_entropy(self.layers(x), y)

    def metrics(self, *_: Any) -> dict[str, Any]:
        """Return none."""
        return {}


class Memory(AbstractUserStateStorage):
    """The users' states: DiskUserStateStorage does not read its own files under torch 2.6 and later."""

    def __init__(self) -> None:
        self.states: dict[tuple[str, str], Any] = {}

    def load_state(self, user: str, key: str) -> Any:
        """Return a state."""
        if (user, key) not in self.states:
            raise UserNotFoundError(user)
        return self.states[user, key]

    def save_state(self, state: Any, user: str, key: str) -> None:
        """Keep a copy of a state."""
        self.states[user, key] = copy.deepcopy(state)

    def clear_states(self) -> None:
        """Forget all."""
        self.states.clear()


def whole_run(algorithm: Any, kind: Any, *, momentum: float = 0.0, samples: bool = True, **options: Any) -> Any:
    """Return the weights after a whole run."""
    users = iter([user for pair in PAIRS for user in pair])
    data = FederatedDataset(lambda user: Dataset(list(whole.samples(user)), user_id=str(user)), lambda: next(users))
    network = Model()
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0, momentum=momentum))
    algorithm().run(
        kind(
            central_num_iterations=len(PAIRS),
            evaluation_frequency=10**6,
            train_cohort_size=2,
            val_cohort_size=0,
            **options,
        ),
        SimulatedBackend(data, data, [WeightByDatapoints()] if samples else []),
        model,
        NNTrainHyperParams(local_batch_size=None, local_num_epochs=whole.EPOCHS, local_learning_rate=whole.LR),
    )
    return whole.final(network)


logging.disable(logging.CRITICAL)
average = (FederatedAveraging, NNAlgorithmParams)
for name, value, plugins, equal in (
    ("FedAvg, WeightByDatapoints", whole_run(*average), {}, False),
    ("FedAvg, clients the same", whole_run(*average, samples=False), {}, True),
    ("FedAvg, central momentum .5", whole_run(*average, momentum=0.5), {"fedavgm": {"beta": 0.5}}, False),
    ("FedProx, mu .4", whole_run(FedProx, FedProxParams, mu=0.4), {"fedprox": {"mu": 0.4}}, False),
):
    whole.add(C, name, value, plugins, cohorts=PAIRS, equal=equal)
storage = Memory()
value = whole_run(
    SCAFFOLD,
    SCAFFOLDParams,
    samples=False,
    population=4,
    use_gradient_as_control_variate=False,
    user_state_storage=storage,
)
plugins = {"scaffold": {"weighting": "uniform"}}
whole.add(C, "SCAFFOLD, Option II", value, plugins, cohorts=PAIRS, differs="reversed sign of c_i")
C.write()
