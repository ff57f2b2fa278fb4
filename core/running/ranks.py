"""One of the processes that train a run together; torchrun starts it as `python -m core.running.ranks FOLDER`."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from core.control import Wish
from core.devices.ranks import open_rank
from core.events import Event, RunEnded
from core.running.launch import DOOR, MEETING, Hello, Job, Word
from core.running.pulse import PAUSE_LOOK_S
from core.running.trainer import train_here
from core.training.state import read_state


class Link:
    """The way to the process that launched this one; where that one dies, this one ends at once.

    Args:
        folder: of the launch.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank = rank
        self._connection = Client(str(folder / DOOR), family="AF_UNIX")
        self._lock = threading.Lock()
        self._turns, self._stop, self._bye = threading.Semaphore(0), threading.Event(), threading.Event()
        self._pause, self._wishes = threading.Event(), queue.SimpleQueue[Wish]()
        self._abort, self._free = threading.Event(), threading.Event()
        self.send(Hello(rank, os.getpid()))
        self.job: Job = self._connection.recv()
        threading.Thread(target=self._listen, name="link", daemon=True).start()

    def send(self, message: Event | Hello | Word) -> None:
        # loader threads tell of lost images
        with self._lock:
            self._connection.send(message)

    def should_stop(self) -> bool:
        """Whether this very process was asked to; only the first ever is."""
        return self._stop.is_set()

    def is_aborted(self) -> bool:
        return self._abort.is_set()

    def should_pause(self) -> bool:
        return self._pause.is_set()

    def should_free(self) -> bool:
        return self._free.is_set()

    def wishes(self) -> list[Wish]:
        return [self._wishes.get() for _ in range(self._wishes.qsize())]

    @contextmanager
    def one_by_one(self) -> Iterator[None]:
        """The first process does this while the others wait, and then those do it."""
        if self._rank:
            self._turns.acquire()
        yield
        if not self._rank:
            self.send(Word.DONE)

    def end(self, ended: RunEnded) -> None:
        """Say how it ended, and wait for leave; one that failed gets none, but is ended with all others."""
        self.send(ended)
        self._bye.wait()

    def _listen(self) -> None:
        try:
            while True:
                word = self._connection.recv()
                if word is Word.NEXT:
                    self._turns.release()
                elif word is Word.STOP:
                    self._stop.set()
                elif word is Word.ABORT:
                    self._abort.set()
                    self._stop.set()
                elif word in (Word.PAUSE, Word.FREE):
                    self._free.set() if word is Word.FREE else self._free.clear()
                    self._pause.set()
                elif word is Word.GO_ON:
                    self._pause.clear()
                elif isinstance(word, Wish):
                    self._wishes.put(word)
                elif word is Word.BYE:
                    self._bye.set()
        except (EOFError, OSError):
            # the main thread may be waiting for a neighbour, inside torch
            os._exit(1)


class CommonControl:
    """What was asked of the first process, told to all; each must ask as often as the others."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._wishes: list[Wish] = []
        self._pauses = self._frees = self._aborts = False

    def should_stop(self) -> bool:
        wishes, link = self._link.wishes(), self._link
        asked = torch.tensor(
            [link.should_stop(), link.is_aborted(), link.should_pause(), link.should_free(), len(wishes)]
        )
        dist.broadcast(asked, 0)
        stops, self._aborts, self._pauses, self._frees = map(bool, asked[:4])
        num_wishes = int(asked[4])
        if num_wishes:
            # rare, and dearer than a few numbers
            told: list[Any] = [wishes]
            dist.broadcast_object_list(told, 0)
            self._wishes += told[0]
        return stops

    def wishes(self) -> list[Wish]:
        """Those that were heard of when it was last asked whether to stop."""
        wishes, self._wishes = self._wishes, []
        return wishes

    def is_aborted(self) -> bool:
        return self._aborts

    def should_pause(self) -> bool:
        return self._pauses

    def should_free(self) -> bool:
        return self._frees

    def wait_while_paused(self) -> None:
        while self._pauses and not self._frees and not self.should_stop():
            time.sleep(PAUSE_LOOK_S)


def main(folder: Path) -> None:
    started = time.perf_counter()
    rank = int(os.environ["RANK"])
    link = Link(folder, rank)
    job = link.job
    ended = train_here(
        job.config,
        open_it=lambda: open_rank(job.kind, folder / MEETING),
        home=job.home,
        folder=None if rank else job.folder,
        emit=(lambda event: None) if rank else link.send,
        should_stop=link.should_stop,
        control=CommonControl(link),
        one_by_one=link.one_by_one,
        started=started,
        script=job.script,
        kept=read_state(job.folder) if job.is_continued else None,
        changes=job.changes,
    )
    link.end(ended)
    if dist.is_initialized():
        dist.destroy_process_group()
    # torch's tidying up at the interpreter's end takes a second
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
