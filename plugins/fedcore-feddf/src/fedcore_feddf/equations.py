"""FedDF's equations (Lin, Kong, Stich, Jaggi, NeurIPS 2020, arXiv 2006.07242), one function each."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional as F


def distillation_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the batch's mean KL(softmax(teacher) || softmax(student)), of logits (B, C).

    :param teacher: the mean of the clients' logits.
    :source: Eq. 2, AVGLOGITS.
    """
    return F.kl_div(student.log_softmax(dim=1), teacher.softmax(dim=1), reduction="batchmean")


def learning_rate(lr: float, step: int, steps: int) -> float:
    """Return the rate of a step, from 0: cosine annealing from ``lr`` towards 0.

    :source: Section 4.1.

    >>> learning_rate(1.0, 0, 10), round(learning_rate(1.0, 5, 10), 6)
    (1.0, 0.5)
    """
    return lr * 0.5 * (1 + math.cos(math.pi * step / steps))
