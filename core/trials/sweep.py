"""Which model families train on a device: one small model of each takes two steps there and on the CPU.

Models are tried in child processes, so that a crash, a hang or a lack of memory costs one line of the table.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import IO, Any

from core.devices import list_devices
from core.files import built
from core.models.catalogue import families
from core.training.preflight import ONLY_OFF_TPU
from core.trials.trial import Trial

LIMIT_S = 600.0
"""How long one family may take."""
TRIALS_A_CHILD = 8
"""After so many a child is replaced: compiled programs stay in memory."""
LOSS_TOLERANCE = 1e-4
"""A relative difference of losses above this is pointed out; float32 summed in another order gives about 1e-6."""


def sweep(
    device_kind: str,
    *,
    search: str = "",
    report: Path | None = None,
    resume: bool = False,
    limit_s: float = LIMIT_S,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Trial]:
    """Try every family whose name contains `search`.

    Args:
        device_kind: a kind that is available; it is opened in child processes alone.
        report: a Markdown file that gets the table after every trial, and a .json beside it what it was made from.
        resume: keep the trials that stand in that .json, if device and versions are the same, and try the rest.
        tell: called with a line for each family.

    Returns:
        A trial for each family, in the order of their names.
    """
    names = [name for name in families() if search.lower() in name]
    subject = _subject(device_kind)
    done = read_trials(report, subject) if resume and report else {}
    with Children(device_kind, limit_s) as children:
        for number, name in enumerate(names, start=1):
            if name in done:
                continue
            trial = done[name] = children.ask(name)
            tell(f"{number}/{len(names)} {' | '.join(_cells(trial))}")
            if report:
                _write(report, subject, done)
    if report:
        _write(report, subject, done)
    return [done[name] for name in names]


def read_trials(report: Path, subject: str) -> dict[str, Trial]:
    """The trials beside a report, by family; none where there is no such file, or it is about something else."""
    path = report.with_suffix(".json")
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {line["family"]: Trial(**line) for line in content["trials"]} if content.get("subject") == subject else {}


def _write(report: Path, subject: str, trials: dict[str, Trial]) -> None:
    ordered = [trials[name] for name in sorted(trials)]
    content = {"subject": subject, "trials": [asdict(trial) for trial in ordered]}
    for path, text in (
        (report.with_suffix(".json"), json.dumps(content, indent=1)),
        (
            report,
            "\n".join([f"{subject}; {date.today().isoformat()}.", "", *summary(ordered), "", *table(ordered)]) + "\n",
        ),
    ):
        with built(path) as temporary:
            temporary.write_text(text, encoding="utf-8")


def _subject(device_kind: str) -> str:
    """What is tried, in words: the device and the versions."""
    name = next(info.name for info in list_devices() if info.kind == device_kind)
    packages = (
        ("torch", "torch_xla", "timm", "torchvision") if device_kind == "xla" else ("torch", "timm", "torchvision")
    )
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
    return f"{name}; {versions}"


def summary(trials: list[Trial]) -> list[str]:
    """The sweep in a few lines: what trains, what falls back, what differs."""
    on_cpu = [trial for trial in trials if not trial.cpu_error]
    trained = [trial for trial in on_cpu if trial.trains]
    clean = [trial for trial in trained if not trial.fallbacks]
    mended = [trial for trial in clean if trial.mended]
    lines = [
        f"{len(trials)} families; {len(on_cpu)} train on the CPU, {len(trained)} of these on the device.",
        f"{len(clean)} do so without falling back to the host, {len(mended)} of them mended.",
    ]
    compared = [(trial.loss_difference, trial.family) for trial in trained if trial.loss_difference is not None]
    if compared:
        worst, family = max(compared)
        lines.append(f"The largest relative difference of the first loss is {worst:.1e} ({family}).")
    for title, found in (
        ("Fall back", [trial for trial in trained if trial.fallbacks]),
        ("Fail on the device", [trial for trial in on_cpu if not trial.trains]),
        (
            f"Differ by more than {LOSS_TOLERANCE:.0e}",
            [t for t in trained if (t.loss_difference or 0) > LOSS_TOLERANCE],
        ),
        ("Take more than one program", [trial for trial in trained if trial.compiles > 1 and not trial.fallbacks]),
        ("Draw random numbers, and don't compare", [trial for trial in trained if trial.draws]),
        ("Fell back unforeseen", [trial for trial in trained if not trial.fallbacks.keys() <= set(trial.foreseen)]),
        ("Don't train on the CPU either", [trial for trial in trials if trial.cpu_error]),
    ):
        if found:
            lines.append(f"{title}: {', '.join(trial.family for trial in found)}.")
    return lines


COLUMNS = (
    "family",
    "model",
    "px",
    "programs",
    "mended",
    "on the host",
    "loss",
    "gradient",
    "rounding",
    "seconds",
    "error",
)


def table(trials: list[Trial]) -> list[str]:
    """The trials as a Markdown table.

    Loss and gradient are the relative differences to the CPU's, rounding the CPU's own of the gradient, see
    `Trial.rounding`; a star marks what a TPU needs no mending for.
    """
    rows = [COLUMNS, tuple("---" for _ in COLUMNS), *(_cells(trial) for trial in trials)]
    return [f"| {' | '.join(row)} |" for row in rows]


def _cells(trial: Trial) -> tuple[str, ...]:
    mended, fallbacks = (
        ", ".join(f"{name}{'*' if name in ONLY_OFF_TPU else ''}" for name in sorted(names))
        for names in (trial.mended, trial.fallbacks)
    )
    error = f"on the CPU: {trial.cpu_error}" if trial.cpu_error else trial.device_error
    return (
        trial.family,
        trial.model.partition("/")[2],
        str(trial.image_size or ""),
        str(trial.compiles or ""),
        mended,
        fallbacks,
        "random" if trial.draws else _small(trial.loss_difference),
        "random" if trial.draws else _small(trial.norm_difference),
        _small(trial.rounding),
        f"{trial.seconds:.0f}",
        error.replace("|", "/"),
    )


def _small(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}"


class Children:
    """A child process at a time that tries families one after another, and is replaced when it dies."""

    def __init__(self, device_kind: str, limit_s: float, command: list[str] | None = None) -> None:
        self._command = command or [sys.executable, "-m", "core.trials.trial", device_kind]
        self._limit_s, self._environment = limit_s, _environment(device_kind)
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed on exit
        self._asked = 0

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._log.close()

    def ask(self, family: str) -> Trial:
        """Have a family tried; what killed the child, or that it took too long, becomes the trial's error."""
        if self._process is None or self._asked == TRIALS_A_CHILD:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        self._asked += 1
        trial = Trial(family)
        try:
            self._process.stdin.write(f"{family}\n")
            self._process.stdin.flush()
            while True:
                line = self._lines.get(timeout=self._limit_s)
                if not line:
                    raise BrokenPipeError
                answer: dict[str, Any] = json.loads(line)
                trial = Trial(**answer["trial"])
                if answer["done"]:
                    return trial
        except queue.Empty:
            self._end()
            problem = f"no answer within {self._limit_s:g} s"
        except BrokenPipeError:
            problem = f"the process died: {self._last_words()}"
            self._end()
        # the first answer comes when the CPU's part is over
        if trial.model:
            trial.device_error = problem
        else:
            trial.cpu_error = problem
        return trial

    def _start(self) -> None:
        self._end()
        self._asked, self._lines = 0, queue.SimpleQueue()
        self._log.truncate(0)
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=self._environment,
            cwd=Path(__file__).parents[2],
        )
        threading.Thread(target=_forward, args=(self._process.stdout, self._lines), daemon=True).start()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _last_words(self) -> str:
        assert self._process is not None
        status = self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return f"status {status}, {lines[-1][:200] if lines else 'no message'}"


def _forward(stream: IO[str], lines: queue.SimpleQueue[str]) -> None:
    """Lines of a child as they come, then "" for the end."""
    with stream:
        for line in stream:
            lines.put(line)
    lines.put("")


def _environment(device_kind: str) -> dict[str, str]:
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    is_cpu_runtime = device_kind == "xla" and not any(
        info.kind == "xla" and info.name.startswith("TPU") for info in list_devices()
    )
    if is_cpu_runtime:
        # halves the time of compiling, and only right or wrong counts here
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
        environment["XLA_FLAGS"] = flags.strip()
    return environment
