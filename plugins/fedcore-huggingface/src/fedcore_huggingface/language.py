"""Texts whose next tokens are predicted: blocks of tokens, and the task ``next-token``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from fedcore import Counts, DataError
from fedcore.data import Dataset, TensorSamples
from fedcore_tasks import Targets, TaskFigure

IGNORED = -100
"""The label of a position that is no token of a text, as in transformers."""


class TokenBlocks(TensorSamples):
    """Blocks of tokens of one length, (n, L) int64; ``input_shape`` of a data set of them is (vocabulary, L).

    Labels (n, L) are the tokens themselves, and :data:`IGNORED` where a block is filled up.
    """

    kind: ClassVar[str] = "tokens"

    @classmethod
    def of(cls, texts: Iterable[Sequence[int]], size: int, end: int) -> Self:
        """Join texts, each followed by the token ``end``, and cut them into blocks of ``size`` tokens.

        The last block is filled up with ``end``, and its labels there are :data:`IGNORED`. A last block of one token
        is left out, as it has no next one.
        """
        joined = np.fromiter(itertools.chain.from_iterable((*text, end) for text in texts), dtype=np.int64)
        count = len(joined) // size + (len(joined) % size > 1)
        tokens = np.full(count * size, end, dtype=np.int64)
        labels = np.full(count * size, IGNORED, dtype=np.int64)
        for whole in (tokens, labels):
            whole[: len(joined)] = joined[: len(whole)]
        return cls(*(torch.from_numpy(whole.reshape(count, size)) for whole in (tokens, labels)))

    @classmethod
    def by(
        cls, keys: Sequence[Hashable], texts: Sequence[Sequence[int]], size: int, end: int
    ) -> tuple[Self, list[int]]:
        """Pack the texts of each key by themselves, such as a source's: no block has texts of two.

        :returns: the blocks, and for each block the position of a text that has its key.
        """
        rows: dict[Hashable, list[int]] = {}
        for row, key in enumerate(keys):
            rows.setdefault(key, []).append(row)
        parts = [cls.of((texts[row] for row in own), size, end) for own in rows.values()]
        inputs, labels = (torch.cat([getattr(part, name) for part in parts]) for name in ("inputs", "labels"))
        firsts = [own[0] for own, part in zip(rows.values(), parts, strict=True) for _ in range(len(part))]
        return cls(inputs, labels), firsts


class NextToken(Targets):
    """Next tokens: labels (n, L) are the tokens of a block, :data:`IGNORED` where there is none; cross-entropy.

    A model gives features (B, d, L) and logits (B, V, L). Those at position i are about the token at i + 1, so the
    last ones of a block have no label.
    """

    name = "next-token"
    example = "python-topics"
    model = "tiny-gpt2"
    on_grid = True

    def build(self, form: Mapping[str, Any]) -> None:
        """Set the figures, too."""
        super().build(form)
        self.metrics = {
            "perplexity": TaskFigure("tokens", _sums, _perplexity, (3,), lower_is_better=True),
            "token-loss": TaskFigure("tokens", _sums, _mean_loss, (3,), lower_is_better=True),
            "token-accuracy": TaskFigure("tokens", _sums, _share_right, (3,)),
        }

    @classmethod
    def suits(cls, y: npt.NDArray[Any]) -> bool:
        """Return False: tokens look like other whole numbers."""
        return False

    @classmethod
    def read(cls, y: npt.NDArray[Any], count: int, where: str) -> Tensor:
        """Return tokens (n, L) as int64."""
        if y.shape[:1] != (count,) or y.ndim != 2 or y.shape[1] < 2 or y.dtype.kind not in "iu":
            raise DataError(
                f"{where}: task {cls.name!r} takes tokens (n, L), L at least 2, not {y.dtype} of {y.shape}; texts of "
                "hf:NAME become tokens by ?block_size=128&tokenizer=FOLDER"
            )
        if ((y < 0) & (y != IGNORED)).any():
            raise DataError(f"{where}: task {cls.name!r} takes tokens from 0, and {IGNORED} where there is none")
        return torch.from_numpy(y.astype(np.int64))

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of the batch's next tokens, as transformers' models do; 0 without any."""
        losses, known = next_token_losses(logits, labels)
        return losses.sum() / known.sum().clamp(min=1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the softmax at each position, (B, V, L)."""
        return logits.softmax(dim=1)

    def count(self, logits: Tensor, labels: Tensor, *, confusion: bool = False) -> Counts:
        """Return the sum of each block's mean loss, which does not depend on the other blocks of its batch."""
        if not len(logits):
            return super().count(logits, labels)
        losses, known = next_token_losses(logits, labels)
        return Counts(
            total=torch.tensor(len(logits), device=logits.device),
            loss=(losses.double().sum(dim=1) / known.sum(dim=1).clamp(min=1)).sum(),
            undefined=(~logits.flatten(1).isfinite().all(dim=1)).sum(),
        )


def next_token_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of the token after each position, (B, L), and where there is one to predict.

    :param logits: (B, V, L), of any layout in memory; the fastest is that of (B, L, V).
    :param labels: (B, L) int64.
    """
    targets = _targets(labels)
    flat = logits.transpose(1, 2).reshape(-1, logits.shape[1])
    losses = F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view_as(targets), targets != IGNORED


def _targets(labels: Tensor) -> Tensor:
    """Return the label of the next position, (B, L)."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def _sums(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the losses, the right predictions and the number of predicted tokens, (3,) float64."""
    (losses, known), right = next_token_losses(logits, labels), logits.argmax(dim=1) == _targets(labels)
    return torch.stack([losses.double().sum(), right.sum().double(), known.sum().double()])


def _mean_loss(counts: Tensor) -> float:
    return float(counts[0] / counts[2])


def _perplexity(counts: Tensor) -> float:
    """Return exp of the mean loss over all tokens; infinite where that is too large."""
    return float((counts[0] / counts[2]).exp())


def _share_right(counts: Tensor) -> float:
    return float(counts[1] / counts[2])


def language_dataset(name: str, train: TokenBlocks, test: TokenBlocks, vocabulary: int, **described: Any) -> Dataset:
    """Return a data set of blocks, whose task is :class:`NextToken`.

    :raises DataError: a part has no block.
    """
    for part, blocks in (("training", train), ("test", test)):
        if not len(blocks):
            raise DataError(f"{name}: the {part} texts have fewer than two tokens, which make no block")
    length = train.inputs.shape[1]
    task = NextToken(train.labels)
    return Dataset(name, train, test, vocabulary, (vocabulary, length), model=task.model, task=task, **described)


BLOCK = 64
END = 0


def python_topics(data_dir: Path | None) -> Dataset:
    """Return the help texts of Python's language reference as bytes, in blocks of 64; a source is a topic.

    They are those of the Python that runs. The alphabetically last fifth of the topics is the test set.
    """
    from pydoc_data.topics import topics  # type: ignore[import-not-found, unused-ignore]

    names = sorted(topics)
    texts = [topics[name].encode() for name in names]
    cut = len(names) - math.ceil(len(names) / 5)
    train, rows = TokenBlocks.by(names[:cut], texts[:cut], BLOCK, END)
    test = TokenBlocks.of(texts[cut:], BLOCK, END)
    described = {"sources": torch.tensor(rows), "source_names": tuple(names[:cut])}
    return language_dataset("python-topics", train, test, 256, **described)
