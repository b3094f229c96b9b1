"""Known settings for ``fedcore train --preset NAME`` and ``fedcore.run(preset=NAME)``: options of a run by name.

A preset names no plugin, so that methods are compared on it: ``fedcore train --preset cifar10-moon --plugin moon``.
Options of a method that a paper chose by data set are in the comments.
"""

from __future__ import annotations

from typing import Any

CIFAR10_MOON: dict[str, Any] = {
    # Li et al., MOON, CVPR 2021, section 4.1. Momentum, weight decay and augmentation are of the authors' code,
    # github.com/QinbinLi/MOON: main.py, utils.py, and the example in its README, whose values these are.
    # The paper tunes moon.mu: 5 on CIFAR-10, 1 on CIFAR-100. The code's own split: --partition niid-bench --drop-last.
    "dataset": "cifar10",
    "model": "simple-cnn",
    "augment": True,
    "projection": True,
    "partition": "dirichlet",
    "alpha": 0.5,
    "clients": 10,
    "rounds": 100,
    "local_epochs": 10,
    "batch_size": 64,
    "lr": 0.01,
    "momentum": 0.9,
    "weight_decay": 1e-5,
}

CIFAR100_MOON: dict[str, Any] = {**CIFAR10_MOON, "dataset": "cifar100", "model": "resnet50"}

CIFAR10_FEDECCR: dict[str, Any] = {
    # Zeng et al., FedECCR, CollaborateCom 2023, Table 1: recipes/table_1.yaml of fedcore-fedeccr. The paper names no
    # momentum, weight decay or augmentation; MOON's are taken. So it is MOON's setting, evaluated every ten rounds.
    # Its FedProx has fedprox.mu 0.01, its MOON moon.mu 5, its FedECCR a temperature of 0.5 or 1.
    **CIFAR10_MOON,
    "eval_every": 10,
}

FMNIST_FDCL: dict[str, Any] = {
    # Liu & Fang, FDCL, Electronics 14(11), 2256, 2025, Table 1: recipes/table_1.yaml of fedcore-fdcl. The partition is
    # FLGo's, which the paper ran. alpha is 0.1 or 0.5. Its MOON has moon.mu 1 and moon.projection false.
    "dataset": "fashion-mnist",
    "model": "fdcl-cnn",
    "partition": "dirichlet-clients",
    "alpha": 0.1,
    "clients": 20,
    "participation": 0.5,
    "client_test_fraction": 0.1,
    "rounds": 100,
    "local_epochs": 5,
    "batch_size": 32,
    "lr": 0.01,
    "lr_decay": 0.999,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "eval_every": 10,
}

FMNIST_FEDCME: dict[str, Any] = {
    # Nie et al., FedCME, arXiv 2307.08574, Table II, the column of alpha 0.1, K 50, M 10: recipes/table_2.yaml
    # of fedcore-fedcme. The paper names neither rounds, momentum nor weight decay. FedCME has two classifier_layers.
    "dataset": "fashion-mnist",
    "model": "fedlab-cnn",
    "partition": "dirichlet",
    "alpha": 0.1,
    "clients": 50,
    "participation": 0.2,
    "rounds": 100,
    "local_epochs": 6,
    "batch_size": 32,
    "lr": 0.01,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "eval_every": 10,
}

CIFAR10_PFLLIB: dict[str, Any] = {
    # The defaults of PFLlib (Zhang et al., arXiv 2312.04992), read in its code, github.com/TsingZ0/PFLlib: main.py and
    # flcore/clients/clientbase.py of system, generate_Cifar10.py and utils/dataset_utils.py of dataset. Its partition
    # "dir" is NIID-Bench's; a quarter of each client's samples is held out. Its FedAvgCNN has the layers of fdcl-cnn.
    # PFLlib splits the official test set among the clients, too, and each of them has at least 40 samples. Here the
    # server keeps the test set, and 10 samples are enough.
    "dataset": "cifar10",
    "model": "fdcl-cnn",
    "partition": "niid-bench",
    "alpha": 0.1,
    "clients": 20,
    "client_test_fraction": 0.25,
    "rounds": 2000,
    "local_epochs": 1,
    "batch_size": 10,
    "drop_last": True,
    "lr": 0.005,
    "momentum": 0.0,
    "weight_decay": 0.0,
}

PFLLIB = CIFAR10_PFLLIB

FLOWER_FEDAVG: dict[str, Any] = {
    # Flower's quickstart with PyTorch, examples/quickstart-pytorch 1.1.13 for flwr 1.36, with 10 SuperNodes that all
    # train. Its network is MOON's. A fifth of each client's samples is its test part; the server tests, too.
    "dataset": "cifar10",
    "model": "simple-cnn",
    "partition": "iid",
    "clients": 10,
    "client_test_fraction": 0.2,
    "rounds": 3,
    "local_epochs": 1,
    "batch_size": 32,
    "lr": 0.1,
    "momentum": 0.9,
    "weight_decay": 0.0,
}

FLGO: dict[str, Any] = {
    # The defaults of flgo.init, FLGo 0.4.4: flgo/utils/fflow.py. Data, network and partition are the task's. A tenth of
    # each client's samples is held out, there for validation. learning_rate_decay is 0.998 and has no effect, as
    # lr_scheduler is -1: the default of lr_decay, 1.
    "participation": 0.2,
    "client_test_fraction": 0.1,
    "rounds": 20,
    "local_epochs": 5,
    "batch_size": 64,
    "lr": 0.1,
    "momentum": 0.0,
    "weight_decay": 0.0,
}

FEDLAB: dict[str, Any] = {
    # FedLab's first example, examples/standalone-mnist/launch_eg.sh, with fedlab 1.3.0: MNIST in shards of two classes.
    # FedLab counts clients the same, which is no option of a run; shards are equally large.
    "dataset": "mnist",
    "partition": "shards",
    "classes_per_client": 2,
    "clients": 100,
    "participation": 0.1,
    "rounds": 10,
    "local_epochs": 3,
    "batch_size": 128,
    "lr": 0.1,
    "momentum": 0.0,
    "weight_decay": 0.0,
}

FLUKE: dict[str, Any] = {
    # fluke's configs/exp.yaml and configs/fedavg.yaml at commit 224b7bb, for fluke-fl 0.8.1. Its clients keep their
    # momentum over the rounds; here it is new in each.
    "dataset": "mnist",
    "partition": "iid",
    "clients": 100,
    "participation": 0.2,
    "client_test_fraction": 0.2,
    "rounds": 100,
    "local_epochs": 10,
    "batch_size": 64,
    "lr": 0.01,
    "momentum": 0.9,
    "weight_decay": 1e-5,
}

PFL_CIFAR10: dict[str, Any] = {
    # pfl-research's benchmark, benchmarks/image_classification/configs/baseline.yaml at commit 2c77da1, for pfl 0.6.0:
    # 1,000 users of 50 samples, cohorts of 50. Clients count the same, and have equally many samples.
    "dataset": "cifar10",
    "partition": "iid",
    "clients": 1000,
    "participation": 0.05,
    "rounds": 1500,
    "local_epochs": 1,
    "batch_size": 10,
    "lr": 0.1,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "eval_every": 10,
}

DIGITS_QUICK: dict[str, Any] = {
    # Of no paper: differences between methods in seconds, on the digits that come with fedcore.
    "dataset": "digits",
    "model": "mlp",
    "partition": "dirichlet",
    "alpha": 0.1,
    "clients": 10,
    "client_test_fraction": 0.2,
    "rounds": 10,
    "local_epochs": 2,
}
