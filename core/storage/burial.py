"""What is told of a run whose process died without a word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from core.events import Phases, RunEnded

LOG_NAME = "process.log"
"""In a run's folder: what its own process printed, where it had one."""
CRASHED = "crashed in native code"
"""How a process died that a library ended, which has nothing to do with what it was asked for."""
LOG_TAIL = 6000
"""Characters of it that are kept with a run that died."""


def last_words(
    epochs: Sequence[Mapping[str, Any]],
    *,
    seconds: float,
    how: str = "",
    ran_out: bool = False,
    is_aborted: bool = False,
    log: str = "",
) -> RunEnded:
    """The last event of a run whose process is dead.

    Args:
        epochs: payloads of `EpochEnded` since the process began.
        seconds: from there to its last sign of life.
        how: it died, as "was ended by SIGKILL"; "" where nobody who started it saw that.
        ran_out: the system killed a process meanwhile since memory ran out.
        is_aborted: the run was to end without saving, so it was killed.
        log: the last that the process printed.
    """
    told = Phases()
    for epoch in epochs:
        told += Phases(**epoch["phases"]) - Phases(**epoch.get("earlier", {}))
    phases = told + Phases(other_s=max(0.0, seconds - told.total_s()))
    count = sum(epoch["compile_count"] for epoch in epochs)
    if is_aborted:
        reason = "It was aborted and didn't end by itself; it was killed. What it saved before is kept."
        return RunEnded("stopped", phases.total_s(), phases, count, told.compile_s, reason=reason)
    reason = f"The run's own process {how}" if how else "The process that trained this run is gone"
    if ran_out:
        reason += ": memory ran out, and the system killed a process at that time"
    kept = "what the process wrote last is kept with the run" if log else "what the run had saved is kept"
    advice = f"{'Choose' if ran_out else 'If memory ran out, choose'} a smaller batch size"
    if how.startswith(CRASHED):
        advice = "Resume it; where it crashes again, run python -m core doctor"
    return RunEnded(
        "interrupted",
        phases.total_s(),
        phases,
        count,
        told.compile_s,
        reason=f"{reason}.",
        fix=f"{advice}; {kept}.",
        error="TrainingError",
        traceback=log,
    )


def log_head(pid: int) -> str:
    """The first line that a run's own process prints by itself, by which its output is known later."""
    return f"Process {pid}\n"


def log_of(folder: Path, pid: int | None) -> str:
    """The last that a run's own process printed; "" where it had none."""
    try:
        text = (folder / LOG_NAME).read_text(errors="replace")
    except OSError:
        return ""
    # a loader or an interpreter may have warned of something before that line
    return text[-LOG_TAIL:] if pid is not None and f"\n{log_head(pid)}" in f"\n{text}" else ""


def oom_kills(proc: Path = Path("/proc")) -> int | None:
    """How many processes the system has killed since memory ran out; None where it doesn't say."""
    try:
        lines = (proc / "vmstat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
