"""Sums that stay on the device until a figure is asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from core.devices.base import Device, Fetch


def top_k_correct(logits: Tensor, labels: Tensor, k: int) -> Tensor:
    """Count the images whose label is among the k highest logits.

    Args:
        logits: (batch, classes), any float dtype.
        labels: (batch,), class indices; a negative label never counts.
        k: 1 or more; capped at the number of classes.

    Returns:
        A 0-d integer tensor on the logits' device; nothing is fetched to the host.
    """
    highest = logits.topk(min(k, logits.shape[1]), dim=1).indices
    return (highest == labels[:, None]).any(dim=1).sum()


@dataclass(frozen=True)
class Figures:
    """Means over images: the loss, and accuracies in percent."""

    loss: float
    top1: float
    top5: float
    images: int


@dataclass(frozen=True)
class Totals:
    """Sums over images, on the host: of losses, of top-1 and top-5 hits."""

    loss: float = 0.0
    top1: float = 0.0
    top5: float = 0.0
    images: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            self.loss + other.loss, self.top1 + other.top1, self.top5 + other.top5, self.images + other.images
        )

    def figures(self) -> Figures:
        """The means.

        Raises:
            ZeroDivisionError: there are no images.
        """
        n = self.images
        return Figures(self.loss / n, 100 * self.top1 / n, 100 * self.top5 / n, n)


class Sums:
    """Loss and hits, added up on the device.

    The sums have shape (3,) and start from a copied tensor: XLA would bake a 0-d zero into the
    program and compile again when it changes.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._sums = device.place(torch.zeros(3))
        self._images = 0

    def add(self, loss_sum: Tensor, logits: Tensor, labels: Tensor, images: int) -> None:
        """Add a batch, or this process's part of it.

        Args:
            loss_sum: 0-d, summed over the part's images.
            logits, labels: (part, classes) and (part,).
            images: that count, of the whole batch.
        """
        with torch.no_grad():
            batch = torch.stack(
                [loss_sum.detach().float(), top_k_correct(logits, labels, 1), top_k_correct(logits, labels, 5)]
            )
            self._sums = self._sums + batch
        self._images += images

    def state(self) -> tuple[list[float], int]:
        """What was added since the last cut, and of how many images; waits for it."""
        return self._device.fetch(self._sums).values(), self._images

    def go_on_from(self, sums: list[float], images: int) -> None:
        """Begin with what another process had added up; processes that share a batch take a part of it each."""
        self._sums, self._images = self._device.place(torch.tensor(sums) / self._device.num_processes), images

    def cut(self) -> TotalsOnTheWay:
        """What was added since the last call, on its way to the host; waits for nothing. Call it after a flush."""
        on_the_way = TotalsOnTheWay(self._device.fetch(self._sums), self._images)
        self._sums, self._images = self._device.place(torch.zeros(3)), 0
        return on_the_way


@dataclass(frozen=True)
class TotalsOnTheWay:
    """Sums that the device is still working at, or that are being copied."""

    fetch: Fetch
    images: int

    def totals(self) -> Totals:
        """Wait for them."""
        loss, top1, top5 = self.fetch.values()
        return Totals(loss, top1, top5, self.images)
