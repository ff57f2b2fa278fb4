"""What is made to go wrong for real, in processes of their own that are forked from one which has all imported."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

from core.config import RunConfig, make_config
from core.store import Store

ROOT = Path(__file__).parents[1]
DISK_MIB = 64
"""Of a disk that is to become full."""
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
"""Of malloc.h."""
OWN_MOUNTS = "SURVIVE_OWN_MOUNTS"
"""Environment variable: this process may mount disks, and nobody else sees them."""
TINY = {
    "threads": 1, "model": "timm/test_resnet", "weights": "none", "image_size": 32, "epochs": 2, "device": "cpu",
    "batch_size": 4, "log_every": 1,
}  # fmt: skip


def tiny(pictures: Path, **changes: Any) -> RunConfig:
    """A run of many short steps."""
    return make_config(**{**TINY, "data": str(pictures), **changes})


@functools.cache
def can_mount() -> bool:
    """Whether this system lets us mount a disk of our own."""
    tried = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", "mount -t tmpfs -o size=1m x /mnt"], capture_output=True, check=False
    )
    return tried.returncode == 0


def mount(home: Path, options: str = f"size={DISK_MIB}m") -> bool:
    """Mount a small disk at `home`, or mount it again with other options; False where this process can't."""
    home.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "x", str(home)]
    return OWN_MOUNTS in os.environ and subprocess.run(command, check=False).returncode == 0


class Commands:
    """Starts `python -m core ...` again and again, in processes of their own.

    Args:
        forked: a process that has everything imported forks for each command, which takes a tenth of the time; such
            commands may also be cases, see `CASES`, and mount disks that nobody else sees.
        module: that calls `serve`; another one may bring cases of its own.
    """

    def __init__(self, *, forked: bool, module: str = "tests.survive_cases") -> None:
        self._server: subprocess.Popen[str] | None = None
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if forked:
            command = [sys.executable, "-m", module]
            if can_mount():
                command = ["unshare", "-Urm", *command]
                self._environment[OWN_MOUNTS] = "1"
            self._server = subprocess.Popen(
                command, cwd=ROOT, env=self._environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )

    def __enter__(self) -> Commands:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server:
            assert self._server.stdin and self._server.stdout
            self._server.stdin.close()
            self._server.wait(60)
            self._server.stdout.close()

    @contextmanager
    def start(self, words: Sequence[str], output: Path) -> Iterator[Running]:
        """A command, waited for at the end of the block; it prints into `output`, and its errors beside it."""
        if self._server is None:
            with output.open("wb") as out, output.with_suffix(".err").open("wb") as err:
                command = [sys.executable, "-m", "core", *words]
                process = subprocess.Popen(command, cwd=ROOT, env=self._environment, stdout=out, stderr=err)
            yield Running(process.pid, process)
            process.wait()
            return
        assert self._server.stdin and self._server.stdout
        print(json.dumps([str(output), *words]), file=self._server.stdin, flush=True)
        running = Running(int(self._server.stdout.readline()))
        yield running
        # whoever has forked it must have seen it end before the next one
        running.status = int(self._server.stdout.readline())

    def run(self, words: Sequence[str], output: Path) -> Done:
        """A command from start to end."""
        with self.start(words, output) as running:
            pass
        told = output.read_text()
        return Done(
            running.status, json.loads(told) if told.startswith("{") else {}, output.with_suffix(".err").read_text()
        )


@dataclass
class Done:
    """What a command came to: its exit status, below 0 for a signal; the JSON object it printed; its errors."""

    status: int
    told: dict[str, Any]
    errors: str


@dataclass
class Running:
    """A command that has been started."""

    pid: int
    process: subprocess.Popen[bytes] | None = None
    status: int = 0

    def has_ended(self) -> bool:
        if self.process:
            return self.process.poll() is not None
        with suppress(psutil.NoSuchProcess):
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE)
        return True

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def serve() -> None:
    """Fork for each line of standard input: a command's output file and its words; tell process id and status."""
    import timm  # noqa: F401
    import torchvision  # noqa: F401

    import core.worker  # noqa: F401

    for line in sys.stdin:
        output, *words = json.loads(line)
        pid = os.fork()
        if not pid:
            _be(Path(output), words)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _be(output: Path, words: list[str]) -> NoReturn:
    """Become a command, in a process that was just forked."""
    for number, path in ((1, output), (2, output.with_suffix(".err"))):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    status = 1
    try:
        if words[0] == "case":
            print(json.dumps(CASES[words[1]](*map(Path, words[2:4]), *words[4:])))
            status = 0
        else:
            from core.__main__ import main

            status = main(words)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


