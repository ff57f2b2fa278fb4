"""What lies in a backup folder, and how it is named.

    store.HASH.sqlite                    the database
    runs/RUN_ID/NAME.HASH.SUFFIX         a file of a run's folder
    manifest-NUMBER.json                 a generation: which of these make a whole history

A file is named after what it holds and never changed, so that a generation stays whole until it is removed, whenever
a process is killed. Nothing here relies on a rename.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

FORMAT = 1
STORE = "runs.sqlite"
"""The database's name in a home folder."""
KEPT = 2
"""Generations that are kept."""
_HASH = r"\.[0-9a-f]{16}"
_RUN_ID = r"[0-9]{8}-[0-9]{6}-[0-9a-f]{6}"
_STORE_FILE = re.compile(rf"store{_HASH}\.sqlite")
_RUN_FILE = re.compile(rf"runs/{_RUN_ID}/[^/\\\0]+?{_HASH}(\.[^./\\\0]*)?")
_RUN_PATH = re.compile(rf"runs/{_RUN_ID}/[^./\\\0][^/\\\0]*")
_MANIFEST = re.compile(r"manifest-([0-9]{6,})\.json")


@dataclass(frozen=True)
class Entry:
    """A file: `path` below the home folder, `file` below the backup folder, and what it must hold."""

    path: str
    file: str
    sha256: str
    bytes: int

    @property
    def run_id(self) -> str:
        return PurePosixPath(self.path).parts[1] if self.path != STORE else ""


@dataclass(frozen=True)
class Manifest:
    """One generation of a backup.

    Attributes:
        number: generations count from 1.
        history: which history of runs this is; a restored home goes on with the same one.
        writer: the home folder that it was made from.
        at: Unix time.
        run_ids: all runs in the database.
        checksum: of all of this; "" where it isn't written yet.
    """

    number: int
    history: str
    writer: str
    at: float
    run_ids: list[str]
    store: Entry
    files: list[Entry] = field(default_factory=list)
    checksum: str = ""

    @property
    def bytes(self) -> int:
        return self.store.bytes + sum(entry.bytes for entry in self.files)

    def entries(self) -> Iterator[Entry]:
        yield from self.files
        yield self.store


@dataclass(frozen=True)
class Shelf:
    """The generations in a backup folder, the newest first, and names of manifests that are damaged."""

    whole: list[Manifest]
    damaged: list[str]

    @property
    def next_number(self) -> int:
        numbers = [manifest.number for manifest in self.whole] + [number_of(name) or 0 for name in self.damaged]
        return max(numbers, default=0) + 1


def file_name(path: str, sha256: str) -> str:
    """The name below the backup folder of a file with this path below the home folder."""
    if path == STORE:
        return f"store.{sha256[:16]}.sqlite"
    inner = PurePosixPath(path)
    return str(inner.with_name(f"{inner.stem}.{sha256[:16]}{inner.suffix}"))


def manifest_name(number: int) -> str:
    return f"manifest-{number:06d}.json"


def number_of(name: str) -> int | None:
    """The number of the generation whose manifest is called so; None where no manifest is."""
    match = _MANIFEST.fullmatch(name)
    return int(match[1]) if match else None


def is_ours(file: str) -> bool:
    """Whether a file of a backup folder has a name that only backups give; others are never touched."""
    return bool(_STORE_FILE.fullmatch(file) or _RUN_FILE.fullmatch(file))


def to_text(manifest: Manifest) -> str:
    """The manifest as it is written, with its checksum."""
    plain = asdict(manifest)
    return json.dumps({"format": FORMAT, **plain, "checksum": _checksum(plain)}, indent=1)


def from_text(text: str) -> Manifest | None:
    """A manifest that was written so; None where it is damaged, cut or names anything that no backup does."""
    try:
        plain = json.loads(text)
        if plain.pop("format") != FORMAT or plain["checksum"] != _checksum(plain):
            return None
        store, files = Entry(**plain.pop("store")), [Entry(**entry) for entry in plain.pop("files")]
        # what a stranger wrote there must not lead out of the home folder
        is_sound = store.path == STORE and all(_RUN_PATH.fullmatch(entry.path) for entry in files)
        is_sound &= all(file_name(entry.path, entry.sha256) == entry.file for entry in [store, *files])
        return Manifest(**plain, store=store, files=files) if is_sound else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _checksum(plain: dict[str, Any]) -> str:
    bare = {name: value for name, value in plain.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(bare, sort_keys=True).encode()).hexdigest()


def read_shelf(folder: Path) -> Shelf:
    """All manifests of a backup folder.

    Raises:
        OSError: the folder can't be read, or isn't there.
    """
    whole, damaged = [], []
    for path in folder.iterdir():
        number = number_of(path.name)
        if number is None:
            continue
        manifest = from_text(path.read_bytes().decode(errors="replace"))
        if manifest and manifest.number == number:
            whole.append(manifest)
        else:
            damaged.append(path.name)
    return Shelf(sorted(whole, key=lambda manifest: -manifest.number), sorted(damaged))


def list_files(folder: Path) -> dict[str, int]:
    """Name below the folder and bytes of each file of ours in it.

    Raises:
        OSError: the folder can't be read.
    """
    places = [folder]
    if (folder / "runs").is_dir():
        places += [path for path in (folder / "runs").iterdir() if path.is_dir()]
    found = {}
    for place in places:
        for path in place.iterdir():
            name = path.relative_to(folder).as_posix()
            if is_ours(name):
                found[name] = path.stat().st_size
    return found
