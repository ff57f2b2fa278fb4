"""What lies below a folder: folders and files by name, hidden ones apart, links kept inside."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from core.errors import DataError

# fmt: off
PICTURE_EXTENSIONS = {
    "jpg", "jpeg", "jpe", "jfif", "jif", "jfi", "mpo", "png", "apng", "gif", "bmp", "dib", "tif", "tiff", "webp",
    "avif", "avifs", "jp2", "j2k", "jpf", "jpx", "j2c", "jpc", "ico", "icns", "cur", "ppm", "pgm", "pbm", "pnm",
    "pfm", "tga", "icb", "vda", "vst", "pcx", "dcx", "dds", "qoi", "sgi", "rgb", "rgba", "bw", "ras", "xbm", "xpm",
    "psd", "fli", "flc", "blp", "im", "msp", "spi",
}
UNSUPPORTED_EXTENSIONS = {
    "svg", "svgz", "heic", "heif", "hif", "heics", "raw", "dng", "cr2", "cr3", "crw", "nef", "nrw", "arw", "srf",
    "sr2", "orf", "rw2", "raf", "pef", "x3f", "3fr", "erf", "kdc", "mrw", "psb", "xcf", "ai", "eps", "wmf", "emf",
    "jxl", "jxr", "exr", "hdr", "pdf", "srw", "iiq",
    "mef", "mos", "rwl", "dcm", "dicom", "fits", "fit", "wdp", "hdp", "djvu",
}
# fmt: on
MAGIC = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n|GIF8[79]a|BM.{4}\0\0\0\0|II\*\0|MM\0\*|RIFF.{4}WEBP|\0\0\0\x0cjP  |.{4}ftypavi[fs]",
    re.DOTALL,
)
"""How the bytes of common picture formats begin."""
MAX_DEPTH = 100
"""Folders below folders; deeper ones are not read."""
_SYSTEM_NAMES = {
    "__macosx",
    "__pycache__",
    "@eadir",
    "#recycle",
    "$recycle.bin",
    "recycler",
    "system volume information",
    "lost+found",
    "thumbs.db",
    "ehthumbs.db",
    "ehthumbs_vista.db",
    "desktop.ini",
    "icon\r",
    "network trash folder",
    "temporary items",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class File:
    """A file: where it lies, its name relative to the data's root with slashes, and what tells that it changed."""

    path: str
    name: str
    size: int
    mtime_ns: int
    ctime_ns: int

    @property
    def extension(self) -> str:
        """In lower case, without the dot; "" where there is none."""
        stem, dot, extension = self.name.rpartition("/")[2].rpartition(".")
        return extension.lower() if dot and stem else ""

    @property
    def may_be_picture(self) -> bool:
        """By its extension, or by its first bytes where it has none."""
        if self.extension:
            return self.extension in PICTURE_EXTENSIONS | UNSUPPORTED_EXTENSIONS
        try:
            with open(self.path, "rb") as opened:
                return MAGIC.match(opened.read(32)) is not None
        except OSError:
            return False


@dataclass
class Folder:
    """A folder without what is hidden in it; `name` is in Unicode NFC."""

    name: str
    folders: list[Folder] = field(default_factory=list)
    files: list[File] = field(default_factory=list)

    def all_files(self) -> Iterator[File]:
        """Its files and those of all folders below."""
        yield from self.files
        for folder in self.folders:
            yield from folder.all_files()

    @cached_property
    def holds_pictures(self) -> bool:
        """Whether a file that may be a picture lies in it or below."""
        return any(file.may_be_picture for file in self.files) or any(f.holds_pictures for f in self.folders)

    @cached_property
    def is_empty(self) -> bool:
        """Whether no file lies in it or below."""
        return not self.files and all(folder.is_empty for folder in self.folders)


