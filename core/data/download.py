"""Files from the web: resumed where they were cut, whole or not there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPMessage, HTTPResponse
from pathlib import Path
from typing import IO

from core.data.progress import Progress, quiet
from core.data.public import open_url
from core.errors import DataError
from core.files import remove, try_lock

TIMEOUT_S = 30.0
RETRIES = 4
PAUSE_S = 0.5
"""The first pause before a new try; each further one is twice as long."""
_CHUNK_BYTES = 2**18
_USER_AGENT = "image-classifier-dashboard/1 (Python urllib)"
_BUSY = (429, 500, 502, 503, 504)
_FIX_OFFLINE = "Check the network, or download the file elsewhere and give its path."


class _CutError(HTTPException):
    """The connection ended before the file did."""


def name_of(url: str) -> str:
    """The file name at the end of a URL's path, made safe for a disk; "download" where it has none.

    Raises:
        DataError: it is no http or https URL with a host.
    """
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:
        parts = urllib.parse.SplitResult("", "", "", "", "")
    if parts.scheme.lower() not in ("http", "https") or not parts.hostname:
        raise DataError(f"'{url}' is no web address.", fix="Write it as https://host/file.zip.")
    name = urllib.parse.unquote(parts.path).rsplit("/", 1)[-1]
    return re.sub(r"[^\w.()+ -]", "_", name).lstrip(".")[-60:] or "download"


def place_of(url: str, folder: Path) -> Path:
    """Where the file of a URL lies below `folder` once it is whole."""
    return folder / hashlib.sha256(url.encode()).hexdigest()[:12] / name_of(url)


def fetch(url: str, folder: Path, progress: Progress = quiet, *, md5: str = "") -> Path:
    """Download a file below `folder`, unless it is there already; a cut download goes on where it ended.

    Args:
        progress: told of "downloading" with the bytes done and their number (0: the server doesn't say).
        md5: what the file's MD5 must be; "" where none is known.

    Raises:
        DataError: there is no network or no such file, a web page came instead, or the disk is full.
    """
    target = place_of(url, folder)
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    note = target.with_name(f"{target.name}.part.json")
    with _held(part, progress):
        if target.is_file():
            return target
        _Download(url, part, note, progress).finish()
        if md5 and md5_of(part) != md5:
            part.unlink()
            raise DataError(f"'{url}' holds other bytes than expected.", fix="Try again later, or check the network.")
        os.replace(part, target)
        remove(note)
    return target


@contextmanager
def _held(part: Path, progress: Progress) -> Iterator[None]:
    """Nobody else writes `part` in this block; it is removed where nothing came."""
    with contextlib.ExitStack() as stack:
        while not _is_held(stack.enter_context(part.open("ab")), part):
            stack.close()
            # whoever holds it may be giving it its final name just now
            with contextlib.suppress(FileNotFoundError):
                progress("downloading", part.stat().st_size, 0)
            time.sleep(PAUSE_S)
        try:
            yield
        finally:
            with contextlib.suppress(FileNotFoundError):
                if part.stat().st_size == 0:
                    part.unlink()


def _is_held(file: IO[bytes], part: Path) -> bool:
    # who held it before may have given it the final name or removed it
    try:
        return try_lock(file) and os.path.samestat(os.fstat(file.fileno()), part.stat())
    except FileNotFoundError:
        return False


class _Download:
    """One file on its way into `part`; `note` keeps which version of it the part is of."""

    def __init__(self, url: str, part: Path, note: Path, progress: Progress) -> None:
        self._url = url
        self._part = part
        self._note = note
        self._progress = progress

    def finish(self) -> None:
        """Receive until the file is whole, with a few new tries where the connection is cut."""
        failures = 0
        while True:
            before = self._size()
            try:
                return self._receive()
            except urllib.error.HTTPError as error:
                with error:
                    if error.code == 416:
                        if error.headers.get("Content-Range", "") == f"bytes */{before}":
                            return None
                        self._part.write_bytes(b"")
                    elif error.code not in _BUSY or failures >= RETRIES:
                        raise self._refusal(error.code, str(error.reason)) from error
                failures += 1
            except (urllib.error.URLError, HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
                failures = 1 if self._size() > before else failures + 1
                is_unreachable = isinstance(error, urllib.error.URLError) and self._size() == 0
                if is_unreachable or failures > RETRIES:
                    raise self._explained(error) from error
            except OSError as error:
                raise DataError(
                    f"'{self._url}' can't be saved below {self._part.parent}: {error.strerror or error}.",
                    fix="Free some space, or choose another --home.",
                ) from error
            time.sleep(PAUSE_S * 2 ** (failures - 1))

    def _size(self) -> int:
        return self._part.stat().st_size if self._part.exists() else 0

    def _receive(self) -> None:
        done = self._size()
        version = self._version() if done else ""
        headers = {"User-Agent": _USER_AGENT, "Accept-Encoding": "identity"}
        if version:
            headers |= {"Range": f"bytes={done}-", "If-Range": version}
        request = urllib.request.Request(self._url, headers=headers)
        with open_url(request, TIMEOUT_S) as answer:
            is_rest = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {done}-")
            if not is_rest:
                done = 0
                self._part.write_bytes(b"")
                self._note.write_text(json.dumps(_version_in(answer.headers)), encoding="utf-8")
            length = answer.headers.get("Content-Length", "")
            total = done + int(length) if length.isdecimal() else 0
            self._check_space(total - done)
            done = self._write(answer, done, total)
        if total and done != total:
            raise _CutError(f"{done} of {total} bytes came")

    def _write(self, answer: HTTPResponse, done: int, total: int) -> int:
        with self._part.open("ab") as out:
            while chunk := answer.read(_CHUNK_BYTES):
                if done == 0:
                    self._refuse_web_page(chunk, answer.headers.get("Content-Type", ""))
                out.write(chunk)
                done += len(chunk)
                self._progress("downloading", done, total)
        return done

    def _version(self) -> str:
        try:
            version = json.loads(self._note.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return ""
        return version if isinstance(version, str) else ""

    def _check_space(self, missing_bytes: int) -> None:
        free = shutil.disk_usage(self._part.parent).free
        if missing_bytes > free:
            raise DataError(
                f"'{self._url}' needs {missing_bytes / 2**30:.1f} GiB more, and {self._part.parent} has "
                f"{free / 2**30:.1f} GiB left.",
                fix="Free some space, or choose another --home.",
            )

    def _refuse_web_page(self, head: bytes, content_type: str) -> None:
        starts = head[:512].lstrip().lower()
        if "text/html" in content_type.lower() or starts.startswith((b"<!doctype html", b"<html")):
            raise DataError(
                f"'{self._url}' answers with a web page, not with a file.", fix="Give the address of the file itself."
            )

    def _refusal(self, code: int, reason: str) -> DataError:
        if code in (404, 410):
            return DataError(f"There is nothing at '{self._url}' ({code} {reason}).", fix="Check the address.")
        if code in (401, 403):
            fix = "Download the file yourself and give its path."
            return DataError(f"'{self._url}' is not open to everyone ({code} {reason}).", fix=fix)
        return DataError(f"'{self._url}' can't be had: the server answers {code} {reason}.", fix="Try again later.")

    def _explained(self, error: Exception) -> DataError:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        host = urllib.parse.urlsplit(self._url).hostname
        if isinstance(reason, ssl.SSLError):
            problem = f"'{self._url}' can't be had: the certificate of {host} is not trusted"
            return DataError(f"{problem} ({reason.reason}).", fix="Check this machine's clock and certificates.")
        if isinstance(reason, socket.gaierror):
            return DataError(f"'{self._url}' can't be had: {host} is not found; is there no network?", fix=_FIX_OFFLINE)
        if isinstance(reason, TimeoutError):
            problem = f"'{self._url}' can't be had: {host} does not answer within {TIMEOUT_S:.0f} s."
            return DataError(problem, fix=_FIX_OFFLINE)
        if isinstance(reason, _CutError):
            problem = f"'{self._url}' is cut again and again ({reason})."
            return DataError(problem, fix="Try again; it goes on where it ended.")
        text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        return DataError(f"'{self._url}' can't be had: {host} can't be reached ({text}).", fix=_FIX_OFFLINE)


def _version_in(headers: HTTPMessage) -> str:
    etag = headers.get("ETag", "")
    # a weak tag does not promise equal bytes
    return etag if etag.startswith('"') else headers.get("Last-Modified", "")


def md5_of(path: Path) -> str:
    """The MD5 of a file's bytes, as publishers of data sets give it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
