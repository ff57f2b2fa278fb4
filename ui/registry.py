"""What all sessions share: one store, one worker, the scans and the series that charts are drawn from.

It hangs on a synthetic entry of `sys.modules`, which outlives re-imports of this module and cleared caches.
"""

from __future__ import annotations

import gc
import importlib
import sys
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from core.series import RunSeries
from core.store import Store
from ui.scans import Scans

if TYPE_CHECKING:
    from core.worker import Worker

ENTRY = "_finetune_registry"
MAX_SERIES = 32


@dataclass
class Services:
    """The process's store, worker and scans."""

    store: Store
    worker: Worker
    _scans: Scans | None = None
    _series: OrderedDict[str, RunSeries] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def scans(self) -> Scans:
        """The scans of data sets below the store's home."""
        with self._lock:
            if self._scans is None:
                self._scans = Scans(self.store.home)
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
    """The process's services, made at the first call: dead runs are marked and the worker is started."""
    entry = _entry()
    with entry.lock:
        if entry.services is None:
            from core.worker import Worker

            store = Store()
            store.recover()
            entry.services = Services(store, Worker(store))
            entry.services.worker.start()
            threading.Thread(target=_load_libraries, name="library-loader", daemon=True).start()
        found: Services = entry.services
        return found


def close(timeout_s: float = 20.0) -> None:
    """Stop the active run, wait for the worker, and forget the services."""
    entry = _entry()
    with entry.lock:
        if entry.services is not None:
            entry.services.scans.close()
            entry.services.worker.shutdown(timeout_s)
            entry.services = None


@asynccontextmanager
async def lifespan(app: Any) -> AsyncIterator[dict[str, Any]]:
    """Open the services with the server and close them with it."""
    import anyio

    await anyio.to_thread.run_sync(services)
    yield {}
    await anyio.to_thread.run_sync(close)


def _entry() -> Any:
    made = ModuleType(ENTRY)
    made.lock, made.services = threading.RLock(), None  # type: ignore[attr-defined]
    return sys.modules.setdefault(ENTRY, made)


def _load_libraries() -> None:
    for name in ("torch", "torchvision", "timm", "plotly.graph_objects"):
        importlib.import_module(name)
    # the first listing takes seconds, which nobody should wait for on the Train page
    importlib.import_module("core.models.catalogue").list_models()
    # what the libraries made stays for good: out of the collector's sight, a collection takes 5 ms and not 200
    gc.collect()
    gc.freeze()
