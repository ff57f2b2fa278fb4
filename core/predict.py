"""What a trained run says of pictures: its best checkpoint, on any device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.checkpoint import read_about, read_weights
from core.data.cache import Fit
from core.data.images import load_rgb
from core.devices.base import Device
from core.errors import StoreError
from core.models.build import build_model

BATCH = 16


@dataclass(frozen=True)
class Prediction:
    """What is seen in one picture: class names with their probability in percent, the likeliest first."""

    file: str
    classes: list[tuple[str, float]]


class Predictor:
    """A checkpoint on a device, ready to classify; work is shared with a run that trains there.

    Args:
        checkpoint: best or last of a run.
        device: opened by the thread that predicts.

    Raises:
        StoreError: there is no such checkpoint.
    """

    def __init__(self, checkpoint: Path, device: Device) -> None:
        if not checkpoint.is_file():
            raise StoreError(f"There is no checkpoint '{checkpoint}'.", fix="Let the run finish an epoch first.")
        about = read_about(checkpoint)
        self.classes: list[str] = about["classes"]
        config = about["config"]
        built = build_model(
            config["model"],
            num_classes=len(self.classes),
            weights="none",
            image_size=config["image_size"],
            trainable="all",
            seed=0,
        )
        built.module.load_state_dict(read_weights(checkpoint))
        if hasattr(built.module, "transform_input"):
            # googlenet and inception_v3 take pictures otherwise where they began with published weights
            is_shifted = about.get("transform_input", config.get("weights") == "default")
            built.module.transform_input = is_shifted
        self._looks, self._device = built.preprocessing, device
        self._fit = Fit(self._looks.resize_size, self._looks.interpolation, keeps_shape=False)
        module = built.module.eval().requires_grad_(False)
        with device.turn():
            self._model = device.place_model(module)
            shape = (1, 3, 1, 1)
            self._shift, self._scale = (
                device.place(torch.tensor(three).reshape(shape)) for three in (self._looks.mean, self._looks.std)
            )
            device.wait()

    def predict(self, files: list[Path], top: int = 5) -> list[Prediction]:
        """The likeliest classes of each picture.

        Raises:
            DataError: a picture can't be read.
        """
        predictions = []
        for start in range(0, len(files), BATCH):
            part = files[start : start + BATCH]
            pictures = np.stack([self._picture(file) for file in part])
            # always a whole batch, so that XLA compiles one program
            padded = np.zeros((BATCH, *pictures.shape[1:]), np.uint8)
            padded[: len(part)] = pictures
            shares = self.probabilities(torch.from_numpy(padded).permute(0, 3, 1, 2))
            for file, row in zip(part, shares.tolist(), strict=False):
                best = sorted(range(len(row)), key=lambda index: -row[index])[:top]
                predictions.append(Prediction(str(file), [(self.classes[i], 100 * row[i]) for i in best]))
        return predictions

    def probabilities(self, images: Tensor) -> Tensor:
        """Softmax of the logits.

        Args:
            images: (n, 3, image_size, image_size) uint8 on the CPU.

        Returns:
            (n, classes) float32 on the CPU; each row adds up to 1.
        """
        with torch.no_grad(), self._device.turn():
            placed = self._device.place(images)
            logits = self._model((placed.float() / 255 - self._shift) / self._scale)
            shares = logits.float().softmax(1)
            self._device.flush()
            host: Tensor = self._device.to_host(shares)
        return host

    def _picture(self, file: Path) -> NDArray[np.uint8]:
        size = self._looks.image_size
        whole = load_rgb(file)
        pixels = self._fit(whole, whole.shape[1], whole.shape[0])
        top, left = (pixels.shape[0] - size) // 2, (pixels.shape[1] - size) // 2
        return pixels[top : top + size, left : left + size]
