# --8<-- [start:conformance]
"""FedProto keeps fedcore's contract, and computes what its paper says."""

from __future__ import annotations

import torch

from fedcore.models import Outputs
from fedcore_fedproto import FedProto
from fedcore_fedproto.equations import NearestPrototype
from fedcore_functional import add_prototypes, mean_over_holders, prototype_distance
from fedcore_testing import federate, parametrize_with_checks, records


@parametrize_with_checks([FedProto])
def test_conformance(plugin, check):
    check(plugin)


# --8<-- [end:conformance]
# --8<-- [start:numbers]
def test_the_distance_of_a_batch_by_hand():
    z = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    prototypes, known = torch.tensor([[0.0, 0.0], [9.0, float("nan")]]), torch.tensor([True, False])
    distance = prototype_distance(z, torch.tensor([0, 1]), prototypes, known)
    assert distance.item() == 1.25  # (1 + 4 + 0 + 0) / 4: the class of the second sample is not known
    distance.backward()
    torch.testing.assert_close(z.grad, torch.tensor([[0.5, 1.0], [0.0, 0.0]]))


def test_prototypes_are_averaged_over_holders_whatever_their_samples():
    one, three = ({"prototypes": torch.tensor([[x, 0.0]]), "known": torch.tensor([True])} for x in (0.0, 4.0))
    means = mean_over_holders(add_prototypes(add_prototypes({}, one), three))
    torch.testing.assert_close(means["prototypes"], torch.tensor([[2.0, 0.0]]))  # the authors' code, not (3, 0)


def test_the_nearest_known_prototype_is_predicted():
    prototypes = torch.tensor([[0.0, 0.0], [4.0, 0.0], [1.0, 0.0]])
    model = NearestPrototype(lambda x: Outputs(x, None), prototypes, torch.tensor([True, True, False]))
    logits = model(torch.tensor([[1.0, 0.0], [3.0, 0.0]])).logits
    assert logits.argmax(dim=1).tolist() == [0, 1]  # the nearest of all, class 2, is not known
    assert logits[:, :2].tolist() == [[-1.0, -9.0], [-9.0, -1.0]]
    assert list(model.state_dict()) == ["prototypes", "known"]  # an export of the weights holds them


# --8<-- [end:numbers]
# --8<-- [start:runs]
def test_prototypes_travel_and_models_do_not(tmp_path):
    result = federate(tmp_path, FedProto, rounds=3, client_test_fraction=0.2)
    first, *later = records(result)
    assert "fedproto.distance" not in first["losses"]
    assert all(record["losses"]["fedproto.distance"] > 0 for record in later)
    senders = result.summary["bytes"]["per_round"]["by_plugin"]
    assert list(senders) == ["fedproto"]  # there is no "model"
    assert senders["fedproto"]["up"] == 3 * (10 * 64 * 4 + 10)  # clients * (classes * width * float32 + known)
    assert result.metrics["personal"]["accuracy"] > 0.5


def test_a_stronger_pull_keeps_features_nearer_to_the_prototypes(tmp_path):
    distances = [
        records(federate(tmp_path, (FedProto, {"lambda": weight}), rounds=2))[1]["losses"]["fedproto.distance"]
        for weight in (0.01, 1.0, 10.0)
    ]
    assert distances[0] > distances[1] > distances[2]
    # --8<-- [end:runs]
