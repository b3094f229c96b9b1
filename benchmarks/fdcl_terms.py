"""What each of FDCL's terms does in one round from a run's last checkpoint.

    python benchmarks/fdcl_terms.py RUN_DIRECTORY --clients 3 4 5

The run is one of FDCL without momentum, weight decay and augmentation, as its paper's recipes; it need not be finished.
From its global model w_g and each client's previous model the clients train once more by plain SGD, with no term, with
L_e or L_c alone (Algorithm 2, lines 8 and 9) and with both, on the same batches. One line per choice, means over the
clients: how far a model moves, |w - w_g|, the cosine of its logits and of its features to w_g's on the client's
samples, and its cross-entropy there; then the test accuracy of the models' mean.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from fedcore.base.config import RunConfig
from fedcore.base.tensors import copy_into
from fedcore.client import evaluate
from fedcore.client.working_model import all_outputs
from fedcore.data import Dataset
from fedcore.data.client_data import ClientData
from fedcore.models.split import Outputs
from fedcore.runs.run import Run
from fedcore_export.own_model import own_model
from fedcore_fdcl.equations import classifier_loss, encoder_loss
from fedcore_fdcl.plugin import FDCLOptions
from fedcore_testing.federation import data_of

CPU = torch.device("cpu")

TERMS = {"none": (False, False), "L_e": (True, False), "L_c": (False, True), "both": (True, True)}


def train(
    received: nn.Module,
    data: ClientData,
    outputs: Outputs,
    previous: Outputs,
    terms: tuple[bool, bool],
    lr: float,
    config: RunConfig,
    options: FDCLOptions,
    seed: int,
) -> nn.Module:
    """Return the model after local training; ``outputs`` and ``previous`` are the frozen features and logits."""
    mu, tau = options.mu, options.temperature
    model = copy.deepcopy(received).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    batches = torch.Generator().manual_seed(seed)
    for _ in range(config.local_epochs):
        for batch in torch.randperm(len(data.labels), generator=batches).split(config.batch_size):
            features, logits = model(data.inputs(batch))
            loss = F.cross_entropy(logits, data.labels[batch])
            if terms[0]:
                loss = loss + mu * encoder_loss(
                    features, outputs.features[batch], previous.features[batch], temperature=tau
                )
            if terms[1]:
                compared = [logits, outputs.logits[batch], previous.logits[batch]]
                if options.outputs == "probabilities":
                    compared = [each.softmax(dim=1) for each in compared]
                loss = loss + mu * classifier_loss(*compared, temperature=tau)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description="FDCL's terms in one round from a checkpoint")
    parser.add_argument("run", type=Path, metavar="RUN_DIRECTORY")
    parser.add_argument("--clients", type=int, nargs="+", required=True, help="that train; all took part before")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    run = Run.open(args.run, allow_code=False)
    state, config = run.last_state(print), run.config
    options = FDCLOptions(**config.plugins["fdcl"])
    received = copy.deepcopy(run.setup.model).eval()
    copy_into(received.state_dict(), state.model)
    samples, partition = data_of(args.run)
    lr = config.learning_rate(state.round)
    print(f"after round {state.round}, test accuracy {accuracy(received, samples):.2f} %\n")
    print("| terms | moved | cosine of logits | cosine of features | cross-entropy | mean model's test % |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    clients = []
    for client in args.clients:
        own, took_part = own_model(run, client, print)
        if not took_part:
            parser.error(f"client {client} has not taken part yet")
        data = ClientData(samples.train, partition.train[client], CPU)
        clients.append((client, data, all_outputs(received, data), all_outputs(own, data)))
    total = sum(len(data.labels) for _, data, *_ in clients)
    start = nn.utils.parameters_to_vector(received.parameters()).detach()
    for name, terms in TERMS.items():
        figures, mean = torch.zeros(4), torch.zeros_like(start)
        for client, data, outputs, previous in clients:
            model = train(received, data, outputs, previous, terms, lr, config, options, seed=client)
            after = nn.utils.parameters_to_vector(model.parameters()).detach()
            features, logits = all_outputs(model, data)
            figures += torch.stack(
                [
                    (after - start).norm(),
                    F.cosine_similarity(logits, outputs.logits).mean(),
                    F.cosine_similarity(features, outputs.features).mean(),
                    F.cross_entropy(logits, data.labels),
                ]
            )
            mean += len(data.labels) / total * after
        averaged = copy.deepcopy(received)
        nn.utils.vector_to_parameters(mean, averaged.parameters())
        columns = [f"{value:.3f}" for value in (figures / len(clients)).tolist()]
        print(f"| {name} | {' | '.join(columns)} | {accuracy(averaged, samples):.2f} |", flush=True)


def accuracy(model: nn.Module, dataset: Dataset) -> float:
    return 100 * evaluate(model, dataset.test, dataset.num_classes, CPU).rates()["accuracy"]


if __name__ == "__main__":
    main()
