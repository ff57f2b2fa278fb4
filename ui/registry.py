"""What all sessions share: one store, one worker, the scans and the series that charts are drawn from.

It hangs on a synthetic entry of `sys.modules`, which outlives re-imports of this module and cleared caches.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any

from core.backup import Backup, default_backup, prepare, tell_on_stderr, warn_of_home
from core.browser.roots import Roots, roots_of
from core.browser.uploads import Uploads
from core.errors import AppError, StoreError, StoreWriteError
from core.series import RunSeries
from core.store import Store, default_home
from ui.checkups import Checkups
from ui.scans import Scans

if TYPE_CHECKING:
    from core.worker import Worker

ENTRY = "_finetune_registry"
MAX_SERIES = 32
STOP_S = 8.0
"""Seconds that runs have to stop and save when the server ends: others wait ten before they kill it."""
LAST_BACKUP_S = 1.5
"""Seconds that the last backup has at least, however long the runs took to stop."""
CLIENTS_S = 0.5
"""Seconds that connections have to close by themselves after that."""


@dataclass
class Services:
    """The process's store, worker, scans and uploads, and what backs them up where that is wanted."""

    store: Store
    worker: Worker
    backup: Backup | None = None
    _scans: Scans | None = None
    _series: OrderedDict[str, RunSeries] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.checkups = Checkups(self.store)
        # whatever a page queues comes from a browser, so no page need remember to look at its paths
        self.store.admit = self.roots.check_config
        # at once, so that what an upload of a process before left is gone
        self.uploads = Uploads(self.store.home)

    @cached_property
    def roots(self) -> Roots:
        """The folders that paths of browsers must lie in."""
        return roots_of(self.store.home)

    @property
    def scans(self) -> Scans:
        """The scans of data sets below the store's home."""
        with self._lock:
            if self._scans is None:
                self._scans = Scans(self.store.home, admit=self.roots.check_spec)
            return self._scans

    def run_series(self, run_id: str) -> RunSeries:
        """The run's series, brought up to date; the 32 last used are kept.

        Raises:
            StoreError: there is no such run.
        """
        with self._lock:
            series = self._series.pop(run_id, None) or RunSeries(self.store, run_id)
            self._series[run_id] = series
            while len(self._series) > MAX_SERIES:
                self._series.popitem(last=False)
        try:
            series.update()
        except Exception:
            with self._lock:
                self._series.pop(run_id, None)
            raise
        return series


def services() -> Services:
    """The process's services, made at the first call: dead runs are marked and the worker is started.

    Where the environment names a backup folder, a home that has no runs is restored from it first.

    Raises:
        BackupError: the home can't be restored, or the folder holds the backup of other runs.
        StoreError: the home folder can't be used, or the server is about to end.
    """
    entry = _entry()
    with entry.lock:
        if entry.services is None:
            if entry.is_ending:
                # a page that is drawn once more must not begin another run
                raise StoreError("The dashboard is about to end.", fix="Start it again.")
            from core.worker import Worker

            folder = default_backup()
            if folder:
                prepare(default_home(), folder)
                warn_of_home(default_home())
            store = Store()
            # while it can't be written it can be looked at, and the worker looks for dead runs again
            with suppress(StoreWriteError):
                store.recover()
            entry.services = Services(store, Worker(store))
            entry.services.worker.start()
            if folder:
                entry.services.backup = Backup(store.home, folder, tell=tell_on_stderr)
                entry.services.backup.start()
            threading.Thread(target=_load_libraries, name="library-loader", daemon=True).start()
        found: Services = entry.services
        return found


def close(timeout_s: float = STOP_S) -> None:
    """Stop the active runs, wait for the worker, and forget the services; runs in processes that are to stay go on."""
    entry = _entry()
    with entry.lock:
        if entry.services is not None:
            entry.services.scans.close()
            entry.services.uploads.close()
            began = time.monotonic()
            entry.services.worker.shutdown(timeout_s)
            if entry.services.backup:
                left_s = timeout_s - (time.monotonic() - began)
                entry.services.backup.stop(max(LAST_BACKUP_S, left_s))
            entry.services = None


@asynccontextmanager
async def lifespan(app: Any) -> AsyncIterator[dict[str, Any]]:
    """Open the services with the server and close them with it.

    Where they can't be opened the server ends at once, with one line and status 2.
    """
    import anyio

    _entry().is_ending = False
    try:
        await anyio.to_thread.run_sync(services)
    except AppError as error:
        if threading.current_thread() is not threading.main_thread():
            raise
        print(error, file=sys.stderr, flush=True)
        # any other way out would print tracebacks of the server's
        os._exit(2)
    with _close_at_signals():
        yield {}
    await anyio.to_thread.run_sync(_end)


def _end() -> None:
    _entry().is_ending = True
    close()


@contextmanager
def _close_at_signals() -> Iterator[None]:
    """Where a signal ends the server, runs stop at once, and not only when the last connection is closed.

    A client that has gone away without a word, in mid-upload say, keeps the server from ending by itself; it ends all
    the same when the runs have been saved.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    are_gone = threading.Event()

    def pass_on(number: int, frame: Any) -> None:
        handler = before[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)

    def end() -> None:
        _end()
        if not are_gone.wait(CLIENTS_S):
            # to the server a second interrupt means that it must not wait for its clients
            pass_on(signal.SIGINT, None)

    def heed(number: int, frame: Any) -> None:
        if not _entry().is_ending:
            threading.Thread(target=end, name="end", daemon=True).start()
        pass_on(number, frame)

    for number in before:
        signal.signal(number, heed)
    try:
        yield
    finally:
        are_gone.set()
        for number, handler in before.items():
            signal.signal(number, handler)


def _entry() -> Any:
    made = ModuleType(ENTRY)
    made.lock, made.services, made.is_ending = threading.RLock(), None, False  # type: ignore[attr-defined]
    return sys.modules.setdefault(ENTRY, made)


def _load_libraries() -> None:
    for name in ("torch", "torchvision", "timm", "plotly.graph_objects"):
        importlib.import_module(name)
    # the first listing takes seconds, which nobody should wait for on the Train page
    importlib.import_module("core.models.catalogue").list_models()
    # what the libraries made stays for good: out of the collector's sight, a collection takes 5 ms and not 200
    gc.collect()
    gc.freeze()
