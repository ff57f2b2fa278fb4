"""Where paths that come from a browser may lead: folders whose files may be read, and what lies hidden in them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from core.config import RunConfig
from core.errors import PathError

ROOTS_VARIABLE = "FINETUNE_ROOTS"
"""Further roots, joined as in PATH."""
HOSTED = ("/content", "/kaggle")
"""Where Colab and Kaggle keep a person's files."""
_HOW = f"others are opened with python -m core serve --root DIR, or by {ROOTS_VARIABLE}"


@dataclass(frozen=True)
class Roots:
    """The folders below which a path of a browser's must lie; what is hidden below them stays shut.

    A refusal is the same whether or not there is such a path.
    """

    folders: tuple[Path, ...]

    def check_path(self, value: str) -> None:
        """Refuse a path that leads out of the roots, by links, `..` or `~` too, or into something hidden.

        Raises:
            PathError: it does, or it can't be a path.
        """
        if value.lower().startswith("file:"):
            raise PathError(f"'{value}' is the address of a file, which is not taken.", fix="Write the path itself.")
        resolved = _resolved(value)
        if resolved is None or not any(_is_open(resolved, folder) for folder in map(_resolved, self._texts())):
            raise PathError(f"'{value}' is outside the folders that this dashboard may read.", fix=self._fix())

    def check_spec(self, spec: str) -> None:
        """Refuse a data SPEC that names a path which `check_path` refuses.

        Raises:
            PathError: it does.
        """
        # these bring torch, which a dashboard need not wait for at its start
        from core.data.sources import paths_in

        for path in paths_in(spec):
            self.check_path(path)

    def check_weights(self, weights: str) -> None:
        """Refuse weights that are a file which `check_path` refuses.

        Raises:
            PathError: they are.
        """
        from core.models.from_run import PREFIX

        if weights not in ("default", "none") and not weights.startswith(PREFIX):
            self.check_path(weights)

    def check_config(self, config: RunConfig) -> None:
        """Refuse a config whose data or weights name a path which `check_path` refuses.

        Raises:
            PathError: they do.
        """
        self.check_spec(config.data)
        self.check_weights(config.weights)

    def _texts(self) -> list[str]:
        return [str(folder) for folder in self.folders]

    def _fix(self) -> str:
        return f"Give a path below {' or '.join(self._texts())} that is not hidden; {_HOW}."


def roots_of(home: Path) -> Roots:
    """The roots of this process: the store's home, the working folder, the user's home, and those of the environment.

    Args:
        home: the store's.
    """
    given = [part for part in os.environ.get(ROOTS_VARIABLE, "").split(os.pathsep) if part.strip()]
    named = [folder for folder in map(_resolved, given) if folder is not None]
    usual = [home, Path.cwd(), _resolved("~"), *(Path(name) for name in HOSTED if Path(name).is_dir())]
    # a user without a home has "/", which would open everything without anybody having said so
    found = [folder for folder in usual if folder is not None and folder != Path(folder.anchor)]
    return Roots(tuple(_outermost([*found, *named])))


def _outermost(folders: Iterable[Path]) -> list[Path]:
    """Each once, without those that another one opens as well."""
    once = list(dict.fromkeys(folders))
    return [folder for folder in once if not any(other != folder and _is_open(folder, other) for other in once)]


def _resolved(value: str) -> Path | None:
    """Where a path really leads, whether or not something is there; None where it can't be one."""
    try:
        path = Path(value).expanduser()
        return path.resolve() if value and len(os.fsencode(path)) < os.pathconf("/", "PC_PATH_MAX") else None
    except (OSError, ValueError, RuntimeError):  # a NUL, an unknown home, a loop of links
        return None


def _is_open(path: Path, folder: Path | None) -> bool:
    """Whether `path` is `folder` or lies in it, and in nothing hidden of it; both resolved."""
    if folder is None or not path.is_relative_to(folder):
        return False
    return not any(part.startswith(".") for part in path.relative_to(folder).parts)
