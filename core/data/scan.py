"""What a source holds: classes, splits, and which files can't be used, found before the first epoch."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path

from core.data.dataset import SKIP_WORDS, Dataset, named, shortened
from core.data.layout import Layout, find_layout
from core.data.probe import NOT_A_PICTURE, Probe, Sink, probe_files
from core.data.progress import Progress, quiet
from core.data.sources import Skipped, Source
from core.data.split import Item, groups_of_equal, split_by_class
from core.data.tree import PICTURE_EXTENSIONS, UNSUPPORTED_EXTENSIONS, File, read_tree
from core.errors import DataError

Classes = dict[str, list[File]]
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")


def scan(
    source: Source,
    *,
    home: Path,
    seed: int,
    val_percent: int,
    val_duplicates: str = "keep",
    sink: Sink | None = None,
    at_least: int | None = None,
    progress: Progress = quiet,
    anew: bool = False,
) -> Dataset:
    """Find classes, splits and unusable files; each image is decoded once, and not again until it changes.

    Where the data bring no validation folder, `val_percent` of each class is drawn by `seed`; images with
    identical bytes are never on both sides.

    Args:
        home: where results are remembered.
        val_duplicates: keep, or drop validation and test images whose bytes are in training.
        sink, at_least: see `core.data.probe`.
        anew: decode all images again.

    Raises:
        DataError: fewer than two classes, or no image for validation.
    """
    tree = read_tree(source.root, without=home)
    layout = find_layout(tree.top, source.spec)
    files = [file for classes in layout.splits.values() for found in classes.values() for file in found]
    probes = dict(
        zip(
            (file.name for file in files),
            probe_files(source.root, files, home, sink=sink, at_least=at_least, progress=progress, anew=anew),
            strict=True,
        )
    )
    sorting = _Sorting(source, layout, probes)
    sorting.skip("unsafe_path", tree.unsafe_links)
    sorting.skip("unreadable", tree.broken)
    sorting.ignored += tree.hidden
    sorting.sort_strays()
    classes = sorting.classes()
    train, val, test = (sorting.items(split, classes) for split in ("train", "val", "test"))
    warnings = sorting.warnings
    if val:
        warnings += _missing(val, classes)
    else:
        if "val" in layout.splits:
            warnings.append("the validation folder has no usable image, so a share of the training images is used")
        train, val, warned = split_by_class(train, classes, seed=seed, val_percent=val_percent)
        warnings += shortened(warned, "classes like these")
    val, test = (
        sorting.judge_copies(word, items, train, drop=val_duplicates == "drop")
        for word, items in (("validation", val), ("test", test))
    )
    warnings += _several_labels([*train, *val, *test])
    if not val:
        raise DataError(f"'{source.spec}' leaves no image for validation.", fix="Add images to its classes.")
    return Dataset(
        root=source.root,
        classes=classes,
        train=train,
        val=val,
        test=test,
        skipped=sorted(sorting.skipped, key=lambda item: item.file),
        ignored=sorted(sorting.ignored),
        warnings=warnings,
        about=source.about,
    )


class _Sorting:
    """Puts every file where it belongs: used, skipped with a reason, or ignored."""

    def __init__(self, source: Source, layout: Layout, probes: dict[str, Probe]) -> None:
        self._source, self._layout, self._probes = source, layout, probes
        self.skipped: list[Skipped] = list(source.skipped)
        self.ignored: list[str] = list(source.ignored)
        self.warnings: list[str] = list(layout.warnings)
        self._usable: dict[str, Classes] = {}
        for split, classes in layout.splits.items():
            self._usable[split] = {self._folder_name(name): self._sort(files) for name, files in classes.items()}

    def skip(self, why: str, names: Sequence[str]) -> None:
        self.skipped += [Skipped(name, why) for name in names]

    def sort_strays(self) -> None:
        """Pictures that lie in no class are skipped; other strays are no matter."""
        for file in self._layout.strays:
            if file.extension in PICTURE_EXTENSIONS | UNSUPPORTED_EXTENSIONS:
                self.skipped.append(Skipped(file.name, "outside_class"))
            else:
                self.ignored.append(file.name)

    def classes(self) -> list[str]:
        """Class names in index order, from the source or from the training folders.

        Raises:
            DataError: fewer than two have training images.
        """
        train = self._usable["train"]
        with_images = [name for name, files in train.items() if files]
        if len(with_images) < 2:
            raise self._too_few(with_images)
        if self._source.classes is not None:
            return self._fixed_classes(with_images)
        empty = [f"class '{name}' has no image" for name in sorted(train) if not train[name]]
        self.warnings += shortened(empty, "empty classes")
        return _ordered(with_images)

    def items(self, split: str, classes: Sequence[str]) -> list[Item]:
        """The split's images sorted by name; those of classes that training does not have are skipped."""
        labels = self._labels(classes, self._usable.get(split, {}))
        found = []
        for name, files in self._usable.get(split, {}).items():
            label = labels.get(name)
            if label is None:
                self._skip_unknown(split, name, files)
                continue
            for file in files:
                probe = self._probes[file.name]
                found.append(Item(Path(file.path), file.name, label, probe.digest, probe.width, probe.height))
        return sorted(found, key=lambda item: item.file)

    def judge_copies(self, word: str, items: list[Item], train: Sequence[Item], *, drop: bool) -> list[Item]:
        """Warn of images whose bytes are in training, and leave them out where asked."""
        first = {item.digest: item.file for item in reversed(train)}
        pairs = [f"{item.file} is {first[item.digest]}" for item in items if item.digest in first]
        if not pairs:
            return items
        shown = ", ".join(pairs[:10]) + (f" and {len(pairs) - 10} more" if len(pairs) > 10 else "")
        subject = f"1 {word} image is" if len(pairs) == 1 else f"{len(pairs)} {word} images are"
        left_out = "; left out" if drop else ""
        self.warnings.append(f"{subject} byte for byte in training{left_out}: {shown}")
        if not drop:
            return items
        self.skip("also_in_training", [item.file for item in items if item.digest in first])
        return [item for item in items if item.digest not in first]

    def _folder_name(self, name: str) -> str:
        """The folder's name; without leading zeros where folders are the numbers of classes."""
        is_number = self._source.classes is not None and name.isascii() and name.isdecimal()
        return str(int(name)) if is_number else name

    def _sort(self, files: list[File]) -> list[File]:
        usable = []
        for file in files:
            why = self._probes[file.name].why
            if not why:
                usable.append(file)
            elif why == NOT_A_PICTURE:
                self.ignored.append(file.name)
            else:
                self.skipped.append(Skipped(file.name, why))
        return usable

    def _too_few(self, names: list[str]) -> DataError:
        count = "1 class with images" if names else "no class with images"
        lost = [item for item in self.skipped if item.why not in ("outside_class", "unsafe_path")]
        reason = f"; {len(lost):,} pictures can't be used ({lost[0].file}: {SKIP_WORDS[lost[0].why]})" if lost else ""
        who = f" ({named(names)})" if names else ""
        return DataError(
            f"'{self._source.spec}' has {count}{who}{reason}; training needs two or more.",
            fix="Give a folder with one folder of images for each class.",
        )

    def _fixed_classes(self, with_images: list[str]) -> list[str]:
        classes = list(self._source.classes or ())
        if missing := len({str(label) for label in range(len(classes))} - set(with_images)):
            self.warnings.append(f"{missing:,} of {len(classes):,} classes have no image")
        return classes

    def _labels(self, classes: Sequence[str], folders: Collection[str]) -> dict[str, int]:
        """Folder to class index; a name that is almost a class's stands for it where no other folder does."""
        names = map(str, range(len(classes))) if self._source.classes is not None else classes
        exact = {name: label for label, name in enumerate(names)}
        alike: dict[str | float, list[int]] = defaultdict(list)
        for name, label in exact.items():
            alike[_key(name)].append(label)
        rivals = Counter(map(_key, folders))
        almost = {key: labels[0] for key, labels in alike.items() if len(labels) == rivals[key] == 1}
        return {name: almost[_key(name)] for name in folders if _key(name) in almost} | exact

    def _skip_unknown(self, split: str, name: str, files: list[File]) -> None:
        if files:
            self.warnings.append(f"class '{name}' has no training image, so its {split} images are left out")
            self.skip("unknown_class", [file.name for file in files])


def _ordered(names: Sequence[str]) -> list[str]:
    """By value where all names are numbers, else by name."""
    if all(_NUMBER.fullmatch(name) for name in names):
        return sorted(names, key=lambda name: (float(name), name))
    return sorted(names)


def _key(name: str) -> str | float:
    """Equal for names that differ in capitals or leading zeros alone."""
    return float(name) if _NUMBER.fullmatch(name) else name.casefold()


def _missing(items: Sequence[Item], classes: Sequence[str]) -> list[str]:
    present = {item.label for item in items}
    missing = [f"no validation image for {name}" for label, name in enumerate(classes) if label not in present]
    return shortened(missing, "classes like these")


def _several_labels(items: Sequence[Item]) -> list[str]:
    """Equal bytes under different labels: one of the labels is wrong."""
    groups = [group for group in groups_of_equal(items) if len({item.label for item in group}) > 1]
    if not groups:
        return []
    shown = "; ".join(", ".join(item.file for item in group[:4]) for group in groups[:10])
    more = f" and {len(groups) - 10:,} more" if len(groups) > 10 else ""
    subject = "1 image lies" if len(groups) == 1 else f"{len(groups):,} images lie"
    return [f"{subject} in several classes: {shown}{more}"]
