"""Kills runs at random moments and takes them up again, for as long as you like: python -m tests.soak --kills 50.

Each run begins in a home of its own and is killed (SIGKILL) one to three times, at moments that are drawn from its
whole life: between two steps, in a write of the database or of a checkpoint, in set-up, in validation. After each kill
all that the database held before must still be there; at the end the run must equal, bit by bit, one that was left
alone. Prints what it did; the status is 1 where anything was lost or unequal.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.survive_cases import Commands, Running, make_pictures, words_of

MOST_KILLS = 3
"""Of one run."""
OPTIONS = {
    "epochs": 3, "optimizer": "adamw", "lr": 1e-3, "augmentation": "resized_crop", "log_every": 2,
    "mixup": 0.2, "ema_decay": 0.9,
}  # fmt: skip
STATES = (0.0, 1e-9, 0.002)
"""Minutes between two states within an epoch; 0: none. They change no figure."""


@dataclass
class Report:
    """What the kills came to.

    Attributes:
        phases: how many kills came in which phase of the run.
        lost: what was there before a kill and not after it.
        unequal: what differs from a run that was left alone.
        seconds: from the start of the first run to the end of the last.
    """

    kills: int = 0
    runs: int = 0
    resumes: int = 0
    phases: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def lines(self) -> list[str]:
        where = ", ".join(f"{name} {count}" for name, count in self.phases.most_common())
        return [
            f"{self.kills} kills of {self.runs} runs, which were resumed {self.resumes} times: {where}",
            f"records lost: {len(self.lost)}",
            *self.lost,
            f"runs unequal to one that was left alone: {len(self.unequal)}",
            *self.unequal,
            f"{self.seconds:.0f} s",
        ]


def soak(folder: Path, kills: int, commands: Commands, *, seed: int = 0) -> Report:
    """Kill so many times, below `folder`."""
    draw, report, began = random.Random(seed), Report(), time.monotonic()
    pictures = make_pictures(folder / "pictures")
    words = words_of(pictures, **OPTIONS)
    whole, life_s = _whole(commands, folder / "whole", words)
    while report.kills < kills:
        home = folder / f"run-{report.runs}"
        states = f"--checkpoint-min={draw.choice(STATES)}"
        times = min(draw.randint(1, MOST_KILLS), kills - report.kills)
        told = _hunted(commands, home, [*words, states], times, life_s, draw, report)
        report.runs += 1
        report.unequal += [f"run {report.runs} (seed {seed}): {what}" for what in _differences(whole, told, home)]
        if not report.unequal and not report.lost:
            shutil.rmtree(home)
    report.seconds = time.monotonic() - began
    return report


def _whole(commands: Commands, home: Path, words: list[str]) -> tuple[dict[str, Any], float]:
    """A run that is left alone, and how many seconds it lives, from its first sign on."""
    with commands.start(["--home", str(home), "train", *words, "--json"], home.with_suffix(".json")) as running:
        _wait_for_run(home, running)
        began = time.monotonic()
        while not running.has_ended():
            time.sleep(0.01)
        life_s = time.monotonic() - began
    summary = json.loads(home.with_suffix(".json").read_text())
    return {"summary": summary, "weights": _weights(home, summary["run_id"])}, life_s


def _hunted(
    commands: Commands, home: Path, words: list[str], times: int, life_s: float, draw: random.Random, report: Report
) -> dict[str, Any]:
    """A run that is killed so many times, and then left alone; what the last command printed."""
    output = home.with_suffix(".json")
    command = ["train", *words]
    while True:
        with commands.start(["--home", str(home), *command, "--json"], output) as running:
            if times:
                _wait_for_run(home, running)
                at = time.monotonic() + draw.uniform(0, life_s)
                while time.monotonic() < at and not running.has_ended():
                    time.sleep(0.001)
                before = _events(home)
                running.kill()
        if not times:
            break
        times -= 1
        report.kills += 1
        command = _after_kill(home, before, report) or command
        report.resumes += command[0] == "resume"
        if command[0] == "run":
            times = 0
    return dict(json.loads(output.read_text()))


def _after_kill(home: Path, before: list[tuple[Any, ...]], report: Report) -> list[str]:
    """Look for what was lost; the command that goes on from here, none where it is the same again."""
    from core.store import Store

    after = _events(home)
    if after[: len(before)] != before:
        report.lost.append(f"{home}: {len(before)} events before a kill, and others after it")
    if [row[0] for row in after] != list(range(1, len(after) + 1)):
        report.lost.append(f"{home}: the events' ids have gaps")
    store = Store(home)
    with sqlite3.connect(home / "runs.sqlite") as database:
        if database.execute("PRAGMA integrity_check").fetchone() != ("ok",):
            report.lost.append(f"{home}: the database is damaged")
    [record] = store.list_runs() or [None]
    if record is None:
        report.phases["before it was queued"] += 1
        store.close()
        return []
    store.recover()
    record = store.get_run(record.run_id)
    is_over = record.state in ("finished", "stopped")
    report.phases["after its end" if is_over else str(record.phase.get("phase", "queued"))] += 1
    # a command that was killed before it queued the run again leaves it as it was
    if not is_over and record.state != "interrupted":
        report.lost.append(f"{home}: the killed run is {record.state}")
    store.close()
    return ["run" if is_over else "resume", record.run_id]


def _wait_for_run(home: Path, running: Running) -> None:
    while not running.has_ended():
        with suppress(sqlite3.Error):
            if _rows(home, "SELECT run_id FROM runs"):
                return
        time.sleep(0.002)


def _events(home: Path) -> list[tuple[Any, ...]]:
    try:
        return _rows(home, "SELECT id, kind, at, payload FROM events ORDER BY id")
    except sqlite3.Error:
        return []


def _rows(home: Path, query: str) -> list[tuple[Any, ...]]:
    # never makes a database where there is none yet
    database = sqlite3.connect(f"file:{home / 'runs.sqlite'}?mode=rw", uri=True, timeout=10)
    try:
        return database.execute(query).fetchall()
    finally:
        database.close()


def _weights(home: Path, run_id: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {which: load_file(home / "runs" / run_id / f"{which}.safetensors") for which in ("best", "last")}


FIGURES = ("epoch", "train_loss", "train_top1", "val_loss", "val_top1", "lr")


def _differences(whole: dict[str, Any], told: dict[str, Any], home: Path) -> list[str]:
    """In what a run differs from one that was left alone."""
    import torch

    found = [] if told["state"] == "finished" else [f"it is {told['state']}: {told.get('reason')}"]
    ours, theirs = (
        [[epoch[name] for name in FIGURES] for epoch in summary["epochs"]] for summary in (told, whole["summary"])
    )
    if ours != theirs:
        found.append(f"the epochs are {ours} and not {theirs}")
    for which, weights in _weights(home, told["run_id"]).items():
        expected = whole["weights"][which]
        differing = [name for name in expected if not torch.equal(weights[name], expected[name])]
        if differing:
            found.append(f"{len(differing)} tensors of the {which} weights differ")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--forked", action="store_true", help="fork for each command: ten times as fast")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, Commands(forked=options.forked) as commands:
        report = soak(Path(folder), options.kills, commands, seed=options.seed)
    print("\n".join(report.lines()))
    return 1 if report.lost or report.unequal else 0


if __name__ == "__main__":
    sys.exit(main())
