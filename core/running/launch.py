"""A run in several processes of this machine, started by torchrun's launcher and followed from here.

The process that was asked for the run keeps it: it claims it, writes its events, hears its requests and ends it. The
processes that train reach it through a socket in a folder that is this user's alone, and so do both sides notice
the other's death. They find each other through a file there: nothing listens beyond this machine.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import Enum
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from core.config import RunConfig
from core.control import Control, Wish
from core.events import Event, Phases, Resumed, RunEnded, RunPrepared

DOOR, MEETING = "door", "meeting"
"""In the folder: the socket, and the file by which the processes find each other."""
POLL_S = 0.1
"""Seconds between two looks whether the run should stop."""
STOP_S = 30.0
"""How long a run that is not prepared yet may take to stop by itself."""
LEAVE_S = 15.0
"""How long the processes may take to end once the run is over."""
CAUSE_S = 1.0
"""How much later than a failure the death that it came of may be seen."""
TELL_S = 5.0
"""How long the launcher may take to write how its processes ended."""
LOG_TAIL = 6000
"""Characters of the processes' own output that are kept with a run whose process died."""
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Job:
    """What each process trains: `kind` is cpu or cuda, `folder` the run's, and `threads` of torch are shared; `script`
    are the changes that are made of themselves, `changes` those before the next step of a run that `is_continued`."""

    config: RunConfig
    kind: str
    home: Path
    folder: Path
    threads: int
    script: list[dict[str, Any]] = field(default_factory=list)
    is_continued: bool = False
    changes: list[Wish] = field(default_factory=list)


@dataclass(frozen=True)
class Hello:
    """The first that a process says."""

    rank: int
    pid: int


class Word(Enum):
    """What else goes over a link: to a process, but for DONE, which goes from the first to the launch."""

    STOP = "stop after this step"
    ABORT = "stop after this step, and save nothing"
    PAUSE = "stand still after this step"
    FREE = "stand still after this step, and leave the device"
    GO_ON = "go on"
    NEXT = "what must be done one by one: it is your turn"
    DONE = "what must be done one by one: the others' turn"
    BYE = "your last event has come, and you may end"


@dataclass
class _Link:
    connection: Connection
    rank: int = -1
    is_open: bool = True
    ended: RunEnded | None = None

    def send(self, message: object) -> None:
        # where it is gone, that shows when it is read
        with contextlib.suppress(OSError):
            self.connection.send(message)


def train_in_processes(
    job: Job,
    count: int,
    *,
    emit: Callable[[Event], None],
    should_stop: Callable[[], bool],
    started: float,
    control: Control | None = None,
    module: str = "core.running.ranks",
) -> RunEnded:
    """Have a run trained by `count` processes, and wait for them; none of them is left when this returns.

    Args:
        emit: is handed the events of the first process, in this thread.
        should_stop: asked again and again.
        started: when the run began, as `time.perf_counter` tells; from then on its time is counted.
        control: what else is asked of the run, passed on to the first process.
        module: what each process runs.
    """
    with Launch(job, count, emit, started, module) as launch:
        ended = launch.follow(should_stop, control)
    total_s = time.perf_counter() - started - launch.paused_s
    if ended is None:
        ended = launch.died()
    phases = ended.phases + Phases(setup_s=launch.start_s)
    phases += Phases(other_s=max(0.0, total_s - phases.total_s()))
    return replace(ended, total_s=phases.total_s(), phases=phases)


