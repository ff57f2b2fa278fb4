"""What the runtime at hand is and lacks, told before anything is installed: python -m core.runtime [--install]

Needs the standard library and pip alone, so that a notebook's first cell can use it. Nothing is started: a TPU or a GPU
is told from files and the environment.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import AppError
from core.machine import tpu
from core.machine.packages import (
    COMMON,
    MATCHED,
    PIP,
    ROOT,
    Requires,
    fits,
    index,
    installed,
    mismatches,
    pins,
    requires,
)

if TYPE_CHECKING:
    pass

LEAST_PYTHON = (3, 11)

_PLACES = {"colab": "Google Colab", "kaggle": "Kaggle", "plain": "this machine"}
_KINDS = {"tpu": "a TPU", "gpu": "an NVIDIA GPU", "cpu": "no accelerator"}


@dataclass(frozen=True)
class Runtime:
    """Where the code runs.

    Attributes:
        kind: tpu, gpu or cpu: the accelerator that shows, whether or not torch can use it.
        place: colab, kaggle or plain.
        problem: why the accelerator can't be used now, with the fix; "" where nothing speaks against it.
    """

    kind: str
    place: str
    problem: str = ""

    @property
    def words(self) -> str:
        """Such as "Google Colab with a TPU"."""
        return f"{_PLACES[self.place]} with {_KINDS[self.kind]}"


@dataclass(frozen=True)
class Plan:
    """What a runtime needs: pip's commands in order (none: nothing), and in words what stays and what comes."""

    commands: tuple[tuple[str, ...], ...]
    words: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """What `python -m core.runtime` prints."""
        return [*self.words, *(shlex.join(command) for command in self.commands)]


# -- what it is -----------------------------------------------------------------------------------------------------


def find_runtime(
    environ: Mapping[str, str] = os.environ,
    proc: Path = Path("/proc"),
    *,
    find_tpu: Callable[[], Any] | None = None,
    which: Callable[[str], str | None] = shutil.which,
    has_module: Callable[[str], bool] | None = None,
) -> Runtime:
    """Look for signs of the accelerator and the host, starting nothing.

    Args:
        environ: the environment to believe.
        proc: has `driver/nvidia/gpus` where NVIDIA's driver is loaded.
        find_tpu: as `core.machine.tpu.find_tpu`.
        which: as `shutil.which`.
        has_module: whether a module can be imported.
    """
    found = (find_tpu or tpu.find_tpu)()
    gpus = proc / "driver" / "nvidia" / "gpus"
    if found is not None:
        kind = "tpu"
    elif which("nvidia-smi") or (gpus.is_dir() and any(gpus.iterdir())):
        kind = "gpu"
    else:
        kind = "cpu"
    if "COLAB_RELEASE_TAG" in environ or (has_module or _has_module)("google.colab"):
        place = "colab"
    else:
        place = "kaggle" if "KAGGLE_KERNEL_RUN_TYPE" in environ else "plain"
    return Runtime(kind, place, found.problem if found is not None else "")


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


# -- what it needs --------------------------------------------------------------------------------------------------


def plan(
    kind: str,
    versions: Mapping[str, str] | None = None,
    requires: Requires = requires,
    *,
    root: Path = ROOT,
) -> Plan:
    """The pip commands after which everything fits; none where it does already.

    The torch that a runtime brings was built for its drivers, so it stays: nothing is installed that would change it,
    and torchvision is made to fit it. On a TPU a torch_xla that fits the installed torch stays too; otherwise the
    matched set of requirements.txt is taken.

    Args:
        kind: of the runtime: tpu, gpu or cpu.
        versions: of installed packages by normal name; None looks.
        requires: what a package's own wheel asks for.
        root: has the requirements files.
    """
    versions = dict(installed() if versions is None else versions)
    wrong = mismatches(versions, requires, kind=kind, root=root)
    torch, xla = versions.get("torch"), versions.get("torch-xla")
    is_matched = torch is not None and xla is not None and fits(torch, xla)
    if torch is None or (kind == "tpu" and not is_matched):
        return _matched_set(kind, versions)
    words = [f"torch {torch} stays{f', with torch_xla {xla}' if kind == 'tpu' else ''}."]
    if not wrong:
        return Plan((), (*words, "Everything that is needed is here and fits."))
    commands: list[tuple[str, ...]] = []
    if not is_matched and xla is not None:
        commands.append((*PIP[:3], "uninstall", "-y", "torch_xla"))
        words.append(f"torch_xla {xla} doesn't fit it, is not needed here, and goes.")
    if any(item.package == "torchvision" for item in wrong):
        commands.append((*PIP, "torchvision", *pins(versions, "torch"), *index(versions)))
        words.append("A torchvision that fits it comes.")
        versions.pop("torchvision", None)
    if {item.package for item in wrong} - {"torchvision", "torch_xla"}:
        commands.append((*PIP, "-r", COMMON, *pins(versions)))
        words.append(f"What is missing or too old of {COMMON} comes.")
    return Plan(tuple(commands), tuple(words))


def _matched_set(kind: str, versions: Mapping[str, str]) -> Plan:
    commands: list[tuple[str, ...]] = []
    torch = versions.get("torch")
    words = [f"torch {torch} has no torch_xla that fits it here." if torch else "torch is not installed."]
    if kind == "tpu" and "torch-tpu" in versions:
        # the two can't be in one environment
        commands.append((*PIP[:3], "uninstall", "-y", "torch_tpu"))
        words.append("torch_tpu, which torch_xla can't stand beside, goes.")
    words.append(f"The matched set of {MATCHED} comes.")
    commands.append((*PIP, "-r", MATCHED, *(["torch_xla[tpu]"] if kind == "tpu" else [])))
    return Plan(tuple(commands), tuple(words))


def carry_out(plan: Plan, *, root: Path = ROOT, run: Callable[..., Any] = subprocess.run) -> None:
    """Run the plan's commands in the folder of the requirements files.

    Raises:
        AppError: pip failed; the problem names its own last error.
    """
    for command in plan.commands:
        done = run(
            [sys.executable, *command[1:], "--quiet"],
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if done.returncode:
            raise AppError(
                f"pip failed: {_last_error(done.stdout)}", fix=f"Run {shlex.join(command)} to see all of it."
            )


def _last_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    line = (errors or lines or ["it said nothing"])[-1]
    return line if len(line) <= 300 else line[:297] + "..."


def main(argv: Sequence[str] | None = None) -> int:
    """Print what this runtime is and needs, or install it; 1 where it still doesn't fit afterwards."""
    parser = argparse.ArgumentParser(prog="python -m core.runtime", description="What this runtime needs.")
    parser.add_argument("--install", action="store_true", help="install it; else the commands are printed")
    arguments = parser.parse_args(argv)
    if sys.version_info < LEAST_PYTHON:
        print(f"Python {platform.python_version()} is too old. Take Python 3.11 or newer.", file=sys.stderr)
        return 1
    runtime = find_runtime()
    needs = plan(runtime.kind)
    print(f"This is {runtime.words}, Python {platform.python_version()}.", *needs.lines, sep="\n", flush=True)
    if runtime.problem:
        print(runtime.problem, file=sys.stderr)
    if not arguments.install:
        return 0
    try:
        carry_out(needs)
    except AppError as error:
        print(error, file=sys.stderr)
        return 1
    left = mismatches(kind=runtime.kind)
    for item in left:
        print(f"{item.found} Mend it with: {item.command}", file=sys.stderr)
    if needs.commands and not left:
        print("Everything that is needed is here and fits.")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
