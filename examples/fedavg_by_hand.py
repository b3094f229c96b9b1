"""FedAvg in plain PyTorch: what ``fedcore train`` does without any plugin, to the same bits.

python examples/fedavg_by_hand.py [ROUNDS]
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedcore
from fedcore import generator
from fedcore.data import Dataset, load_dataset, make_partition
from fedcore.models import build_model

Weights = dict[str, Tensor]


def main(config: fedcore.RunConfig) -> Weights:
    """Train a global model and return its weights by name."""
    torch.set_num_threads(1)  # another number of threads adds in another order
    dataset = load_dataset(config.dataset)
    partition = make_partition(dataset, config)
    model, _ = build_model(
        config.model,
        num_classes=dataset.num_classes,
        input_shape=dataset.input_shape,
        seed=config.seed,
        projection=config.projection,
    )
    weights = copy(model.state_dict())
    for number in range(config.rounds):
        trained, samples = [], []
        for client in largest_first(draw_cohort(config, number), partition.train.sizes):
            model.load_state_dict(weights)
            train_client(model, dataset, partition.train[client].long(), config, number, client)
            trained.append(copy(model.state_dict()))
            samples.append(len(partition.train[client]))
        weights = average(trained, samples)
        model.load_state_dict(weights)
        print(f"round {number}: {accuracy(model, dataset):.1%}")
    return weights


def draw_cohort(config: fedcore.RunConfig, number: int) -> list[int]:
    """Return the clients of a round: drawn uniformly, without replacement."""
    size = max(1, round(config.participation * config.clients))
    drawn = torch.randperm(config.clients, generator=generator(config.seed, "cohort", round=number))
    return sorted(drawn[:size].tolist())


def largest_first(cohort: list[int], sizes: Tensor) -> list[int]:
    """Return the clients in the order in which the engine adds them up."""
    return sorted(cohort, key=lambda client: (-int(sizes[client]), client))


def train_client(
    model: nn.Module, dataset: Dataset, own: Tensor, config: fedcore.RunConfig, number: int, client: int
) -> None:
    """Run the local epochs of one client, in place.

    :param own: the client's positions in the training set, (n_k,).
    """
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=config.lr * config.lr_decay**number,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        fused=True,
    )
    model.train()
    for epoch in range(config.local_epochs):
        stream = generator(config.seed, f"shuffle/{epoch}", round=number, client=client)
        for batch in own[torch.randperm(len(own), generator=stream)].split(config.batch_size):
            _, logits = model(dataset.train.gather(batch))
            optimizer.zero_grad()
            F.cross_entropy(logits, dataset.train.labels[batch]).backward()
            optimizer.step()
    model.eval()


def average(models: list[Weights], samples: list[int]) -> Weights:
    """Return w = sum of n_k / n w_k, summed in float64 and rounded once."""

    def mean(name: str) -> Tensor:
        total = torch.zeros_like(models[0][name], dtype=torch.float64)
        for model, size in zip(models, samples, strict=True):
            total.add_(model[name].double(), alpha=size)
        return (total / sum(samples)).to(models[0][name].dtype)

    return {name: mean(name) for name in models[0]}


def accuracy(model: nn.Module, dataset: Dataset) -> float:
    """Return the fraction of the test set that the model gets right."""
    with torch.inference_mode():
        _, logits = model(dataset.test.gather(torch.arange(len(dataset.test))))
    return (logits.argmax(dim=1) == dataset.test.labels).double().mean().item()


def copy(weights: Weights) -> Weights:
    """Return weights that own their memory."""
    return {name: tensor.clone() for name, tensor in weights.items()}


if __name__ == "__main__":
    main(fedcore.RunConfig(model="mlp", participation=0.5, rounds=int(sys.argv[1]) if sys.argv[1:] else 10))
