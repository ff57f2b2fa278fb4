"""Which training images an epoch shows, and how much each class counts."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.config import Sampling


def epoch_order(labels: NDArray[np.int64], generator: np.random.Generator, sampling: Sampling) -> NDArray[np.int64]:
    """The places of the images that one epoch shows, in order.

    Args:
        labels: (n,) class indices.
        sampling: shuffle is a permutation. balanced draws n places with replacement, each with the probability
            1 / (classes present * images of its class), as torch's WeightedRandomSampler does with inverse
            class frequencies.

    Returns:
        (n,) places in `labels`.
    """
    num = len(labels)
    if sampling == "shuffle" or not num:
        return generator.permutation(num)
    counts = np.bincount(labels)
    probability = 1 / (np.count_nonzero(counts) * counts[labels])
    return generator.choice(num, num, p=probability)


def class_weights(labels: NDArray[np.int64], num_classes: int) -> Tensor:
    """What each class counts in the training loss: n / (k * n_c) over the k classes present.

    This is scikit-learn's "balanced": the mean over the images is 1. A class without training images gets 0,
    so that label smoothing pulls nothing towards a class which is never seen.

    Args:
        labels: (n,) class indices, each below `num_classes`.

    Returns:
        (num_classes,) float32.
    """
    counts = np.bincount(labels, minlength=num_classes)
    present = counts > 0
    weights = np.zeros(num_classes, dtype=np.float32)
    weights[present] = len(labels) / (np.count_nonzero(present) * counts[present])
    return torch.from_numpy(weights)