class Launch:
    """The processes of a run, from start to end.

    Attributes:
        start_s: how long they took until the first said hello.
        paused_s: how long the run stood still, which doesn't count.
    """

    def __init__(self, job: Job, count: int, emit: Callable[[Event], None], started: float, module: str) -> None:
        self._job, self._count, self._emit, self._started, self._module = job, count, emit, started, module
        self._resources = ExitStack()
        self._links: list[_Link] = []
        self._processes: list[psutil.Process] = []
        self._turns = 0
        self._is_prepared = self._is_done = False
        self._told = Word.GO_ON
        self._stop_asked: float | None = None
        self._output = ""
        self.start_s = self.paused_s = 0.0

    def __enter__(self) -> Launch:
        with self._resources:
            folder = Path(self._resources.enter_context(tempfile.TemporaryDirectory(prefix="ranks-")))
            self._door = self._resources.enter_context(socket.socket(socket.AF_UNIX))
            self._door.bind(str(folder / DOOR))
            self._door.listen(self._count)
            self._log = self._resources.enter_context((folder / "log").open("w+b"))
            self._launcher = subprocess.Popen(
                self._command(folder),
                env=_environment(self._job.threads),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                # an interrupt from the keyboard is for this process, which then asks those to stop
                start_new_session=True,
            )
            self._resources = self._resources.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._resources:
            if error is None and self._is_done and self._leave():
                # by itself it would take seconds to see that it has nothing left to do
                self._launcher.kill()
                self._launcher.wait()
            else:
                self._end_processes()
            for link in self._links:
                link.connection.close()
            self._log.seek(0)
            self._output = self._log.read().decode(errors="replace")

    def _command(self, folder: Path) -> list[str]:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={self._count}"]
        # not --standalone: its store listens on all of the machine's addresses
        meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint={folder / 'launcher'}", "--rdzv-conf=store_type=file"]
        return [*launcher, *meet, "--local-addr=127.0.0.1", f"--log-dir={folder}", "-m", self._module, str(folder)]

    def follow(self, should_stop: Callable[[], bool], control: Control | None = None) -> RunEnded | None:
        """Hand on events until the run is over.

        Returns:
            The last event of the first process, or of the one that failed; None where one died without a word.
        """
        while True:
            self._hear(POLL_S)
            if any(link.ended and link.ended.state == "failed" for link in self._links):
                self._look_for_a_cause()
            if self._lost():
                return None
            for link in self._links:
                if link.ended and (link.rank == 0 or link.ended.state == "failed"):
                    self._is_done = self._is_prepared and link.ended.state != "failed"
                    return link.ended
            if self._launcher.poll() is not None:
                return None
            if control is not None:
                self._pass_on(control)
            if should_stop() and self._stops_in_setup(is_aborted=control is not None and control.is_aborted()):
                return RunEnded("stopped", 0.0, Phases(setup_s=self._since_start() - self.start_s), 0, 0.0)

    def _pass_on(self, control: Control) -> None:
        """Tell the first process what is asked of the run."""
        first = next((link for link in self._links if link.rank == 0), None)
        if first is None or not self._is_prepared:
            return
        stands = Word.FREE if control.should_free() else Word.PAUSE
        wanted = stands if control.should_pause() else Word.GO_ON
        # a run that frees its device would take them along
        for wish in control.wishes() if wanted is Word.GO_ON else ():
            first.send(wish)
        if wanted is not self._told:
            self._told = wanted
            first.send(wanted)

    def died(self) -> RunEnded:
        """The last event of a run that ended without one."""
        who = ", ".join(f"process {link.rank + 1}" for link in self._lost()) or "the launcher"
        return RunEnded(
            "failed",
            0.0,
            Phases(),
            0,
            0.0,
            reason=f"Of {self._count} processes and their launcher, {who} died without a word.",
            fix="Memory may have run out; what the processes wrote last stands in place of a traceback.",
            error="TrainingError",
            traceback=self._output[-LOG_TAIL:],
        )

    def _look_for_a_cause(self) -> None:
        """Hear whether a process died: another that waited for it fails of that, and may be heard first.

        The one that failed is still there, since it waits for its BYE, so that nothing dies of its end meanwhile.
        """
        deadline = time.monotonic() + CAUSE_S
        while not self._lost() and time.monotonic() < deadline:
            self._hear(POLL_S)

    def _hear(self, timeout_s: float) -> None:
        open_links = {link.connection: link for link in self._links if link.is_open}
        for ready in wait([self._door, *open_links], timeout_s):
            if ready is self._door:
                self._links.append(_Link(Connection(self._door.accept()[0].detach())))
                continue
            link = open_links[ready]  # type: ignore[index]
            try:
                while link.connection.poll():
                    self._take(link, link.connection.recv())
            except (EOFError, OSError):
                link.is_open = False

    def _take(self, link: _Link, message: Any) -> None:
        if isinstance(message, Hello):
            link.rank = message.rank
            with contextlib.suppress(psutil.NoSuchProcess):
                self._processes.append(psutil.Process(message.pid))
            link.send(self._job)
            for _ in range(self._turns if link.rank else 0):
                link.send(Word.NEXT)
            if link.rank == 0:
                self.start_s = self._since_start()
        elif message is Word.DONE:
            self._turns += 1
            for other in self._links:
                if other.rank > 0:
                    other.send(Word.NEXT)
        elif isinstance(message, RunEnded):
            link.ended = message
            if message.state != "failed":
                link.send(Word.BYE)
        else:
            self._relay(message)

    def _relay(self, event: Event) -> None:
        if isinstance(event, Resumed):
            self.paused_s += event.seconds
        if isinstance(event, RunPrepared):
            self._is_prepared = True
            event = replace(event, setup_parts={"processes_s": self.start_s, **event.setup_parts})
        self._emit(event)

    def _stops_in_setup(self, *, is_aborted: bool) -> bool:
        """Pass on that the run should stop; True where it has not begun and can just be ended."""
        first = next((link for link in self._links if link.rank == 0), None)
        if self._stop_asked is None and first is not None:
            first.send(Word.ABORT if is_aborted else Word.STOP)
            self._stop_asked = time.monotonic()
        waited_s = time.monotonic() - self._stop_asked if self._stop_asked is not None else STOP_S
        return not self._is_prepared and waited_s >= STOP_S

    def _lost(self) -> list[_Link]:
        return [link for link in self._links if not link.is_open and link.ended is None]

    def _since_start(self) -> float:
        return time.perf_counter() - self._started

    def _leave(self) -> bool:
        """Wait until all processes that train have ended by themselves; False where they will not."""
        deadline = time.monotonic() + LEAVE_S
        while any(link.is_open for link in self._links) and time.monotonic() < deadline:
            self._hear(POLL_S)
        return not any(link.is_open for link in self._links)

    def _end_processes(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self._processes += psutil.Process(self._launcher.pid).children(recursive=True)
        # a process that trains ends when its link is closed; the launcher ends those that have none yet
        for link in self._links:
            link.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(TELL_S if self._links else 0.0)
        self._launcher.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(LEAVE_S)
        self._launcher.kill()
        for process in psutil.wait_procs(self._processes, POLL_S)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self._processes, LEAVE_S)
        self._launcher.wait()


def _environment(threads: int) -> dict[str, str]:
    ours = {
        # torchrun would set 1; each process takes its share of these
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        # no port for a store that the file replaces
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback, **os.environ, **ours}