@dataclass
class Tree:
    """A folder read whole: hidden and system files by name, and links that lead out, round in a loop, or nowhere.

    `followed` holds the folders that a link led to; each is followed once.
    """

    top: Folder
    hidden: list[str]
    unsafe_links: list[str]
    broken: list[str]
    followed: set[str] = field(default_factory=set)
    unread: str = ""


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name belongs to a system or a tool and not to the data."""
    return name.startswith((".", "~$")) or name.lower() in _SYSTEM_NAMES


def spell(name: str) -> str:
    """A file system's name as text in Unicode NFC; bytes that are no UTF-8 are read as cp932, as in zips from Japan."""
    raw = os.fsencode(name)
    for encoding in ("utf-8", "cp932"):
        try:
            return unicodedata.normalize("NFC", raw.decode(encoding))
        except UnicodeDecodeError:
            continue
    return raw.decode("utf-8", "replace")


def read_tree(root: Path, without: Path | None = None) -> Tree:
    """Read all folders below `root`, each sorted by name; links are followed inside `root` alone, and never in a loop.

    Args:
        without: a folder that is left unread and counts as hidden, such as the product's own.

    Raises:
        DataError: `root` itself can't be read.
    """
    real_root = os.path.realpath(root)
    tree = Tree(Folder(spell(root.name)), [], [], [])
    try:
        tree.unread = os.path.realpath(without) if without else ""
        _read(str(root), "", tree.top, tree, real_root, (real_root,))
    except OSError as error:
        raise DataError(f"'{root}' can't be read: {error.strerror}.", fix="Check its permissions.") from error
    return tree


def find_file(root: Path, name: str) -> str | None:
    """Where the file of this name lies, in either Unicode spelling; None where there is none inside `root`."""
    wanted = unicodedata.normalize("NFC", name)
    return next((file.path for file in read_tree(root).top.all_files() if file.name == wanted), None)


def _read(path: str, prefix: str, folder: Folder, tree: Tree, real_root: str, above: tuple[str, ...]) -> None:
    with os.scandir(path) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    taken: dict[str, int] = {}
    for entry in entries:
        spelled = spell(entry.name)
        # names that differ in their Unicode spelling alone are told apart by a number
        count = taken[spelled] = taken.get(spelled, 0) + 1
        name = f"{prefix}{spelled}" if count == 1 else f"{prefix}{spelled} ({count})"
        try:
            if is_hidden(entry.name):
                _note_hidden(entry, name, tree)
            elif entry.is_symlink() and not _may_follow(entry, tree, real_root, above):
                tree.unsafe_links.append(name)
            elif entry.is_dir():
                real = os.path.realpath(entry.path) if entry.is_symlink() else os.path.join(above[-1], entry.name)
                if real == tree.unread:
                    continue
                if len(above) > MAX_DEPTH:
                    tree.broken.append(name)
                    continue
                below = Folder(spelled)
                folder.folders.append(below)
                _read(entry.path, f"{name}/", below, tree, real_root, (*above, real))
            elif entry.is_file():
                stat = entry.stat()
                folder.files.append(File(entry.path, name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
            else:
                tree.broken.append(name)
        except OSError:
            tree.broken.append(name)


def _note_hidden(entry: os.DirEntry[str], name: str, tree: Tree) -> None:
    waiting = [(entry.path, name, entry.is_dir(follow_symlinks=False))]
    while waiting:
        path, name, is_folder = waiting.pop()
        if not is_folder:
            tree.hidden.append(name)
            continue
        with os.scandir(path) as found:
            waiting += [(e.path, f"{name}/{spell(e.name)}", e.is_dir(follow_symlinks=False)) for e in found]


def _may_follow(link: os.DirEntry[str], tree: Tree, real_root: str, above: tuple[str, ...]) -> bool:
    real = os.path.realpath(link.path)
    if not real.startswith(real_root.rstrip(os.sep) + os.sep) or not os.path.exists(real):
        return False
    if link.is_dir():
        if real in above or real in tree.followed:
            return False
        tree.followed.add(real)
    return True
