"""The classifier's calibration: what is asked, what the classifier is retrained on, and by which options."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from fedcore import Answer, DivergedError, RoundFailedError, hookimpl
from fedcore_functional import CalibrationOptions, ClassifierCalibration, feature_statistics
from fedcore_testing import federate, model_bytes, weights
from tests.sentences import raises


class Server(SimpleNamespace):
    """Three classes of two features, and what a plugin does with them."""

    num_classes, feature_dim, client_sizes = 3, 2, torch.full((9,), 2)

    def note(self, text):
        self.notes = [*vars(self).get("notes", []), text]

    def network(self):
        return SimpleNamespace(encoder=nn.Identity())

    def generator(self, purpose):
        self.purpose = purpose
        return torch.Generator().manual_seed(0)

    def ask(self, clients, question, *, check):
        self.asked = question.__name__, clients
        for answer in self.answers:
            check(answer)
            yield answer

    def update_model(self, tensors):
        self.features, self.labels = tensors["features"], tensors["labels"]


def answer(client, features, labels):
    return Answer(client, feature_statistics(torch.tensor(features), torch.tensor(labels), 3))


class Method(ClassifierCalibration):
    name, stream = "method", "drawn"

    def retrained(self, server, features, labels):
        return {"features": features, "labels": labels}


METHOD = Method(CalibrationOptions(per_class=4))


def test_features_of_the_pooled_gaussians_retrain_the_classifier():
    """Class 0 is one point of two clients; of class 1 there is a line, of class 2 nothing."""
    one = answer(3, [[1.0, 2.0], [0.0, 5.0]], [0, 1])
    other = answer(8, [[1.0, 2.0], [4.0, 5.0]], [0, 1])
    server = Server(answers=[one, other])
    METHOD.post_train(server)
    assert server.notes == ["no client that answered holds class 2; the classifier is corrected without it"]
    assert (server.asked, server.purpose) == (("statistics", "all"), "drawn")
    assert server.labels.tolist() == [0] * 4 + [1] * 4
    torch.testing.assert_close(server.features[:4], torch.tensor([[1.0, 2.0]] * 4, dtype=server.features.dtype))
    line = server.features[4:]
    torch.testing.assert_close(line[:, 1], torch.full((4,), 5.0, dtype=line.dtype))
    assert line[:, 0].std() > 0


def test_without_an_answer_the_round_fails_by_the_plugins_name():
    with raises(RoundFailedError, "'method'"):
        METHOD.post_train(Server(answers=[]))


def test_an_answer_that_is_no_statistics_is_refused():
    server = Server(answers=[Answer(0, {"classes": torch.tensor([5])})])
    with raises(ValueError, "'counts'"):
        METHOD.post_train(server)


class NotesBatches(nn.Linear):
    """Notes the rows of each batch, and whether it is in training mode."""

    def forward(self, x):
        self.noted = [*getattr(self, "noted", []), (self.training, x.flatten())]
        return super().forward(x)


def test_every_epoch_of_the_retraining_takes_all_rows_in_an_order_of_its_own():
    classifier = NotesBatches(1, 3)
    server = Server(network=lambda: SimpleNamespace(classifier=classifier.eval()))
    plugin = ClassifierCalibration(CalibrationOptions(epochs=2, batch_size=3))
    plugin.retrained(server, torch.arange(8.0).unsqueeze(1), torch.arange(8) % 3)
    training, batches = zip(*classifier.noted)
    assert all(training), "for dropout"
    assert [len(rows) for rows in batches] == [3, 3, 2] * 2
    one, two = torch.cat(batches[:3]).tolist(), torch.cat(batches[3:]).tolist()
    assert sorted(one) == sorted(two) == list(range(8))
    assert one != two


class Retrains(ClassifierCalibration):
    """Retrains the classifier of digits on one feature for each class."""

    @hookimpl
    def post_train(self, server):
        server.update_model(self.retrained(server, torch.eye(10, 64).repeat(5, 1), torch.arange(10).repeat(5)))


def test_the_classifier_alone_is_retrained(tmp_path):
    how = {"epochs": 30, "lr": 0.5, "batch_size": 16}
    plain, result, again = federate(tmp_path), federate(tmp_path, (Retrains, how)), federate(tmp_path, (Retrains, how))
    before, after = weights(plain), weights(result)
    different = [name for name in before if not torch.equal(before[name], after[name])]
    assert sorted(different) == ["classifier.bias", "classifier.weight"]
    assert model_bytes(again) == model_bytes(result)
    logits = torch.eye(10, 64) @ after["classifier.weight"].T + after["classifier.bias"]
    assert logits.argmax(1).tolist() == list(range(10))


def test_a_retraining_that_diverges_keeps_the_model(tmp_path):
    with raises(DivergedError, "'retrains'", "retrains.lr", "1e+30"):
        federate(tmp_path, (Retrains, {"lr": 1e30}))
