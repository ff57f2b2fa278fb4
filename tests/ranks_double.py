"""Stands in for torchrun and for the processes it starts: without torch, they say and do what a test wants.

As `python -m tests.ranks_double FOLDER COUNT` it is the launcher; a process of it has RANK set. What to do is the
config's `data`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Client
from pathlib import Path

from core.events import EpochEnded, PhaseChanged, Phases, RunEnded, RunPrepared
from core.running.launch import DOOR, Hello, Word


def ended(state: str, reason: str = "") -> RunEnded:
    return RunEnded(state, 2.0, Phases(setup_s=1.0, compute_s=1.0), 0, 0.0, reason, error="RuntimeError")


class Process:
    def __init__(self, folder: Path, rank: int):
        self.folder, self.rank = folder, rank
        self.link = Client(str(folder / DOOR), family="AF_UNIX")
        self.link.send(Hello(rank, os.getpid()))
        getattr(self, self.link.recv().config.data)()

    def end(self, event: RunEnded) -> None:
        self.link.send(event)
        try:
            while self.link.recv() is not Word.BYE:
                pass
        except EOFError:
            sys.exit(1)
        sys.exit()

    def prepare(self) -> None:
        if self.rank:
            assert self.link.recv() is Word.NEXT
            return
        self.link.send(PhaseChanged("loading_data"))
        self.link.send(Word.DONE)
        self.link.send(RunPrepared("cpu", "2 x CPU", ["a"], 1, 1, 1, 1, 1, 8, setup_parts={"model_s": 0.5}))

    def finish(self) -> None:
        self.prepare()
        if not self.rank:
            self.link.send(EpochEnded(1, 1, 0.5, 50.0, 0.5, 50.0, None, 1.0, None, Phases(compute_s=1.0), 0, 0.1))
        self.end(ended("finished"))

    def stop(self) -> None:
        self.prepare()
        if not self.rank:
            assert self.link.recv() is Word.STOP
        self.end(ended("stopped"))

    def fail(self) -> None:
        """The second fails; the first heeds neither that nor a signal."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.prepare()
        if self.rank:
            self.end(ended("failed", "the second's own"))
        time.sleep(600)

    def die(self) -> None:
        """The second is killed; the first sees their connection close, as gloo does, fails of it and says so."""
        self.prepare()
        meeting = str(self.folder / "neighbours")
        if not self.rank:
            with socket.socket(socket.AF_UNIX) as door:
                door.bind(meeting)
                door.listen()
                door.accept()[0].recv(1)
            self.end(ended("failed", "Connection closed by peer"))
        with socket.socket(socket.AF_UNIX) as neighbour:
            while neighbour.connect_ex(meeting):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    def never_begin(self) -> None:
        time.sleep(600)


def launch(folder: str, count: int) -> None:
    line = [sys.executable, "-m", "tests.ranks_double", folder]
    children = [subprocess.Popen(line, env={**os.environ, "RANK": str(rank)}) for rank in range(count)]
    signal.signal(signal.SIGTERM, lambda *_: [child.terminate() for child in children])
    print("what the processes wrote last", flush=True)
    for child in children:
        child.wait()


if __name__ == "__main__":
    if "RANK" in os.environ:
        Process(Path(sys.argv[1]), int(os.environ["RANK"]))
    else:
        launch(sys.argv[1], int(sys.argv[2]))
