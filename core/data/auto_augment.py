"""RandAugment (Cubuk et al. 2020) and TrivialAugmentWide (Müller & Hutter 2021).

The operations, their ranges and their pixels are those of torchvision's classes of these names. They are written
anew because they run on the host beside training: most take a fraction of the time, and the draws come from a
numpy generator, as torch's global one belongs to the trainer thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NUM_MAGNITUDES = 31
"""Steps of strength, from 0 to 30."""

Fill = Sequence[int]
Line = tuple[float, float, float]
Apply = Callable[[Tensor, float, Fill], Tensor]


@dataclass(frozen=True)
class Operation:
    """One way to change an image.

    Attributes:
        apply: (image (3, h, w) uint8, magnitude, colour of what comes in from outside) to such an image.
        weakest, strongest: the ends of the line of magnitudes.
        is_signed: the sign of the magnitude is drawn.
        is_whole: magnitudes are rounded to whole numbers.
        of_side: the side (1 height, 2 width) that `strongest` is a share of; 0 where it is none.
    """

    apply: Apply
    weakest: float = 0.0
    strongest: float = 0.0
    is_signed: bool = False
    is_whole: bool = False
    of_side: int = 0

    def magnitude(self, step: int, image: Tensor) -> float:
        """The magnitude of a step of strength (0..30) for an image (3, h, w), without its sign."""
        strongest = self.strongest * image.shape[self.of_side] if self.of_side else self.strongest
        magnitude = float(torch.linspace(self.weakest, strongest, NUM_MAGNITUDES)[step])
        return float(round(magnitude)) if self.is_whole else magnitude


def brighten(pixels: Tensor, factor: float) -> Tensor:
    """Multiply float pixels (3, h, w) of 0..255, in place; 0 makes them black."""
    return pixels.mul_(factor).clamp_(0, 255)


def contrast(pixels: Tensor, factor: float) -> Tensor:
    """Spread float pixels (3, h, w) of 0..255 around their mean brightness, in place; 0 makes them one grey."""
    mean = float(_grey(pixels).mean())
    return pixels.mul_(factor).add_(mean * (1 - factor)).clamp_(0, 255)


def saturate(pixels: Tensor, factor: float) -> Tensor:
    """Spread the channels of float pixels (3, h, w) of 0..255 around their grey, in place; 0 makes them grey."""
    grey = _grey(pixels)
    return pixels.mul_(factor).add_(grey, alpha=1 - factor).clamp_(0, 255)


def _grey(pixels: Tensor) -> Tensor:
    red, green, blue = pixels
    grey: Tensor = red * 0.2989
    return grey.add_(green, alpha=0.587).add_(blue, alpha=0.114).floor_()


def as_bytes(pixels: Tensor) -> Tensor:
    """Float pixels of 0..255 without their fractions, as uint8; numpy's conversion is five times as fast as torch's."""
    return torch.from_numpy(pixels.numpy().astype(np.uint8))


def _identity(image: Tensor, _: float, __: Fill) -> Tensor:
    return image


def _affine(image: Tensor, x_from: Line, y_from: Line, fill: Fill) -> Tensor:
    """Fetch each pixel from the nearest one to where the affine map says.

    Args:
        x_from, y_from: source = a * x + b * y + c, in pixels from the image's centre.
    """
    height, width = image.shape[1:]
    columns = torch.arange(width) + (0.5 - width / 2)
    rows = (torch.arange(height) + (0.5 - height / 2))[:, None]
    x = columns * x_from[0] + (rows * x_from[1] + (x_from[2] + width / 2 - 0.5))
    y = columns * y_from[0] + (rows * y_from[1] + (y_from[2] + height / 2 - 0.5))
    # a frame of `fill` catches what comes from outside, which is faster than a mask
    framed = _filled(fill, height + 2, width + 2)
    framed[:, 1:-1, 1:-1] = image
    x, y = x.round_().clamp_(-1, width), y.round_().clamp_(-1, height)
    place = y.mul_(width + 2).add_(x).add_(width + 3).long().reshape(1, -1)
    return framed.reshape(3, -1).gather(1, place.expand(3, -1)).reshape(image.shape)


def _filled(fill: Fill, height: int, width: int) -> Tensor:
    return torch.tensor(fill, dtype=torch.uint8).reshape(3, 1, 1).repeat(1, height, width)


def _shear_x(image: Tensor, magnitude: float, fill: Fill) -> Tensor:
    return _affine(image, (1.0, magnitude, magnitude * image.shape[1] / 2), (0.0, 1.0, 0.0), fill)


def _shear_y(image: Tensor, magnitude: float, fill: Fill) -> Tensor:
    return _affine(image, (1.0, 0.0, 0.0), (magnitude, 1.0, magnitude * image.shape[2] / 2), fill)


def _rotate(image: Tensor, degrees: float, fill: Fill) -> Tensor:
    """Counter-clockwise, about the centre."""
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return _affine(image, (cosine, -sine, 0.0), (sine, cosine, 0.0), fill)


def _translate_x(image: Tensor, magnitude: float, fill: Fill) -> Tensor:
    return _shift(image, int(magnitude), 0, fill)


def _translate_y(image: Tensor, magnitude: float, fill: Fill) -> Tensor:
    return _shift(image, 0, int(magnitude), fill)


def _shift(image: Tensor, right: int, down: int, fill: Fill) -> Tensor:
    height, width = image.shape[1:]
    moved = _filled(fill, height, width)
    if abs(right) < width and abs(down) < height:
        seen = image[:, max(0, -down) : height - max(0, down), max(0, -right) : width - max(0, right)]
        moved[:, max(0, down) : height + min(0, down), max(0, right) : width + min(0, right)] = seen
    return moved


def _brightness(image: Tensor, magnitude: float, _: Fill) -> Tensor:
    return as_bytes(brighten(image.float(), 1 + magnitude))


def _contrast(image: Tensor, magnitude: float, _: Fill) -> Tensor:
    return as_bytes(contrast(image.float(), 1 + magnitude))


def _color(image: Tensor, magnitude: float, _: Fill) -> Tensor:
    return as_bytes(saturate(image.float(), 1 + magnitude))


def _sharpness(image: Tensor, magnitude: float, _: Fill) -> Tensor:
    """Away from, or towards, a blur by (1 1 1, 1 5 1, 1 1 1) / 13; the outermost pixels stay."""
    if min(image.shape[1:]) <= 2:
        return image
    pixels = image.float()
    rows = pixels[:, :-2] + pixels[:, 1:-1] + pixels[:, 2:]
    inner = pixels[:, 1:-1, 1:-1]
    blurred = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    blurred.add_(inner, alpha=4).div_(13).round_()
    # `inner` is a view: this changes `pixels`
    inner.add_(blurred.sub_(inner), alpha=1 - (1 + magnitude))
    return as_bytes(pixels.clamp_(0, 255))


def _posterize(image: Tensor, bits: float, _: Fill) -> Tensor:
    """Keep the highest bits of each pixel."""
    return image & (256 - (1 << (8 - int(bits))))


def _solarize(image: Tensor, magnitude: float, _: Fill) -> Tensor:
    """Invert the pixels of `magnitude` (0 to 1) of full brightness and above."""
    pixels = image.numpy()
    # a comparison with a float, or torch's of bytes, takes longer than all the rest
    threshold = math.ceil(np.float32(255.0 * magnitude))
    is_bright = (pixels >= threshold).view(np.uint8)
    return torch.from_numpy(pixels ^ -is_bright)


def _auto_contrast(image: Tensor, _: float, __: Fill) -> Tensor:
    """Spread each channel over all of 0..255; a channel of one value stays."""
    pixels = image.float()
    lowest, highest = pixels.amin((1, 2), keepdim=True), pixels.amax((1, 2), keepdim=True)
    is_flat = lowest == highest
    scale = ((highest - lowest) * (1 / 255)).masked_fill_(is_flat, 1.0)
    return as_bytes(pixels.sub_(lowest.masked_fill_(is_flat, 0.0)).div_(scale).clamp_(0, 255))


def _equalize(image: Tensor, _: float, __: Fill) -> Tensor:
    """Flatten the histogram of each channel, by Pillow's rule."""
    return torch.from_numpy(np.stack([_equalized(channel) for channel in image.numpy()]))


