"""Which packages are installed, what is missing of what is needed, and which versions don't fit each other.

What is needed stands in the requirements files and in the installed wheels' own metadata; there is no second list here.
Needs the standard library alone (and pip, which brings `packaging` where that is missing).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
COMMON, MATCHED = "requirements-common.txt", "requirements.txt"
PIP = ("python", "-m", "pip", "install")
WHEELS = "https://download.pytorch.org/whl/"
"""Where the builds of torch lie that are not on PyPI, a folder for each local version such as cu126."""

Requires = Callable[[str], Sequence[str]]
"""What a package asks for, as its wheel says it: a list such as ["torch (==2.9.1)", "numpy"]."""


@dataclass(frozen=True)
class Mismatch:
    """A package that is missing, or two whose versions don't fit each other; `command` mends it."""

    package: str
    found: str
    command: str


def installed() -> dict[str, str]:
    """The versions of all that is installed, by normal name."""
    importlib.invalidate_caches()
    versions: dict[str, str] = {}
    for package in importlib.metadata.distributions():
        # of two copies the first on the path is the one that is imported
        if name := package.metadata["Name"]:
            versions.setdefault(_normal(name), package.version)
    return versions


def requires(name: str) -> Sequence[str]:
    """What an installed package asks for; nothing where it isn't installed."""
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def needed(file: Path) -> list[Requirement]:
    """What a requirements file asks for on this system, with the files that it names."""
    wanted: list[Requirement] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        text = line.partition(" #")[0].strip()
        if text.startswith("-r "):
            wanted += needed(file.parent / text.removeprefix("-r ").strip())
        elif text and not text.startswith("#"):
            requirement = _packaging("requirements").Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate():
                wanted.append(requirement)
    return wanted


def mismatches(
    versions: Mapping[str, str] | None = None,
    requires: Requires = requires,
    *,
    kind: str = "cpu",
    root: Path = ROOT,
) -> list[Mismatch]:
    """What is missing or doesn't fit, each with the pip command that mends it.

    Args:
        versions: of installed packages by normal name; None looks.
        requires: what a package's own wheel asks for.
        kind: of the runtime; a TPU needs torch_xla, elsewhere torch stays.
        root: has the requirements files.
    """
    versions = installed() if versions is None else versions
    whole = _command("-r", MATCHED, *(["torch_xla[tpu]"] if kind == "tpu" else []))
    found = []
    if "torch" not in versions:
        found.append(Mismatch("torch", "torch is not installed.", whole))
    elif "torchvision" not in versions:
        mend = _command("torchvision", *pins(versions, "torch"), *index(versions))
        found.append(Mismatch("torchvision", "torchvision is not installed.", mend))
    if "torch" in versions:
        found += _xla_mismatch(versions, kind, whole)
    common = needed(root / COMMON)
    for wanted in common:
        version = versions.get(_normal(wanted.name))
        if version is None or not wanted.specifier.contains(version, prereleases=True):
            state = "is not installed" if version is None else f"is {version}"
            mend = _command(_text_of(wanted), *pins(versions))
            found.append(Mismatch(wanted.name, f"{wanted.name} {state}, and {_text_of(wanted)} is needed.", mend))
    names = ["torch", "torchvision", "torch_xla", *(wanted.name for wanted in common)]
    for name in names:
        found += _unmet(name, versions, requires, kind, whole)
    return found


def _xla_mismatch(versions: Mapping[str, str], kind: str, whole: str) -> list[Mismatch]:
    torch, ours = versions["torch"], versions.get("torch-xla")
    if ours is None:
        if kind == "tpu" and "torch-tpu" not in versions:
            return [Mismatch("torch_xla", "torch_xla, which a TPU needs, is not installed.", whole)]
        return []
    if fits(torch, ours):
        return []
    words = f"torch_xla {ours} doesn't fit torch {torch}: their first two numbers must agree."
    # where there is no TPU nothing needs it, and torch stays
    return [Mismatch("torch_xla", words, whole if kind == "tpu" else "python -m pip uninstall -y torch_xla")]


def fits(torch: str, torch_xla: str) -> bool:
    """Whether two releases pair: their first two numbers agree."""
    return _numbers(torch) == _numbers(torch_xla)


def _unmet(name: str, versions: Mapping[str, str], requires: Requires, kind: str, whole: str) -> list[Mismatch]:
    """What an installed package asks for and is there in a version that it doesn't take."""
    ours = versions.get(_normal(name))
    if ours is None:
        return []
    found = []
    for text in requires(name):
        asked = _packaging("requirements").Requirement(text)
        theirs = versions.get(_normal(asked.name))
        if theirs is None or (asked.marker is not None and not asked.marker.evaluate({"extra": ""})):
            continue
        if not asked.specifier.contains(theirs, prereleases=True):
            words = f"{name} {ours} asks for {_text_of(asked)}, and {theirs} is installed."
            if _normal(asked.name) != "torch":
                mend = _command(_text_of(asked), *pins(versions))
            elif kind == "tpu":
                mend = whole
            else:
                mend = _command(name, *pins(versions, "torch"), *index(versions))
            found.append(Mismatch(name, words, mend))
    return found


def _command(*parts: str) -> str:
    return shlex.join((*PIP, *parts))


def pins(versions: Mapping[str, str], *names: str) -> list[str]:
    """The installed torch and what hangs on it, as requirements that hold pip to them."""
    kept = names or ("torch", "torchvision", "torch-xla")
    return [f"{name}=={versions[name]}" for name in kept if name in versions]


def index(versions: Mapping[str, str]) -> list[str]:
    """Where more of the same build lie: torchvision's operations must be of torch's own CUDA version."""
    _, _, local = versions["torch"].partition("+")
    is_known = re.fullmatch(r"cpu|cu\d+|rocm[\d.]+|xpu", local)
    return ["--extra-index-url", f"{WHEELS}{local}"] if is_known else []


def _text_of(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


def _numbers(version: str) -> tuple[int, ...]:
    release: tuple[int, ...] = _packaging("version").Version(version).release
    return release[:2]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _packaging(part: str) -> Any:
    """A module of `packaging`: the installed one, else the one that pip has within itself."""
    module: ModuleType
    try:
        module = importlib.import_module(f"packaging.{part}")
    except ModuleNotFoundError:
        module = importlib.import_module(f"pip._vendor.packaging.{part}")
    return module
