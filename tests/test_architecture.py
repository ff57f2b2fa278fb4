"""Who may import whom: app -> pages -> ui -> core, never back."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = {
    "core": {"streamlit", "ui", "pages", "app"},
    "ui": {"pages", "app"},
    "pages": {"app", "torch", "sqlite3"},
}


def modules_of(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def all_imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            # of a package, its modules
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def imported_roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in all_imported(path)}


@pytest.mark.parametrize("room", FORBIDDEN)
def test_no_room_imports_back(room: str):
    offences = {str(path): imported_roots(path) & FORBIDDEN[room] for path in modules_of(room)}
    assert {path: names for path, names in offences.items() if names} == {}


def test_the_rooms_of_core_import_each_other_in_one_direction():
    names = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path for path in modules_of("core")}
    ends: dict[str, set[str]] = {}
    for name, path in names.items():
        imported = {found.split(".")[1] for found in all_imported(path) if found.startswith("core.")}
        ends.setdefault(name.split(".")[1], set()).update(imported - {name.split(".")[1]})
    # a room from which no other is left to be reached lies at the bottom
    while bottom := {room for room, others in ends.items() if not others & ends.keys()}:
        ends = {room: others for room, others in ends.items() if room not in bottom}
    assert ends == {}


def test_processes_speak_to_each_other_through_two_files_and_are_launched_without_torch():
    importing = [
        path.relative_to(ROOT).as_posix() for path in modules_of("core") if "torch.distributed" in all_imported(path)
    ]
    assert sorted(importing) == ["core/devices/ranks.py", "core/running/ranks.py"]
    assert "torch" not in imported_roots(ROOT / "core" / "running" / "launch.py")


def test_torch_xla_is_imported_in_one_file_and_inside_functions():
    importing = [path for path in modules_of("core") if "torch_xla" in imported_roots(path)]
    assert [path.relative_to(ROOT).as_posix() for path in importing] == ["core/devices/xla.py"]
    tree = ast.parse(importing[0].read_text())
    top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not any("torch_xla" in ast.unparse(node) for node in top)
