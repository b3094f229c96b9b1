"""The contracts of a data set, a model and a partitioner, each as one function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedcore import SplitModel
from fedcore.data import Dataset, Partitioner, Samples, load_dataset
from fedcore_testing.fingerprint import fingerprint, random_states


def check_dataset(dataset: Dataset | Callable[[Path | None], Dataset]) -> None:
    """Check a data set: labels 0..C-1 and finite samples. A loader has to return the same one each time.

    :raises AssertionError: names the defect.
    """
    loader = (lambda data_dir: dataset) if isinstance(dataset, Dataset) else dataset
    first = loader(None)
    before = random_states()  # only now: libraries that are imported for the first time may draw
    second = loader(None)
    _require_untouched(before, loader)
    assert isinstance(first, Dataset), f"{_name(loader)} returns {type(first).__name__}, expected fedcore.data.Dataset"
    for part, samples, again in (("train", first.train, second.train), ("test", first.test, second.test)):
        where, labels = f"{first.name}'s {part} set", samples.labels
        assert len(samples) == len(labels) > 0, f"{where} has {len(samples)} samples and {len(labels)} labels"
        assert labels.dtype == torch.int64, f"{where}: labels are {labels.dtype}, expected int64"
        assert 0 <= int(labels.min()) <= int(labels.max()) < first.num_classes, (
            f"{where}: labels from {int(labels.min())} to {int(labels.max())}, expected 0 to {first.num_classes - 1}"
        )
        positions = torch.arange(min(len(samples), 64))
        inputs = samples.gather(positions)
        held = _tensors_in(inputs)
        assert held, f"{where}: a batch of {type(inputs).__name__} holds no tensor"
        assert _same(held, again.gather(positions)), f"{where} differs when it is loaded again"
        moved = samples.to(torch.device("cpu"), torch.contiguous_format)
        assert _same(held, moved.gather(positions)), f"{where} differs when it is moved by to()"
        if isinstance(inputs, torch.Tensor):
            expected = (len(positions), *first.input_shape)
            assert tuple(inputs.shape) == expected, f"{where}: a batch is {tuple(inputs.shape)}, expected {expected}"
            chunks = map(samples.gather, torch.arange(len(samples)).split(1024))
            assert all(bool(chunk.isfinite().all()) for chunk in chunks), f"{where} has values that are not finite"


def check_model(
    factory: Callable[[int, tuple[int, ...]], SplitModel],
    *,
    num_classes: int = 10,
    input_shape: tuple[int, ...] = (1, 8, 8),
    samples: Samples | None = None,
) -> None:
    """Check a model factory: it returns a SplitModel of the right widths that trains, the same for the same seed.

    Parameters of the encoder and the classifier get a gradient from the logits. Those outside of both, such as a second
    head that a plugin trains, need none.

    :param samples: at least four, the inputs of a model that takes no tensors.
    :raises AssertionError: names the defect.
    """
    models = []
    for _ in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            models.append(factory(num_classes, input_shape))
    model = models[0]
    assert isinstance(model, SplitModel), f"{_name(factory)} returns {type(model).__name__}, expected SplitModel"
    states = [fingerprint(each.state_dict()) for each in models]
    assert states[0] == states[1], f"{_name(factory)} gives other weights for the same seed; draw from torch only"
    x = torch.randn(4, *input_shape, generator=torch.Generator().manual_seed(0))
    whole, single = (x, x.split(1)) if samples is None else _batches(samples)
    features, logits = model.train()(whole)
    assert features.shape == (4, model.feature_dim), (
        f"features of 4 samples are {tuple(features.shape)}, expected (4, {model.feature_dim})"
    )
    assert logits.shape == (4, num_classes), f"logits are {tuple(logits.shape)}, expected (4, {num_classes})"
    logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        used = parameter.grad is not None or not parameter.requires_grad
        assert used or not name.startswith(("encoder.", "classifier.")), f"{name!r} gets no gradient from the logits"
    model.eval()
    with torch.no_grad():
        together, alone = model(whole).logits, torch.cat([model(one).logits for one in single])
    assert torch.allclose(together, alone, atol=1e-4), "in eval mode a sample's logits depend on the rest of its batch"


def check_partitioner(
    partitioner: Partitioner, *, dataset: Dataset | None = None, clients: Sequence[int] = (1, 2, 7)
) -> None:
    """Check a partitioner: it returns disjoint, non-empty index lists, the same for the same arguments.

    :param dataset: the data set of which it assigns every other training sample; default digits of twenty sources.
    :param clients: the numbers of clients to check.
    :raises AssertionError: names the defect.
    """
    if dataset is None:
        digits = load_dataset("digits")
        dataset = replace(digits, sources=torch.arange(len(digits.train)) % 20)
    rows = np.arange(0, len(dataset.train), 2)
    labels = dataset.train.labels.cpu().numpy()[rows]
    own_labels = labels.copy()
    options: dict[str, Any] = {"alpha": 0.5, "seed": 3, "min_size": 1, "classes_per_client": 2}
    options |= {"dataset": dataset, "rows": rows}
    for count in clients:
        before = random_states()
        parts, again = partitioner(labels, count, **options), partitioner(labels, count, **options)
        _require_untouched(before, partitioner)
        parts, again = ([*each.values()] if isinstance(each, Mapping) else each for each in (parts, again))
        where = f"{_name(partitioner)} for {count} clients"
        assert (labels == own_labels).all(), f"{where} edits the labels"
        assert len(parts) == count, f"{where} returns {len(parts)} parts"
        assert all(len(part) for part in parts), f"{where} leaves client {[len(p) for p in parts].index(0)} empty"
        assigned = np.concatenate(parts)
        assert assigned.dtype.kind in "iu", f"{where} returns {assigned.dtype}, expected positions"
        assert 0 <= assigned.min() <= assigned.max() < len(labels), f"{where} returns positions that do not exist"
        shared = getattr(partitioner, "shares_samples", False) is True
        assert shared or len(np.unique(assigned)) == len(assigned), f"{where} assigns a sample twice"
        assert fingerprint(parts) == fingerprint(again), f"{where} assigns otherwise when it is asked again"


def _batches(samples: Samples) -> tuple[Any, list[Any]]:
    """Return the first four samples as one batch and as four batches."""
    positions = torch.arange(4)
    return samples.gather(positions), [samples.gather(one) for one in positions.split(1)]


def _same(tensors: list[torch.Tensor], batch: Any) -> bool:
    return bool(fingerprint(tensors) == fingerprint(_tensors_in(batch)))


def _tensors_in(value: Any, depth: int = 6) -> list[torch.Tensor]:
    """Return the tensors of a batch in a fixed order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if depth == 0:
        return []
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else None
    inner = vars(value).values() if inner is None and hasattr(value, "__dict__") else inner
    return [tensor for item in inner or () for tensor in _tensors_in(item, depth - 1)]


def _require_untouched(before: dict[str, Any], function: object) -> None:
    for source, state in random_states().items():
        assert state == before[source], f"{_name(function)} draws from {source}'s global random state"


def _name(function: object) -> str:
    return getattr(function, "__name__", repr(function))
