"""Decoded and resized pictures in memory-mapped files, made once and shared by all runs that want them alike.

A cache folder holds the pictures of one size, interpolation and shape in segments: a file of pixels, and an index that
says which picture (by the digest of its file's bytes) lies where. A segment is written whole, then its index is put in
place; pixels without an index are never read, so a process may be killed at any moment.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import mmap
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from core.data.ahead import in_order
from core.data.images import Decoded, UnreadableError, decode, resize
from core.data.progress import Progress, quiet
from core.data.split import Item
from core.errors import DataError
from core.files import BUILDING, remove, sweep

LIMIT_VARIABLE = "FINETUNE_CACHE_GIB"
DEFAULT_LIMIT_GIB = 20.0
LONGEST_SIDE = 2
"""Pictures that keep their shape are cut at the centre to this many times their short side."""
_VERSION = 1
_RELEASE_BYTES = 2**28
_AHEAD = 64
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fit:
    """How pictures are made to fit.

    Attributes:
        size: the short side in pixels, reached with antialias.
        interpolation: bilinear or bicubic.
        keeps_shape: whether the long side stays, up to `LONGEST_SIDE` times the short one; else it is cut square.
    """

    size: int
    interpolation: str
    keeps_shape: bool

    @property
    def folder(self) -> str:
        shape = "shape" if self.keeps_shape else "square"
        return f"packed-{_VERSION}-{self.size}-{self.interpolation}-{shape}"

    def shape_of(self, width: int, height: int) -> tuple[int, int]:
        """Height and width of the fitted picture."""
        if not self.keeps_shape:
            return self.size, self.size
        high, wide = self._scaled(width, height)
        return min(high, LONGEST_SIDE * self.size), min(wide, LONGEST_SIDE * self.size)

    def __call__(self, pixels: NDArray[np.uint8], width: int, height: int) -> NDArray[np.uint8]:
        """Fit (h, w, 3), which may be a smaller version of a picture of `width` x `height`."""
        short, long = min(pixels.shape[:2]), max(pixels.shape[:2])
        most = LONGEST_SIDE if self.keeps_shape else 1
        if long > 16 * short:
            # the whole of a thin strip could be enlarged beyond memory
            pixels = _centre(pixels, min(pixels.shape[0], most * short), min(pixels.shape[1], most * short))
        else:
            pixels = resize(pixels, *self._scaled(width, height), self.interpolation)
        high, wide = self.shape_of(width, height)
        if long > 16 * short:
            pixels = resize(pixels, high, wide, self.interpolation)
        return _centre(pixels, high, wide)

    def _scaled(self, width: int, height: int) -> tuple[int, int]:
        if width <= height:
            return self.size * height // width, self.size
        return self.size, self.size * width // height


def _centre(pixels: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    top, left = round((pixels.shape[0] - height) / 2), round((pixels.shape[1] - width) / 2)
    return np.ascontiguousarray(pixels[top : top + height, left : left + width])


def read_again(item: Item, at_least: int) -> Decoded:
    """Decode a picture that the scan has found, see `decode`.

    Raises:
        OSError, UnreadableError: it can't be read any more, or it is another one now.
    """
    content = item.path.read_bytes()
    if hashlib.sha256(content).hexdigest() != item.digest:
        raise UnreadableError("changed", "it changed after it was read")
    return decode(content, at_least)


class PackedImages:
    """The pictures of a data set, fitted.

    The order of use: `add` while the data are scanned (so that each file is decoded once), `choose` the pictures,
    `fill` in what is missing in the background, `pixels`, `close`. `pixels` waits for a picture that is being made.

    Args:
        home: the cache lies in its folder cache.

    Raises:
        DataError: the cache can't be written.
    """

    def __init__(self, home: Path, fit: Fit) -> None:
        self.fit = fit
        self.lost: dict[str, str] = {}
        self.was_built = False
        self._folder = home / "cache" / fit.folder
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            sweep(self._folder)
            self._segments: list[_Segment | _NewSegment] = list(_open_segments(self._folder))
            self._new = _NewSegment(self._folder)
        except OSError as error:
            raise _unwritable(error) from error
        self._segments.append(self._new)
        self._where = {
            digest: (place, row) for place, s in enumerate(self._segments) for row, digest in enumerate(s.digests)
        }
        self._items: list[Item] = []
        self._changed = threading.Condition()
        self._closed = False
        self._filler: threading.Thread | None = None
        self._failure: Exception | None = None
        self._read_bytes = 0
        self._began = 0.0

    def __len__(self) -> int:
        return len(self._items)

    def add(self, digest: str, picture: Decoded) -> None:
        """Fit a decoded picture and keep it, unless the cache has it; any thread may call this.

        Raises:
            DataError: the cache can't be written.
        """
        if digest in self._where:
            return
        self._began = self._began or time.monotonic()
        fitted = self.fit(picture.pixels, picture.width, picture.height)
        try:
            row = self._new.add(digest, fitted)
        except OSError as error:
            raise _unwritable(error) from error
        with self._changed:
            self._where.setdefault(digest, (len(self._segments) - 1, row))
            self.was_built = True
            self._changed.notify_all()

    def choose(self, items: Sequence[Item]) -> None:
        """Take these pictures, numbered in this order.

        Raises:
            DataError: the disk has no room for what is missing.
        """
        self._items = list(items)
        shapes = [self.fit.shape_of(item.width, item.height) for item in items]
        self.heights, self.widths = np.array(shapes, dtype=np.int64).reshape(-1, 2).T
        missing = {
            item.digest: h * w * 3 for item, (h, w) in zip(items, shapes, strict=True) if item.digest not in self._where
        }
        needed = sum(missing.values())
        self._evict(needed)
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise DataError(
                f"The image cache needs {needed / 2**30:.1f} GiB, and {self._folder} has {free / 2**30:.1f} GiB left.",
                fix="Free some space, choose another --home, or a smaller image size.",
            )

    def fill(
        self,
        order: Sequence[int],
        on_lost: Callable[[str, str], None] = lambda file, why: None,
        progress: Progress = quiet,
        on_built: Callable[[int, float], None] = lambda images, seconds: None,
    ) -> None:
        """Make the missing pictures in a background thread, in this order, and then seal what was made.

        Args:
            order: numbers of pictures; what is needed first comes first.
            on_lost: called with a file that can't be read any more, and why.
            on_built: called at the end with how many pictures were packed, and the seconds since the first.
        """
        seen: set[str] = set()
        missing = []
        for number in order:
            item = self._items[number]
            if item.digest not in self._where and item.digest not in seen:
                seen.add(item.digest)
                missing.append(item)
        if missing or self._new.digests:
            self.was_built = True
            self._filler = threading.Thread(
                target=self._fill, args=(missing, on_lost, progress, on_built), name="cache-filler", daemon=True
            )
            self._filler.start()

    def is_filling(self) -> bool:
        """Whether pictures are still being made in the background."""
        return self._filler is not None and self._filler.is_alive()

    def settle(self) -> None:
        """Wait until what `fill` began is done, so that another process finds it."""
        if self._filler is not None:
            self._filler.join()

    def pixels(self, number: int) -> NDArray[np.void] | None:
        """A picture as (height, width) items of three bytes, read-only; None where its file is lost.

        Raises:
            DataError: the cache can't be written any more; or whatever else ended the packing.
        """
        item = self._items[number]
        place = self._where.get(item.digest)
        if place is None:
            with self._changed:
                self._changed.wait_for(lambda: self._is_settled(item))
            place = self._where.get(item.digest)
            if self._failure is not None and place is None:
                raise self._failure
            if place is None:
                return None
        segment, row = self._segments[place[0]], place[1]
        found = segment.pixels(row)
        self._read_bytes += found.nbytes
        if self._read_bytes > _RELEASE_BYTES:
            self._read_bytes = 0
            self.release()
        return found

    def release(self) -> None:
        """Hand pages that were read back to the system, so that memory stays flat; reading them again costs little."""
        for segment in self._segments:
            segment.release()

    def close(self) -> None:
        """End the background work; what was made so far is sealed and kept."""
        self._closed = True
        if self._filler is not None:
            self._filler.join()
        else:
            self._seal()
        with self._changed:
            self._changed.notify_all()
        self._new.close()
        self.release()

    def _is_settled(self, item: Item) -> bool:
        return (
            item.digest in self._where
            or item.digest in self.lost
            or self._closed
            or self._failure is not None
            or not self.is_filling()
        )

    def _fill(
        self,
        missing: list[Item],
        on_lost: Callable[[str, str], None],
        progress: Progress,
        on_built: Callable[[int, float], None],
    ) -> None:
        try:
            jobs = (partial(self._make, item, on_lost) for item in missing)
            for done, _ in enumerate(in_order(jobs, os.cpu_count() or 1, ahead=_AHEAD, name="pack"), start=1):
                progress("packing images", done, len(missing))
            self._seal()
            on_built(len(self._new.digests), time.monotonic() - self._began if self._began else 0.0)
        except Exception as error:  # what is missing now would pass for lost
            _log.exception("Pictures can't be packed any more.")
            self._failure = self._failure or error
        finally:
            with self._changed:
                self._changed.notify_all()

    def _make(self, item: Item, on_lost: Callable[[str, str], None]) -> None:
        if self._closed or self._failure is not None:
            return
        try:
            picture = read_again(item, self.fit.size)
        except (OSError, UnreadableError) as error:
            with self._changed:
                self.lost[item.digest] = str(error)
                self._changed.notify_all()
            on_lost(item.file, str(error))
            return
        try:
            self.add(item.digest, picture)
        except DataError as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _seal(self) -> None:
        try:
            sealed = self._new.seal()
        except OSError:
            _log.warning("The image cache can't be kept for later runs.", exc_info=True)
            return
        if sealed is not None:
            self._segments[-1] = sealed

    def _evict(self, needed: int) -> None:
        """Remove the segments used longest ago while the whole cache would go over its limit."""
        mine = {
            self._segments[place].path
            for place in {self._where[i.digest][0] for i in self._items if i.digest in self._where}
        }
        for segment in self._segments:
            if segment.path in mine:
                segment.touch()
        others = [
            index for index in self._folder.parent.glob("packed-*/*.npz") if index.with_suffix(".bin") not in mine
        ]
        sizes = {index: _size(index.with_suffix(".bin")) for index in others}
        total = needed + sum(_size(path) for path in mine) + sum(sizes.values())
        for index in sorted(others, key=_last_used):
            if total <= limit_bytes():
                return
            total -= sizes[index]
            # the index goes first: pixels without one are never read
            remove(index)
            remove(index.with_suffix(".bin"))


def limit_bytes() -> int:
    """Bytes that all packed pictures together may take."""
    try:
        limit = float(os.environ.get(LIMIT_VARIABLE, ""))
    except ValueError:
        limit = DEFAULT_LIMIT_GIB
    return int(limit * 2**30)


class _NewSegment:
    """A segment that grows; its rows can be read at once."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"{BUILDING}{os.getpid()}-{secrets.token_hex(4)}"
        self.digests: list[str] = []
        self._rows: list[tuple[int, int, int]] = []
        self._end = 0
        self._lock = threading.Lock()
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self._sealed: _Segment | None = None

    def add(self, digest: str, pixels: NDArray[np.uint8]) -> int:
        height, width = pixels.shape[:2]
        with self._lock:
            start, self._end = self._end, self._end + pixels.nbytes
        data = memoryview(pixels.reshape(-1).data)
        written = 0
        while written < len(data):
            written += os.pwrite(self._file, data[written:], start + written)
        with self._lock:
            self.digests.append(digest)
            self._rows.append((start, height, width))
            return len(self._rows) - 1

    def pixels(self, row: int) -> NDArray[np.void]:
        start, height, width = self._rows[row]
        data = os.pread(self._file, height * width * 3, start)
        return np.frombuffer(data, dtype="V3").reshape(height, width)

    def seal(self) -> _Segment | None:
        """Put an index beside the pixels; a segment without rows is removed."""
        if self._sealed is not None or not self.digests:
            if self._sealed is None:
                remove(self.path)
            return self._sealed
        os.fsync(self._file)
        name = secrets.token_hex(8)
        target = self.path.with_name(f"{name}.bin")
        digests = np.frombuffer(bytes.fromhex("".join(self.digests)), dtype=np.uint8).reshape(-1, 32)
        temporary = self.path.with_name(f"{self.path.name}-index.npz")
        try:
            # numpy tries once more to end a file that it could not write, and tells nobody how that went
            whole = io.BytesIO()
            np.savez(whole, digests=digests, rows=np.array(self._rows, dtype=np.int64), size=self._end)
            temporary.write_bytes(whole.getbuffer())
            os.replace(self.path, target)
            os.replace(temporary, target.with_suffix(".npz"))
        finally:
            remove(temporary)
        self._sealed = _Segment(target)
        return self._sealed

    def touch(self) -> None:
        pass

    def release(self) -> None:
        pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._file)
        if self._sealed is None:
            remove(self.path)


