"""The host's memory: what is left of it, and what a piece of work takes by torch's own account."""

from __future__ import annotations

import weakref
from pathlib import Path, PurePosixPath
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that are made within and still live, in backward too.

    So it is known what a step needs, however much memory this process has got and given back before, and whatever its
    other threads do; both make the process's size a poor measure. What an operation uses inside is not seen.

    Attributes:
        now: bytes that live at present.
        history: bytes that lived after each tensor was made, in order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.history = 0, list[int]()
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outcome = func(*args, **(kwargs or {}))
        # a view or an operation in place gives a storage that was there before, maybe from before all this
        given = {id(tensor.untyped_storage()) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        for tensor in tree_leaves(outcome):
            if isinstance(tensor, Tensor) and id(tensor.untyped_storage()) not in given:
                self._count(tensor.untyped_storage())
        return outcome

    def _count(self, storage: torch.UntypedStorage) -> None:
        number, size = id(storage), storage.nbytes()
        known = self._known.get(number)
        if known is not None and known() is storage:
            return

        def gone(_: object) -> None:
            self.now -= size
            self._known.pop(number, None)

        self._known[number] = weakref.ref(storage, gone)
        self.now += size
        self.history.append(self.now)

    @property
    def peak(self) -> int:
        """The most that ever lived at once."""
        return max(self.history, default=0)


def memory_left(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still take: what the machine has available, or the container if that is less.

    Args:
        proc: has `self/cgroup`.
        cgroups: where control groups of version 2 are, or the folder `memory` with those of version 1.
    """
    left = [int(psutil.virtual_memory().available)]
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, files = (cgroups / "memory", _FIRST) if controllers else (cgroups, _SECOND)
        inner = PurePosixPath(path.lstrip("/"))
        left += [room for group in (inner, *inner.parents) if (room := _room(root / group, *files)) is not None]
    return max(0, min(left))


_FIRST = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
_SECOND = "memory.max", "memory.current", "inactive_file"


def _room(group: Path, limit_file: str, used_file: str, spare_name: str) -> int | None:
    limit, used = _text(group / limit_file), _text(group / used_file)
    if not (limit.isdigit() and used.isdigit()):  # "max" is no limit
        return None
    stats = dict(line.split(" ", 1) for line in _text(group / "memory.stat").splitlines() if " " in line)
    # pages of files that nobody used lately are given back where memory is wanted
    return int(limit) - int(used) + int(stats.get(spare_name, 0))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
