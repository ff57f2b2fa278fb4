"""What a training image goes through on its way into a batch.

All is drawn from the generator that is passed: torch's global one belongs to the trainer thread.

What an image of 224 px costs on one thread of an AMD EPYC that others use too, in microseconds (torchvision's in
brackets): resized crop's draw 9, RandAugment of two operations 980 (3180), TrivialAugment 490 (1470), colour jitter
690 (1110), random erasing of every image 84 (246), CutMix 55, MixUp 33 and the blend on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.config import Augmentation, AutoAugment, RunConfig
from core.data.auto_augment import Fill, as_bytes, brighten, contrast, rand_augment, saturate, trivial_augment

CROP_RATIO = (3 / 4, 4 / 3)
"""Width over height of a random resized crop."""
ERASED_SCALE = (0.02, 0.33)
"""Share of the area that random erasing paints over."""
ERASED_RATIO = (1 / 3.3, 1 / 0.3)
"""Width over height of what it paints over."""
TRIES = 10
"""Rectangles drawn before one that does not fit is given up."""


@dataclass(frozen=True)
class Recipe:
    """What a training image goes through; the fields are those of `RunConfig`, and the defaults do nothing."""

    geometry: Augmentation = "none"
    crop_scale_min: float = 0.35
    color_jitter: float = 0.0
    auto_augment: AutoAugment = "none"
    randaugment_ops: int = 2
    randaugment_magnitude: int = 9
    random_erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0

    @classmethod
    def of(cls, config: RunConfig) -> Recipe:
        """The recipe of a run."""
        return cls(
            geometry=config.augmentation,
            crop_scale_min=config.crop_scale_min,
            color_jitter=config.color_jitter,
            auto_augment=config.auto_augment,
            randaugment_ops=config.randaugment_ops,
            randaugment_magnitude=config.randaugment_magnitude,
            random_erasing=config.random_erasing,
            mixup=config.mixup,
            cutmix=config.cutmix,
        )

    @property
    def is_plain(self) -> bool:
        """Whether no pixel is changed beyond geometry, and nothing is mixed."""
        return self.auto_augment == "none" and not (
            self.color_jitter or self.random_erasing or self.mixup or self.cutmix
        )


@dataclass(frozen=True)
class Mix:
    """How each image is blended with its neighbour, which is the batch rolled by one.

    Both are of shape (1,), float32: tensors, so that a device never sees them as constants to compile in.

    Attributes:
        pixel_weight: of the image itself in the blend on the device (MixUp); 1 for CutMix, whose paste is done.
        label_weight: of its own label in the loss.
    """

    pixel_weight: Tensor
    label_weight: Tensor

    def placed(self, place: Callable[[Tensor], Tensor]) -> Mix:
        """The same on a device."""
        return Mix(place(self.pixel_weight), place(self.label_weight))


def reflected(size: int, margin: int) -> NDArray[np.int64]:
    """Indices of `size` pixels continued by reflection for `margin` pixels at both ends."""
    index = np.abs(np.arange(-margin, size + margin))
    last = size - 1
    return np.where(index > last, 2 * last - index, index)


def crop_margin(cached_size: int, image_size: int, augmentation: Augmentation) -> int:
    """Pixels to reflect at each side, so that a random crop has room where the cache has none."""
    return image_size // 8 if augmentation == "crop" and cached_size == image_size else 0


def draw_views(
    generator: np.random.Generator, num: int, room: int, augmentation: Augmentation
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Draw the top left corners (num, 2), each in 0..room, and who is mirrored (num,)."""
    corners = np.full((num, 2), room // 2, dtype=np.int64)
    if augmentation == "crop":
        corners = generator.integers(0, room + 1, (num, 2))
    mirrored = np.zeros(num, dtype=np.bool_)
    if augmentation != "none":
        mirrored = generator.random(num) < 0.5
    return corners, mirrored


def draw_resized_crops(
    generator: np.random.Generator,
    heights: NDArray[np.int64],
    widths: NDArray[np.int64],
    scale_min: float,
    ratio: tuple[float, float] = CROP_RATIO,
) -> NDArray[np.int64]:
    """Draw the part of each image that is enlarged, as torchvision's RandomResizedCrop does.

    Its share of the area is uniform in scale_min..1, and width over height is uniform on a log scale; where none of
    ten tries fits into the image, it is the largest central part of a ratio within the limits.

    Args:
        heights, widths: (n,), of the images in pixels.

    Returns:
        (n, 4): top, left, height, width; each part has at least one pixel and lies inside its image.
    """
    sizes, fits = _draw_sizes(generator, heights, widths, (scale_min, 1.0), ratio)
    limits = np.stack([heights, widths], axis=1)
    fits &= np.all(sizes <= limits[:, None], axis=2)
    chosen = sizes[np.arange(len(sizes)), fits.argmax(axis=1)]
    fallback = np.stack(
        [
            np.where(widths / heights < ratio[0], np.rint(widths / ratio[0]), heights),
            np.where(widths / heights > ratio[1], np.rint(heights * ratio[1]), widths),
        ],
        axis=1,
    ).astype(np.int64)
    found = fits.any(axis=1, keepdims=True)
    sides = np.where(found, chosen, fallback)
    corners = np.where(found, generator.integers(0, limits - sides + 1), (limits - sides) // 2)
    return np.concatenate([corners, sides], axis=1)


def augment_pixels(
    images: Tensor, recipe: Recipe, generator: np.random.Generator, fill: tuple[int, int, int], parts: int = 1
) -> tuple[Tensor, Mix | None]:
    """Change the pixels of a batch: automatic augmentation, colour jitter, random erasing, CutMix's paste.

    Args:
        images: (n, 3, h, w) uint8, of any strides; left as they are.
        fill: the colour of what is erased or comes in from outside an image.
        parts: equal parts of the batch, each of which mixes within itself.

    Returns:
        Images of the same shape, of the same strides or contiguous; and how they mix: exactly where the recipe has
        MixUp or CutMix, since a device compiles one program for batches that mix and another for those that don't.
    """
    if recipe.is_plain:
        return images, None
    if recipe.auto_augment != "none" or recipe.color_jitter:
        images = torch.stack([_recoloured(image, recipe, generator, fill) for image in images])
    else:
        images = images.clone()
    if recipe.random_erasing:
        _erase(images, recipe.random_erasing, generator, fill)
    return images, _mix(images, recipe, generator, parts)


def _recoloured(image: Tensor, recipe: Recipe, generator: np.random.Generator, fill: Fill) -> Tensor:
    # channel by channel in memory: the operations read that several times as fast as channels last
    image = torch.from_numpy(np.ascontiguousarray(image.numpy()))
    if recipe.auto_augment == "randaugment":
        image = rand_augment(image, generator, recipe.randaugment_ops, recipe.randaugment_magnitude, fill)
    elif recipe.auto_augment == "trivialaugment":
        image = trivial_augment(image, generator, fill)
    return jitter(image, recipe.color_jitter, generator) if recipe.color_jitter else image


def jitter(image: Tensor, strength: float, generator: np.random.Generator) -> Tensor:
    """Change brightness, contrast and saturation, each by a factor in 1 ± strength, in a drawn order.

    As torchvision's ColorJitter, but fractions of a level are dropped once, at the end.

    Args:
        image: (3, h, w) uint8; left as it is.
        strength: 0 to 1.
    """
    pixels = image.float()
    factors = generator.uniform(1 - strength, 1 + strength, 3)
    for index in generator.permutation(3):
        (brighten, contrast, saturate)[index](pixels, float(factors[index]))
    return as_bytes(pixels)


def _erase(images: Tensor, probability: float, generator: np.random.Generator, fill: Fill) -> None:
    """Paint a rectangle of some images over, in place (Zhong et al. 2020)."""
    num, _, height, width = images.shape
    limits = np.array([height, width])
    sides = np.broadcast_to(limits[:, None], (2, num))
    sizes, fits = _draw_sizes(generator, sides[0], sides[1], ERASED_SCALE, ERASED_RATIO)
    fits &= np.all(sizes < limits, axis=2)
    chosen = sizes[np.arange(num), fits.argmax(axis=1)]
    is_erased = (generator.random(num) < probability) & fits.any(axis=1)
    corners = generator.integers(0, np.maximum(limits - chosen, 0) + 1)
    colour = torch.tensor(fill, dtype=torch.uint8).reshape(3, 1, 1)
    for index in is_erased.nonzero()[0]:
        (top, left), (tall, wide) = corners[index], chosen[index]
        images[index, :, top : top + tall, left : left + wide] = colour


def _draw_sizes(
    generator: np.random.Generator,
    heights: NDArray[np.int64],
    widths: NDArray[np.int64],
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Draw rectangles by their share of the area and by width over height.

    Returns:
        (n, tries, 2): height and width; and (n, tries): whether the rectangle has a pixel.
    """
    shape = (len(heights), TRIES)
    area = (heights * widths)[:, None] * generator.uniform(*scale, shape)
    aspect = np.exp(generator.uniform(math.log(ratio[0]), math.log(ratio[1]), shape))
    sizes = np.rint(np.sqrt(np.stack([area / aspect, area * aspect], axis=2))).astype(np.int64)
    return sizes, np.asarray(np.all(sizes > 0, axis=2))


def _mix(images: Tensor, recipe: Recipe, generator: np.random.Generator, parts: int) -> Mix | None:
    """Draw one blend for the batch, by even odds MixUp or CutMix where both are on, and do CutMix's paste."""
    if not (recipe.mixup or recipe.cutmix):
        return None
    if recipe.mixup and (not recipe.cutmix or generator.random() < 0.5):
        weight = generator.beta(recipe.mixup, recipe.mixup)
        return Mix(torch.tensor([weight], dtype=torch.float32), torch.tensor([weight], dtype=torch.float32))
    own_share = _paste(images, generator.beta(recipe.cutmix, recipe.cutmix), generator, parts)
    return Mix(torch.ones(1), torch.tensor([own_share], dtype=torch.float32))


def _paste(images: Tensor, weight: float, generator: np.random.Generator, parts: int) -> float:
    """Paste a rectangle of each image's neighbour, of about 1 - weight of the area, in place (Yun et al. 2019).

    Returns:
        The share of the area that stays the image's own: the rectangle's centre may lie near an edge.
    """
    edges = []
    for side in images.shape[2:]:
        centre, half = int(generator.integers(side)), int(0.5 * math.sqrt(1 - weight) * side)
        edges.append((max(0, centre - half), min(side, centre + half)))
    (top, bottom), (left, right) = edges
    for part in images.chunk(parts):
        part[:, :, top:bottom, left:right] = part[:, :, top:bottom, left:right].roll(1, 0)
    height, width = images.shape[2:]
    return 1 - (bottom - top) * (right - left) / (height * width)
