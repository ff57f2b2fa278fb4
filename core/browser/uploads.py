"""Archives that a browser sends: received slice by slice onto the disk, unpacked, and kept as folders.

An archive is deleted as soon as it is unpacked, so that nothing lies there twice. What has not arrived whole goes when
no byte has come for an hour, and at the next start.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from core.browser.shelf import Limits, Shelf, UploadError, cannot_keep, limits_here, safe_name
from core.data.archives import kind_of, stem_of, unpack_into
from core.errors import AppError
from core.files import remove, sweep, try_lock

INCOMING = ".incoming-"
"""How the folders begin in which uploads arrive, one a process."""
_LOCK = "lock"
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Incoming:
    """An upload under way.

    Attributes:
        stamp: what tells that the same file is sent again: its name, size and time of change.
        state: receiving, unpacking, ready or failed.
        offset: the bytes that are here.
        progress: of the unpacking: entries done, and their number (0: not known).
        kept: the name that it has once it is ready.
    """

    upload_id: str
    name: str
    size_bytes: int
    stamp: str
    path: Path
    last_s: float
    state: str = "receiving"
    offset: int = 0
    progress: tuple[int, int] = (0, 0)
    kept: str = ""
    problem: str = ""
    fix: str = ""
    turn: int = 0
    is_cancelled: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def is_under_way(self) -> bool:
        return self.state in ("receiving", "unpacking")

    def facts(self) -> dict[str, Any]:
        """What the browser is told."""
        return {
            "id": self.upload_id,
            "state": self.state,
            "offset": self.offset,
            "done": self.progress[0],
            "total": self.progress[1],
            "kept": self.kept,
            "problem": self.problem,
            "fix": self.fix,
        }


class _CancelledError(Exception):
    """Somebody cancelled the upload."""


class Uploads(Shelf):
    """All uploads below a home; any thread may call it.

    Args:
        home: the store's; uploads are kept in its folder `uploads`.
        clock: seconds that only go forward.
    """

    def __init__(self, home: Path, limits: Limits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(home / "uploads", limits or limits_here())
        self._clock = clock
        self._under_way: dict[str, Incoming] = {}
        self._lock = threading.RLock()
        self._place: Path | None = None
        self._held: IO[bytes] | None = None
        self._sweep_dead()

    def begin(self, name: str, size_bytes: int, modified: object = "") -> Incoming:
        """Make room for a file that is to come, or find the one that began to come before.

        Args:
            modified: when the file was changed last, in any form.

        Raises:
            UploadError: it is no archive by its name, too large, there are too many, or there is no space.
        """
        shown = safe_name(name)
        self.check_file(shown, size_bytes)
        stamp = f"{shown}\n{size_bytes}\n{modified}"
        with self._lock:
            self.drop_idle()
            for upload in self._under_way.values():
                if upload.stamp == stamp and upload.state == "receiving":
                    return upload
            self.check_room(size_bytes, [busy.size_bytes - busy.offset for busy in self.under_way()])
            upload_id = secrets.token_urlsafe(16)
            upload = Incoming(upload_id, shown, size_bytes, stamp, self._arrivals() / upload_id, self._clock())
            upload.path.touch()
            self._under_way[upload_id] = upload
            return upload

    def find(self, upload_id: str) -> Incoming:
        """An upload by its id, as long as it is under way or has ended a moment ago.

        Raises:
            UploadError: there is none.
        """
        with self._lock:
            self.drop_idle()
            if upload_id not in self._under_way:
                raise UploadError(404, "This upload is not here any more.", fix="Choose the file again.")
            return self._under_way[upload_id]

    def take_turn(self, upload: Incoming, offset: int, length: int | None) -> int:
        """Let a slice come, and no other one that may still hang in the line; returns what `write` is to be told.

        Args:
            offset: of its first byte.
            length: its bytes, as far as they are said beforehand.

        Raises:
            UploadError: it is not the next one, or too long.
        """
        with upload.lock:
            self._check_receiving(upload)
            upload.turn += 1
            if offset != upload.offset:
                problem = f"The slice begins at {offset:,}, and {upload.offset:,} bytes are here."
                raise UploadError(409, problem, fix="Send what comes next.", offset=upload.offset)
            if length is not None and length > min(self.limits.slice_bytes, upload.size_bytes - offset):
                raise UploadError(
                    413, f"A slice of {length:,} bytes is too long.", fix="Send less at once.", offset=upload.offset
                )
            return upload.turn

    def write(self, upload: Incoming, turn: int, data: bytes) -> None:
        """Put bytes behind those that are here; the last one lets the unpacking begin.

        Raises:
            UploadError: another slice came meanwhile, more came than was announced, or the disk is full.
        """
        try:
            with upload.lock:
                self._write(upload, turn, data)
        except UploadError as error:
            if error.is_end:
                self._drop(upload)
            raise

    def _write(self, upload: Incoming, turn: int, data: bytes) -> None:
        self._check_receiving(upload)
        if turn != upload.turn:
            raise UploadError(409, "Another slice came.", fix="Send what comes next.", offset=upload.offset)
        if upload.offset + len(data) > upload.size_bytes:
            problem = f"'{upload.name}' is longer than it was said to be."
            raise UploadError(413, problem, fix="Choose the file again.", is_end=True)
        try:
            if shutil.disk_usage(self.folder).free - len(data) < self.limits.free_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with upload.path.open("r+b") as out:
                out.seek(upload.offset)
                out.write(data)
        except OSError as error:
            raise cannot_keep(upload.name, error) from error
        upload.offset += len(data)
        upload.last_s = self._clock()
        if upload.offset == upload.size_bytes:
            upload.state = "unpacking"
            threading.Thread(target=self._unpack, args=(upload,), name="upload-unpack", daemon=True).start()

    def cancel(self, upload_id: str) -> None:
        """Forget an upload with all that has come of it; nothing happens where there is none."""
        with self._lock:
            upload = self._under_way.get(upload_id)
        if upload is not None:
            self._drop(upload)

    def under_way(self) -> list[Incoming]:
        """Those that have not come whole or are being unpacked."""
        with self._lock:
            self.drop_idle()
            return [upload for upload in self._under_way.values() if upload.is_under_way]

    def silent_s(self, upload: Incoming) -> float:
        """Seconds since the last byte came."""
        return self._clock() - upload.last_s

    def drop_idle(self) -> None:
        """Forget those of which no byte has come for long, and those that ended so long ago."""
        with self._lock:
            for upload in list(self._under_way.values()):
                if upload.state != "unpacking" and self.silent_s(upload) > self.limits.idle_s:
                    self._drop(upload)

    def close(self) -> None:
        """Forget all that are under way."""
        with self._lock:
            for upload in list(self._under_way.values()):
                self._drop(upload)
            if self._held is not None:
                self._held.close()
                self._held = None
            if self._place is not None:
                remove(self._place)
                self._place = None

    def _check_receiving(self, upload: Incoming) -> None:
        if upload.state != "receiving":
            raise UploadError(
                409, f"'{upload.name}' is here already.", fix="Look at how it goes on.", offset=upload.offset
            )

    def _drop(self, upload: Incoming) -> None:
        with upload.lock:
            upload.is_cancelled = True
            # a slice that is still coming finds that it is not wanted
            upload.turn += 1
            if upload.state == "receiving":
                upload.state = "failed"
            remove(upload.path)
        with self._lock:
            self._under_way.pop(upload.upload_id, None)

    def _unpack(self, upload: Incoming) -> None:
        def tell(what: str, done: int, total: int) -> None:
            if upload.is_cancelled:
                raise _CancelledError
            upload.progress = (done, total)

        try:
            kind = kind_of(upload.path)
            if kind is None:
                problem = f"'{upload.name}' is called an archive, and is neither a .zip nor a .tar."
                raise UploadError(415, problem, fix="Pack the folder anew.")
            with upload.path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()[:12]
            target = self.folder / f"{stem_of(upload.name)[:50]}-{digest}"
            if not target.exists():
                unpack_into(target, upload.name, upload.path, kind, tell, leave_bytes=self.limits.free_bytes)
            upload.kept = target.name
            upload.state = "ready"
        except _CancelledError:
            pass
        except AppError as error:
            self._fail(upload, error.problem, error.fix)
        except OSError as error:
            if not upload.is_cancelled:
                told = cannot_keep(upload.name, error)
                self._fail(upload, told.problem, told.fix)
        except Exception as error:
            _log.exception("Unpacking the upload %r failed", upload.name)
            self._fail(upload, f"Unpacking failed: {type(error).__name__}.", "The server's log says more.")
        finally:
            upload.last_s = self._clock()
            remove(upload.path)

    def _fail(self, upload: Incoming, problem: str, fix: str) -> None:
        upload.problem, upload.fix = problem, fix
        upload.state = "failed"

    def _arrivals(self) -> Path:
        """The folder of this process's unfinished uploads, which is held as long as the process lives."""
        if self._place is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._place = self.folder / f"{INCOMING}{secrets.token_hex(4)}"
            self._place.mkdir(mode=0o700)
            self._held = (self._place / _LOCK).open("wb")
            try_lock(self._held)
        return self._place

    def _sweep_dead(self) -> None:
        """Remove what arrived in processes that are no more; process ids come again, so a lock tells who lives."""
        if not self.folder.is_dir():
            return
        sweep(self.folder)
        for place in self.folder.glob(f"{INCOMING}*"):
            with contextlib.suppress(OSError), (place / _LOCK).open("ab") as lock:
                if try_lock(lock):
                    remove(place)