class FullDisk:
    """Makes the store's disk full, and gives room again.

    Where no disk of our own could be mounted, SQLite itself is told that the file may not grow: it answers in the same
    way.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._ballast = store, store.home / "ballast"
        self._is_own = os.path.ismount(store.home)

    def fill(self) -> None:
        if not self._is_own:
            self._tell("PRAGMA max_page_count = 1")
            return
        # SQLite writes again where it has written before, until that is used up
        self._tell("PRAGMA wal_checkpoint(TRUNCATE)")
        file = os.open(self._ballast, os.O_CREAT | os.O_WRONLY)
        with suppress(OSError):
            while True:
                os.write(file, bytes(4096))
        os.close(file)

    def free(self) -> None:
        if not self._is_own:
            self._tell("PRAGMA max_page_count = 1073741823")
            return
        self._ballast.unlink()

    def _tell(self, pragma: str) -> None:
        with self._store.database.lock:
            self._store.database.writer.execute(pragma)


class Told:
    """Follows a run's events as they are told.

    Args:
        at: what is called once so many steps were logged.
        at_end: called with the run's last event.
    """

    def __init__(
        self, at: Mapping[int, Callable[[], object]] | None = None, at_end: Callable[[], object] = lambda: None
    ) -> None:
        self.steps: list[list[float]] = []
        self.times: list[float] = []
        self.kinds: list[str] = []
        self._at, self._at_end = at or {}, at_end

    def __call__(self, event: Any) -> None:
        kind = type(event).__name__
        self.kinds += [kind] * (kind != "ProgressMade")
        if kind == "StepLogged":
            self.steps.append([event.step, event.loss])
            self.times.append(time.monotonic())
            self._at.get(len(self.steps), lambda: None)()
        if kind == "RunEnded":
            self._at_end()


def compared(store: Store, run_id: str, told: Told) -> dict[str, Any]:
    """What was told beside what the store holds."""
    events = store.events(run_id)
    stored = [[event.payload["step"], event.payload["loss"]] for event in events if event.kind == "StepLogged"]
    return {
        "state": store.get_run(run_id).state,
        "steps": len(told.steps),
        "same_steps": stored == told.steps,
        "same_kinds": sorted(event.kind for event in events) == sorted(told.kinds),
        "dense": [event.id for event in events] == list(range(1, len(events) + 1)),
        "last": events[-1].kind,
        "kinds": sorted({event.kind for event in events}),
        "locked": store.is_held("cpu"),
    }


def full(home: Path, pictures: Path) -> dict[str, Any]:
    """The disk is full twice: from logged step 20 to 60, and from 80 until a second after the run's end."""
    from core.running.trainer import train_run

    mount(home)
    store = Store(home)
    disk, troubles = FullDisk(store), list[str]()

    def fill_again() -> None:
        while not (len(told.steps) >= 60 and store.database._trouble):
            time.sleep(0.01)
        troubles.append(store.trouble)
        disk.free()
        while not (len(told.steps) >= 80 and not store.trouble):
            time.sleep(0.01)
        disk.fill()
        while not (store.database._trouble and len(told.steps) >= 100):
            time.sleep(0.01)
        is_over.set()

    def free_later() -> None:
        threading.Timer(1.0, disk.free).start()

    is_over = threading.Event()
    told = Told({20: lambda: (disk.fill(), threading.Thread(target=fill_again).start())}, at_end=free_later)
    run_id = store.create_run(tiny(pictures, epochs=500))
    train_run(store, run_id, on_event=told, should_stop=is_over.is_set)
    shutil.rmtree(store.run_folder(run_id))
    return {**compared(store, run_id, told), "troubles": troubles, "own_disk": disk._is_own}


