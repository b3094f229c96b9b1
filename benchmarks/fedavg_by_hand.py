"""FedAvg written out in plain PyTorch, to check fedcore against.

It imports nothing of fedcore and shares no code with it: the data files are read with NumPy, the models are
written out below and the round loop is twenty lines. Its random numbers are its own too, so a run and one of
fedcore's agree as two seeds do, not bit by bit. Give both the same ``--partition`` file: curves of two
partitions are not comparable. Example:

    fedcore data split --dataset fashion-mnist --data-dir data --out part.json
    python benchmarks/fedavg_by_hand.py --data-dir data --dataset fashion-mnist --partition part.json
    python benchmarks/fedavg_by_hand.py --data-dir data --dataset cifar10 --model simple-cnn --projection \\
        --local-epochs 5

MOON's setting on CIFAR-10 as its public code has it, data loader and partition included:

    python benchmarks/fedavg_by_hand.py --data-dir data --dataset cifar10 --model simple-cnn --projection \\
        --local-epochs 10 --rounds 100 --augment --drop-last

``--data-dir`` holds ``FashionMNIST/raw/*-ubyte`` (unpacked IDX files) and ``cifar10.npz`` (arrays ``x_train``
uint8 NHWC, ``y_train``, ``x_test``, ``y_test``). One line per round, then one line of JSON, on standard output.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 10


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Read an uncompressed IDX file of unsigned bytes: 2 zero bytes, type, rank, big-endian sizes, data."""
    raw = path.read_bytes()
    assert raw[:3] == b"\0\0\x08", f"{path} is not an IDX file of unsigned bytes"
    shape = np.frombuffer(raw, ">u4", count=raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def load(dataset: str, data_dir: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return train images (n, C, H, W) float32, normalised, train labels (n,) int64, and the same for test."""
    if dataset == "fashion-mnist":
        raw = data_dir / "FashionMNIST" / "raw"
        images = [read_idx(raw / f"{part}-images-idx3-ubyte")[:, None] for part in ("train", "t10k")]
        labels = [read_idx(raw / f"{part}-labels-idx1-ubyte") for part in ("train", "t10k")]
        mean, std = torch.tensor([0.2860]), torch.tensor([0.3530])
    else:
        with np.load(data_dir / "cifar10.npz") as arrays:
            images = [arrays[f"x_{part}"].transpose(0, 3, 1, 2) for part in ("train", "test")]
            labels = [arrays[f"y_{part}"].reshape(-1) for part in ("train", "test")]
        mean, std = torch.tensor([125.3, 123.0, 113.9]) / 255, torch.tensor([63.0, 62.1, 66.7]) / 255
    x = [torch.tensor(a).contiguous().float().div_(255) for a in images]
    x = [a.sub_(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1)) for a in x]
    y = [torch.tensor(a.astype(np.int64)) for a in labels]
    return x[0], y[0], x[1], y[1]


def dirichlet_partition(
    labels: npt.NDArray[np.int64], clients: int, alpha: float, seed: int, min_size: int = 10
) -> list[Tensor]:
    """Divide each class by Dir(alpha); a client that already holds the average gets no more.

    The numbers are drawn by NumPy's legacy generator in the order of the public code of MOON and NIID-Bench, so the
    same seed gives their partition.
    """
    rng = np.random.RandomState(seed)
    while True:
        parts: list[list[int]] = [[] for _ in range(clients)]
        for c in range(CLASSES):
            members = rng.permutation(np.flatnonzero(labels == c))
            q = rng.dirichlet(np.full(clients, alpha))
            q = q * [len(part) < len(labels) / clients for part in parts]
            cut = np.floor(np.cumsum(q / q.sum())[:-1] * len(members)).astype(int)
            for part, more in zip(parts, np.split(members, cut)):
                part.extend(more.tolist())
        if min(map(len, parts)) >= min_size:
            return [torch.tensor(part) for part in parts]


def build_model(name: str, projection: bool, channels: int, size: int) -> nn.Sequential:
    """Return the network with PyTorch's default initialisation, drawn from the global generator."""
    side = ((size - 4) // 2 - 4) // 2  # after two unpadded 5x5 convolutions, each followed by a 2x2 maximum
    width = (32, 64) if name == "fdcl-cnn" else (6, 16)
    encoder = [nn.Conv2d(channels, width[0], 5), nn.ReLU(), nn.MaxPool2d(2)]
    encoder += [nn.Conv2d(width[0], width[1], 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    flat = width[1] * side * side
    if name == "fdcl-cnn":
        return nn.Sequential(*encoder, nn.Linear(flat, 512), nn.ReLU(), nn.Linear(512, CLASSES))
    encoder += [nn.Linear(flat, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()]
    if not projection:
        return nn.Sequential(*encoder, nn.Linear(84, CLASSES))
    return nn.Sequential(*encoder, nn.Linear(84, 84), nn.ReLU(), nn.Linear(84, 256), nn.Linear(256, CLASSES))


def crop_and_flip(images: Tensor) -> Tensor:
    """Pad each image by 4 pixels of its reflection, cut a random window of its size, mirror every second one or so."""
    n, _, height, width = images.shape
    padded = F.pad(images, (4, 4, 4, 4), mode="reflect")
    result = torch.empty_like(images)
    draws = zip(*(torch.randint(high, (n,)).tolist() for high in (9, 9, 2)))
    for i, (top, left, mirrored) in enumerate(draws):
        window = padded[i, :, top : top + height, left : left + width]
        result[i] = window.flip(2) if mirrored else window
    return result


def train_client(model: nn.Module, x: Tensor, y: Tensor, mine: Tensor, args: argparse.Namespace) -> None:
    """Train ``model`` in place on the samples ``mine``, shuffled every epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    model.train()
    for _ in range(args.local_epochs):
        for batch in mine[torch.randperm(len(mine))].split(args.batch_size):
            if args.drop_last and len(batch) < args.batch_size:
                continue
            optimizer.zero_grad()
            images = crop_and_flip(x[batch]) if args.augment else x[batch]
            F.cross_entropy(model(images), y[batch]).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    hits = sum(int((model(a).argmax(1) == b).sum()) for a, b in zip(x.split(500), y.split(500)))
    return hits / len(y)


def main() -> None:
    parser = argparse.ArgumentParser(description="FedAvg in plain PyTorch, to check fedcore against")
    parser.add_argument("--dataset", choices=["fashion-mnist", "cifar10"], default="fashion-mnist")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--partition", type=Path, help="fedcore's partition file; without it one is drawn here")
    parser.add_argument("--clients", type=int, default=10, help="used when no partition file is given")
    parser.add_argument("--alpha", type=float, default=0.5, help="used when no partition file is given")
    parser.add_argument("--model", choices=["fdcl-cnn", "simple-cnn"], default="fdcl-cnn")
    parser.add_argument("--projection", action="store_true", help="simple-cnn with MOON's projection head")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--local-epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=1e-5)
    parser.add_argument("--augment", action="store_true", help="crop and flip the training images")
    parser.add_argument("--drop-last", action="store_true", help="leave out an epoch's last batch if it is smaller")
    parser.add_argument("--seed", type=int, default=0, help="of the partition drawn here, the model and the batches")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    x, y, x_test, y_test = load(args.dataset, args.data_dir)
    if args.partition:
        parts = [torch.tensor(part) for part in json.loads(args.partition.read_text(encoding="utf-8"))["train"]]
    else:
        parts = dirichlet_partition(y.numpy(), args.clients, args.alpha, args.seed)
    torch.manual_seed(args.seed)
    model = build_model(args.model, args.projection, x.shape[1], x.shape[2])
    total = sum(map(len, parts))
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{args.dataset} {args.model} {parameters:,} parameters, samples per client {[len(p) for p in parts]}")

    accuracies: list[float] = []
    seconds: list[float] = []
    for t in range(1, args.rounds + 1):
        start = time.perf_counter()
        average = {key: torch.zeros_like(value, dtype=torch.float64) for key, value in model.state_dict().items()}
        for part in parts:
            local = copy.deepcopy(model)
            train_client(local, x, y, part, args)
            for key, value in local.state_dict().items():
                average[key] += value.double() * (len(part) / total)
        model.load_state_dict(average)  # copies into the model's float32 tensors
        accuracies.append(accuracy(model, x_test, y_test))
        seconds.append(time.perf_counter() - start)
        print(f"round {t:3d}  test accuracy {accuracies[-1]:.4f}  {seconds[-1]:.1f} s", flush=True)

    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    result = {"parameters": parameters, "sizes": [len(p) for p in parts], "accuracy": accuracies}
    print(json.dumps({"settings": settings, **result, "seconds": [round(s, 2) for s in seconds]}))


if __name__ == "__main__":
    main()