class _Segment:
    """A sealed segment, memory-mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with np.load(path.with_suffix(".npz")) as index:
            raw, self._rows, size = index["digests"].tobytes(), index["rows"], int(index["size"])
        self.digests = [raw[start : start + 32].hex() for start in range(0, len(raw), 32)]
        with path.open("rb") as opened:
            if os.fstat(opened.fileno()).st_size < size:
                raise ValueError(f"{path} is shorter than its index says")
            self._map = mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_READ)
        self._pixels = np.frombuffer(self._map, dtype="V3")

    def pixels(self, row: int) -> NDArray[np.void]:
        start, height, width = self._rows[row]
        return self._pixels[start // 3 : start // 3 + height * width].reshape(height, width)

    def touch(self) -> None:
        with contextlib.suppress(OSError):
            os.utime(self.path.with_suffix(".npz"))

    def release(self) -> None:
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def _open_segments(folder: Path) -> list[_Segment]:
    segments = []
    for index in sorted(folder.glob("*.npz")):
        if index.name.startswith(BUILDING):
            continue
        try:
            segments.append(_Segment(index.with_suffix(".bin")))
        except (OSError, ValueError, KeyError) as error:
            _log.warning("A part of the image cache is damaged and made anew: %s", error)
            remove(index)
            remove(index.with_suffix(".bin"))
    for pixels in folder.glob("*.bin"):
        if not pixels.with_suffix(".npz").exists() and _is_old(pixels):
            remove(pixels)
    return segments


def _is_old(path: Path) -> bool:
    """A segment's pixels are for a moment without their index; an hour later they were left behind."""
    return time.time() - _last_used(path) > 3600


def _last_used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _unwritable(error: OSError) -> DataError:
    why = error.strerror or error
    return DataError(f"The image cache can't be written: {why}.", fix="Free some space, or choose another --home.")
