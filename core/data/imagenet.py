"""ImageNetV2: where it is fetched, how it is recognised, what its classes are called and what its size allows to say.

Source: Recht et al. 2019, "Do ImageNet Classifiers Generalize to ImageNet?", arXiv 1902.10811.
"""

from __future__ import annotations

import os
from pathlib import Path

from core.data.exports import unique_names
from core.errors import DataError

IMAGENETV2_URL = "https://huggingface.co/datasets/vaishaal/ImageNetV2/resolve/main"
VARIANTS = {
    "matched-frequency": "imagenetv2-matched-frequency.tar.gz",
    "threshold-0.7": "imagenetv2-threshold0.7.tar.gz",
    "top-images": "imagenetv2-top-images.tar.gz",
}
"""Name after `imagenetv2:` to the official archive; the first is what `imagenetv2` alone means."""
NUM_CLASSES = 1000
# 1.96 sqrt(p (1 - p) / n) is 2.0 points at p = 0.7 and n = 2000
ABOUT_IMAGENETV2 = (
    "ImageNetV2 has 10 images in each of ImageNet's 1,000 classes, made as a test set: with 20 percent for validation "
    "a class has 8 images to train on and 2 to validate, so one image is half of its validation and the accuracy of a "
    "single class says little. The accuracy over all 2,000 validation images is right to about ±2 points (95 % "
    "interval near 70 %). Recht et al. 2019, arXiv 1902.10811."
)


def imagenetv2_url(variant: str) -> str:
    """Where a variant's archive is; "" is the first variant.

    Raises:
        DataError: there is no such variant.
    """
    variant = variant or next(iter(VARIANTS))
    if variant not in VARIANTS:
        raise DataError(
            f"There is no variant or file '{variant}' of ImageNetV2.",
            fix=f"Choose one of {', '.join(VARIANTS)}, or give the path of its archive or folder.",
        )
    return f"{IMAGENETV2_URL}/{VARIANTS[variant]}"


def is_imagenetv2(name: str, root: Path) -> bool:
    """Whether a folder, which was called `name`, is ImageNetV2: by the name or its wrapper's, and by its classes."""
    names = [name.lower()]
    folders = _folders(root)
    if len(folders) == 1:
        names.append(folders[0].name.lower())
    return any(name.startswith("imagenetv2") for name in names) and has_numbered_classes(root)


def has_numbered_classes(root: Path) -> bool:
    """Whether the class folders, perhaps within a single wrapper, are all called by a number of ImageNet's classes."""
    folders = _folders(root)
    if len(folders) == 1:
        folders = _folders(folders[0])
    numbers = {str(number) for number in range(NUM_CLASSES)}
    return len(folders) >= 2 and all(folder.name in numbers for folder in folders)


def imagenet_names() -> tuple[str, ...]:
    """The names of ImageNet's 1,000 classes by number, each one once."""
    from torchvision.models import _meta

    return tuple(unique_names(_meta._IMAGENET_CATEGORIES))


def _folders(root: Path) -> list[Path]:
    try:
        with os.scandir(root) as entries:
            return [Path(e.path) for e in entries if e.is_dir() and not e.name.startswith((".", "__MACOSX"))]
    except OSError:  # the scan says what can't be read
        return []