def given_up(home: Path, pictures: Path, seconds: str) -> dict[str, Any]:
    """The command line trains on a disk that becomes full and stays so; the run's end is tried for so long."""
    import core.insist
    import core.store
    from core.__main__ import main

    class Watched(Store):
        def __init__(self, home: Path | None = None) -> None:
            super().__init__(home)
            threading.Thread(target=_fill_when_it_trains, args=(self,), daemon=True).start()

    mount(home)
    core.insist.LAST_WRITE_S = float(seconds)
    core.store.Store = Watched  # type: ignore[misc]
    return {"status": main(["--home", str(home), "train", *words_of(pictures, epochs=5)])}


def words_of(pictures: Path, **changes: Any) -> list[str]:
    """A tiny run's options on the command line."""
    return [
        "--data",
        str(pictures),
        *(f"--{name.replace('_', '-')}={value}" for name, value in {**TINY, **changes}.items()),
    ]


def _fill_when_it_trains(store: Store) -> None:
    while not (runs := store.list_runs()) or not store.events(runs[0].run_id, kinds=("StepLogged",)):
        time.sleep(0.01)
    FullDisk(store).fill()


def no_memory(home: Path, pictures: Path, mib: str) -> dict[str, Any]:
    """A run whose batch needs more memory than this process may have, and then the run that is proposed instead."""
    from core.analysis.summary import summarise
    from core.running.trainer import train_run

    libc = ctypes.CDLL(None)
    # no thread sets aside 64 MiB of addresses, and what is freed leaves the process
    assert libc.mallopt(M_ARENA_MAX, 1) and libc.mallopt(M_MMAP_THRESHOLD, 1 << 17)
    store = Store(home)
    options = {"image_size": 384, "epochs": 1}
    # what libraries take once is not the batch's
    train_run(store, store.create_run(tiny(pictures, **{**options, "batch_size": 1})))
    before = _address_space()
    resource.setrlimit(resource.RLIMIT_AS, (before + int(mib) * 2**20, resource.RLIM_INFINITY))
    runs = []
    batch_size = 16
    for _ in range(2):
        run_id = store.create_run(tiny(pictures, **{**options, "batch_size": batch_size}))
        train_run(store, run_id)
        summary = summarise(store, run_id)
        runs.append({name: summary[name] for name in ("state", "reason", "fix", "error")})
        if summary["fix"]:
            batch_size = int(summary["fix"].split()[0])
    return {"runs": runs, "batch_size": batch_size, "kept_mib": (_address_space() - before) / 2**20}


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def make_pictures(folder: Path, train: int = 64, val: int = 12, side: int = 40) -> Path:
    """Two classes told apart by brightness."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for split, count in {"train": train, "val": val}.items():
        for index in range(count):
            to = folder / split / ("dark", "light")[index % 2]
            to.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 100, (side, side, 3)) + 150 * (index % 2)
            Image.fromarray(pixels.astype("uint8")).save(to / f"{index}.png")
    return folder


@contextmanager
def locked(home: Path) -> Iterator[subprocess.Popen]:
    """Another process has the store's database locked for writing until the block ends."""
    script = (
        "import sqlite3, sys; db = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "db.execute('BEGIN IMMEDIATE'); print('locked', flush=True); sys.stdin.read(); db.execute('ROLLBACK')"
    )
    command = [sys.executable, "-c", script, str(home / "runs.sqlite")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"locked\n"
        try:
            yield process
        finally:
            assert process.stdin
            process.stdin.close()
            process.wait(10)


def read_only(home: Path, pictures: Path) -> dict[str, Any]:
    """The command line is to train in a home that can't be written."""
    from core.__main__ import main

    if not (mount(home) and mount(home, "remount,ro")):
        # nobody can make a folder there, whoever he is
        home = Path("/proc/home")
    return {"status": main(["--home", str(home), "train", *words_of(pictures)])}


CASES: dict[str, Callable[..., dict[str, Any]]] = {
    "full": full,
    "given_up": given_up,
    "no_memory": no_memory,
    "read_only": read_only,
}
"""By name: what is done with a home, pictures, and words."""

if __name__ == "__main__":
    serve()