def _equalized(channel: NDArray[np.uint8]) -> NDArray[np.uint8]:
    counts = torch.bincount(torch.from_numpy(channel).flatten(), minlength=256).numpy()
    step = (channel.size - int(counts[counts.nonzero()[0][-1]])) // 255
    if not step:
        return channel
    table = np.minimum((np.cumsum(counts) - counts + step // 2) // step, 255).astype(np.uint8)
    return np.take(table, channel, mode="clip")


RANDAUGMENT = {
    "Identity": Operation(_identity),
    "ShearX": Operation(_shear_x, 0.0, 0.3, is_signed=True),
    "ShearY": Operation(_shear_y, 0.0, 0.3, is_signed=True),
    "TranslateX": Operation(_translate_x, 0.0, 150.0 / 331.0, is_signed=True, of_side=2),
    "TranslateY": Operation(_translate_y, 0.0, 150.0 / 331.0, is_signed=True, of_side=1),
    "Rotate": Operation(_rotate, 0.0, 30.0, is_signed=True),
    "Brightness": Operation(_brightness, 0.0, 0.9, is_signed=True),
    "Color": Operation(_color, 0.0, 0.9, is_signed=True),
    "Contrast": Operation(_contrast, 0.0, 0.9, is_signed=True),
    "Sharpness": Operation(_sharpness, 0.0, 0.9, is_signed=True),
    "Posterize": Operation(_posterize, 8.0, 4.0, is_whole=True),
    "Solarize": Operation(_solarize, 1.0, 0.0),
    "AutoContrast": Operation(_auto_contrast),
    "Equalize": Operation(_equalize),
}
TRIVIALAUGMENT = {
    "Identity": Operation(_identity),
    "ShearX": Operation(_shear_x, 0.0, 0.99, is_signed=True),
    "ShearY": Operation(_shear_y, 0.0, 0.99, is_signed=True),
    "TranslateX": Operation(_translate_x, 0.0, 32.0, is_signed=True),
    "TranslateY": Operation(_translate_y, 0.0, 32.0, is_signed=True),
    "Rotate": Operation(_rotate, 0.0, 135.0, is_signed=True),
    "Brightness": Operation(_brightness, 0.0, 0.99, is_signed=True),
    "Color": Operation(_color, 0.0, 0.99, is_signed=True),
    "Contrast": Operation(_contrast, 0.0, 0.99, is_signed=True),
    "Sharpness": Operation(_sharpness, 0.0, 0.99, is_signed=True),
    "Posterize": Operation(_posterize, 8.0, 2.0, is_whole=True),
    "Solarize": Operation(_solarize, 1.0, 0.0),
    "AutoContrast": Operation(_auto_contrast),
    "Equalize": Operation(_equalize),
}


def rand_augment(image: Tensor, generator: np.random.Generator, num_ops: int, step: int, fill: Fill) -> Tensor:
    """Apply `num_ops` operations, each drawn anew, of one strength.

    Args:
        image: (3, h, w) uint8; left as it is, and perhaps handed back.
        step: the strength, 0..30.
        fill: the colour of what comes in from outside the image.
    """
    for _ in range(num_ops):
        image = _draw_and_apply(RANDAUGMENT, image, generator, step, fill)
    return image


def trivial_augment(image: Tensor, generator: np.random.Generator, fill: Fill) -> Tensor:
    """Apply one drawn operation of a drawn strength; arguments as those of `rand_augment`."""
    return _draw_and_apply(TRIVIALAUGMENT, image, generator, int(generator.integers(NUM_MAGNITUDES)), fill)


def _draw_and_apply(
    table: dict[str, Operation], image: Tensor, generator: np.random.Generator, step: int, fill: Fill
) -> Tensor:
    operation = list(table.values())[int(generator.integers(len(table)))]
    magnitude = operation.magnitude(step, image)
    if operation.is_signed and generator.random() < 0.5:
        magnitude = -magnitude
    return operation.apply(image, magnitude, fill)
