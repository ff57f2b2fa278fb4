"""What is killed while it backs up or restores: processes that are forked from one which has all imported."""

from __future__ import annotations

import resource
import signal
import time
from pathlib import Path
from typing import Any

from core.backup import Backup, prepare, status
from core.backup.layout import read_shelf
from core.store import Store
from tests import survive_cases
from tests.survive_cases import mount, serve, tiny

EPOCHS = 5


def live(home: Path, folder: Path, pictures: str, seed: str) -> dict[str, Any]:
    """What a dashboard's process does on a machine that may vanish at any moment: restore, go on with what was
    interrupted, begin another run, and back up all the while."""
    from core.running.resume import plan_resume, resume
    from core.running.trainer import train_run

    prepare(home, folder)
    store = Store(home)
    store.recover()
    (home / "is-up").touch()
    with Backup(home, folder, pause_s=0.02, look_s=0.005):
        for record in reversed(store.list_runs()):
            if record.state == "interrupted":
                resume(store, plan_resume(store, record.run_id), own=True)
                train_run(store, record.run_id)
        train_run(store, store.create_run(run_of(pictures, seed), own=True))
    return {"runs": len(store.list_runs())}


def run_of(pictures: str, seed: str) -> Any:
    return tiny(Path(pictures), epochs=EPOCHS, seed=int(seed), optimizer="adamw", lr=1e-3, log_every=2)


def bring_back(home: Path, folder: Path) -> dict[str, Any]:
    """Restore, and say how it came out."""
    (home.parent / f"{home.name}.begun").touch()
    restored = prepare(home, folder)
    return {"missing": restored.missing if restored else ["nothing"]}


def full(home: Path, folder: Path) -> dict[str, Any]:
    """The backup's disk is full: by a file system of its own, or else by a limit on the size of files."""
    folder.mkdir(exist_ok=True)
    is_own = mount(folder, "size=6m")
    if not is_own:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    told: list[str] = []
    with Backup(home, folder, tell=told.append, pause_s=0.05, look_s=0.01):
        _wait_for(lambda: bool(status(home).problem))  # type: ignore[union-attr]
        before = len(read_shelf(folder).whole)
        if is_own:
            mount(folder, "remount,size=60m")
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        _wait_for(lambda: not status(home).problem)  # type: ignore[union-attr]
    restored = prepare(home.parent / "fresh", folder)
    return {"told": told, "before": before, "is_own": is_own, "missing": restored.missing if restored else ["all"]}


def read_only(home: Path, folder: Path) -> dict[str, Any]:
    """The backup's disk becomes read-only, and then nobody answers for it any more."""
    if not mount(folder, "size=60m"):
        return {"is_own": False}
    told: list[str] = []
    store = Store(home)
    with Backup(home, folder, tell=told.append, pause_s=0.05, look_s=0.01):
        _wait_for(lambda: bool(status(home).at))  # type: ignore[union-attr]
        mount(folder, "remount,ro")
        store.set_note(store.newest_run_id(), "changed")
        _wait_for(lambda: bool(status(home).problem))  # type: ignore[union-attr]
        mount(folder, "remount,rw")
        _wait_for(lambda: not status(home).problem)  # type: ignore[union-attr]
    return {"is_own": True, "told": told, "number": read_shelf(folder).whole[0].number}


def _wait_for(is_so: Any) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


if __name__ == "__main__":
    survive_cases.CASES.update(live=live, bring_back=bring_back, full=full, read_only=read_only)  # type: ignore[arg-type]
    serve()
