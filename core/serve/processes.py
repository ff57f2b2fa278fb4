"""Programs that run as long as the launcher does, and what they print."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

KEPT_LINES = 200
_PR_SET_PDEATHSIG = 1
"""From Linux's prctl(2)."""


class Program:
    """A process whose lines are read by a thread of ours.

    It has a process group of its own, so that Ctrl-C reaches the launcher alone, and gets SIGTERM where the launcher is
    killed (on Linux).

    Args:
        command: with its arguments.
        log: gets each line that it prints.
        hear: called with each line, in that thread.

    Attributes:
        heard: when it printed last, or was started, on the monotonic clock.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        hear: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.heard = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            list(command),
            env=dict(environment) if environment is not None else None,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
        self._reader = threading.Thread(target=self._read, args=(log, hear), name="program-reader", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def lines(self) -> list[str]:
        """The last that it printed."""
        return list(self._lines)

    def stop(self, patience_s: float, ask: int = signal.SIGTERM) -> None:
        """Ask it to end, kill it after that many seconds or at a Ctrl-C meanwhile, and wait until it is gone."""
        if self.status is None:
            self._signal(ask)
            try:
                self._process.wait(patience_s)
            except subprocess.TimeoutExpired:
                pass
            finally:
                if self.status is None:
                    self._signal(signal.SIGKILL)
                    self._process.wait()
        # what it left running holds the pipe open
        self._reader.join(2.0)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def _read(self, log: Path, hear: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines, log.open("a", encoding="utf-8", errors="replace") as out:
            for raw in lines:
                line = raw.decode(errors="replace").rstrip("\r\n")
                self._lines.append(line)
                self.heard = time.monotonic()
                with contextlib.suppress(OSError):  # a full disk is no reason to stop listening
                    out.write(f"{line}\n")
                    out.flush()
                hear(line)


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def _die_with_parent() -> None:
    # in the child, before its program begins
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
